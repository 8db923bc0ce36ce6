"""The gRPC methods: paths -> calls. Access is checked here, before a message is decoded."""

from __future__ import annotations

from collections.abc import Callable

from shmserve.errors import ServeError
from shmserve.gateway.auth.actions import Action
from shmserve.gateway.grpc.calls import AskCall, CheckCall, InferCall, WatchCall
from shmserve.gateway.grpc.codes import rpc_error
from shmserve.gateway.grpc.messages import HEALTH, INFERENCE
from shmserve.gateway.grpc.rpcs import RPCS, Rpc
from shmserve.gateway.grpc.services import Services
from shmserve.gateway.grpc.stream import StreamCall
from shmserve.gateway.http2.codes import Code, RpcError
from shmserve.gateway.http2.interface import ServiceCall, TransportStream
from shmserve.gateway.limits.caller_shares import Payer

Make = Callable[[TransportStream, Payer], ServiceCall]


class Methods:
    """The application of a gRPC listener."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._access = services.access
        self._paths: dict[str, tuple[Action, Make]] = {
            f"/{INFERENCE}/ModelInfer": (Action.INFER, lambda stream, payer: InferCall(services, stream, payer)),
            f"/{INFERENCE}/ModelStreamInfer": (Action.INFER, lambda stream, payer: StreamCall(services, stream, payer)),
            f"/{HEALTH}/Check": (Action.READY, lambda stream, payer: CheckCall(services, stream, payer)),
            f"/{HEALTH}/Watch": (Action.READY, lambda stream, payer: WatchCall(services, stream, payer)),
        }
        for name, rpc in RPCS.items():
            self._paths[f"/{INFERENCE}/{name}"] = rpc.action, self._query_call(rpc)

    def _query_call(self, rpc: Rpc) -> Make:
        return lambda stream, payer: AskCall(self._services, stream, payer, rpc)

    def __call__(self, stream: TransportStream) -> ServiceCall:
        method = self._paths.get(stream.path)
        if method is None:
            raise RpcError(Code.UNIMPLEMENTED, f"unknown method {stream.path[:200]}")
        try:
            token = self._access.check(method[0], stream.metadata.get)
        except ServeError as error:
            raise rpc_error(error) from error
        return method[1](stream, stream.payer(token))

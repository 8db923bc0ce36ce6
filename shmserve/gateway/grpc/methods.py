"""The gRPC methods: paths -> calls. Access is checked here, before a message is decoded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shmserve.errors import ServeError
from shmserve.gateway.grpc.calls import AskCall, CheckCall, InferCall, WatchCall
from shmserve.gateway.grpc.rpcs import RPCS
from shmserve.gateway.grpc.services import Services, rpc_error
from shmserve.gateway.grpc.stream import StreamCall
from shmserve.gateway.http2.interface import ServiceCall, TransportStream
from shmserve.gateway.limits.caller_shares import Payer
from shmserve.protocol.actions import Action
from shmserve.protocol.grpc.codes import Code, RpcError
from shmserve.protocol.grpc.messages import HEALTH, INFERENCE

Make = Callable[[TransportStream, Payer], ServiceCall]
CALLS: dict[str, Callable[[Services, TransportStream, Payer], ServiceCall]] = {
    "ModelInfer": InferCall,
    "ModelStreamInfer": StreamCall,
    f"{HEALTH}/Check": CheckCall,
    f"{HEALTH}/Watch": WatchCall,
}
"""Methods whose response is not a document, named as in the table of actions."""


class Methods:
    """The application of a gRPC listener."""

    def __init__(self, services: Services) -> None:
        self._access = services.access
        self._paths: dict[str, tuple[Action, Make]] = {}
        for action in Action:
            for name in action.row.grpc:
                call = partial(CALLS[name], services) if name in CALLS else partial(AskCall, services, rpc=RPCS[name])
                self._paths[f"/{name}" if "/" in name else f"/{INFERENCE}/{name}"] = action, call

    def __call__(self, stream: TransportStream) -> ServiceCall:
        method = self._paths.get(stream.path)
        if method is None:
            raise RpcError(Code.UNIMPLEMENTED, f"unknown method {stream.path[:200]}")
        try:
            token = self._access.check(method[0], stream.metadata.get)
        except ServeError as error:
            raise rpc_error(error) from error
        return method[1](stream, stream.payer(token))

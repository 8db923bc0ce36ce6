"""KServe v2 over gRPC: one connection per slot. Requests are encoded once; responses are decoded only for streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf import json_format

from shmserve.errors import ConnectionLost, ModelFailed, Unsupported
from shmserve.protocol.grpc.messages import INFERENCE, POOL, message_class, methods
from shmserve.tools.load.plan import Endpoint
from shmserve.tools.load.targets import base
from shmserve.tools.load.targets.base import (
    Arrays,
    ModelFacts,
    RequestSlot,
    SequencePart,
    TargetOptions,
    facts_of,
    latest_statistics,
)
from shmserve.tools.load.targets.connecting import connect, explained, tls_of
from shmserve.tools.load.targets.grpc_connection import GrpcConnection, framed, head_block
from shmserve.tools.load.targets.kserve import parameters, raw_bytes

_FINAL = "triton_final_response"


class GrpcTarget:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._tls = tls_of(endpoint)
        self._methods = methods(INFERENCE)
        self._slots: list[_GrpcSlot] = []
        self._control: GrpcConnection | None = None
        self._request = message_class("inference.ModelInferRequest")
        self._response = message_class("inference.ModelStreamInferResponse")

    async def facts(self, model: str, version: str) -> ModelFacts:
        with explained(self._endpoint):
            server = await self._ask("ServerMetadata")
        metadata = await self._ask("ModelMetadata", name=model, version=version)
        config = (await self._ask("ModelConfig", name=model, version=version)).get("config", {})
        return facts_of(metadata, config, server)

    def prepare(self, arrays: Arrays, facts: ModelFacts, options: TargetOptions) -> Any:
        request = self._request(model_name=options.model, model_version=options.version)
        for name, array in arrays.items():
            request.inputs.add(name=name, datatype=facts.inputs[name]["datatype"], shape=list(array.shape))
            request.raw_input_contents.append(raw_bytes(array))
        for name in options.outputs:
            request.outputs.add(name=name)
        return _Body(request, options, self._request)

    async def slot(self) -> RequestSlot:
        heads = self._head("ModelInfer"), self._head("ModelStreamInfer")
        slot = _GrpcSlot(await self._connect(), self._connect, *heads, self._response)
        self._slots.append(slot)
        return slot

    async def statistics(self, model: str, version: str) -> dict[str, Any]:
        try:
            return latest_statistics(await self._ask("ModelStatistics", name=model, version=version))
        except Unsupported:
            return {}

    async def close(self) -> None:
        for slot in self._slots:
            slot.close()
        if self._control is not None:
            self._control.close()

    async def _connect(self) -> GrpcConnection:
        connection = await connect(GrpcConnection, self._endpoint, self._tls)
        await self._in_time(connection, connection.ready, "the connection")
        return connection

    async def _in_time(self, connection: GrpcConnection, answer: asyncio.Future[None], what: str) -> None:
        """Waits for an answer on the connection."""
        try:
            await asyncio.wait_for(answer, base.ASK_S)
        except asyncio.TimeoutError as error:
            text = f"{self._endpoint.origin} has not answered {what} within {base.ASK_S:g} s"
            raise ConnectionLost(f"{text}: is it a KServe server?") from error
        finally:
            if answer.cancelled():  # there was none in time, or the load has ended
                connection.close()

    def _head(self, method: str) -> bytes:
        endpoint = self._endpoint
        scheme = "https" if endpoint.is_secure else "http"
        return head_block(scheme, endpoint.authority, f"/{INFERENCE}/{method}", endpoint.headers)

    async def _ask(self, method: str, **fields: Any) -> dict[str, Any]:
        kind = self._methods[method]
        request = framed(message_class(kind.input_type.full_name)(**fields).SerializeToString())
        if self._control is None or self._control.closed:
            self._control = await self._connect()
        results: list[bytes] = []
        control = self._control
        await self._in_time(control, control.call(self._head(method), request, results.append), method)
        answer = message_class(kind.output_type.full_name).FromString(b"".join(results))
        document: dict[str, Any] = json_format.MessageToDict(
            answer, preserving_proto_field_name=True, descriptor_pool=POOL
        )
        return document


class _Body:
    """An encoded request with its gRPC prefix. Protobuf accepts fields in any order, so parameters are appended."""

    def __init__(self, request: Any, options: TargetOptions, kind: Any) -> None:
        self._options, self._kind = options, kind
        self._base: bytes = request.SerializeToString()
        self._whole = framed(self._base + self._more(None, False))
        self._streamed = framed(self._base + self._more(None, True))

    def request(self, part: SequencePart | None, stream: bool = False) -> bytes:
        if part is None:
            return self._streamed if stream else self._whole
        return framed(self._base + self._more(part, stream))

    def _more(self, part: SequencePart | None, stream: bool) -> bytes:
        message = self._kind()
        result = parameters(self._options, part) | ({"triton_enable_empty_final_response": True} if stream else {})
        for name, value in result.items():
            if isinstance(value, bool):
                message.parameters[name].bool_param = value
            else:
                message.parameters[name].int64_param = value
        data: bytes = message.SerializeToString()
        return data


class _GrpcSlot:
    def __init__(
        self,
        connection: GrpcConnection,
        connect: Callable[[], Awaitable[GrpcConnection]],
        infer: bytes,
        stream: bytes,
        response: Any,
    ) -> None:
        self._connection = connection
        self._connect = connect
        self._infer = infer
        self._stream = stream
        self._response = response

    def close(self) -> None:
        self._connection.close()

    async def send(self, body: Any, part: SequencePart | None) -> None:
        if self._connection.closed:
            self._connection = await self._connect()
        try:
            await self._connection.call(self._infer, body.request(part), _ignore)
        except asyncio.CancelledError:
            self._connection.cancel()
            raise

    async def stream(self, body: Any, part: SequencePart | None, on_answer: Callable[[], None]) -> None:
        if self._connection.closed:
            self._connection = await self._connect()
        connection, errors = self._connection, []

        def receive(data: bytes) -> None:
            answer = self._response.FromString(data)
            if answer.error_message:
                errors.append(ModelFailed(answer.error_message))
            elif answer.infer_response.outputs:
                on_answer()
            if errors or answer.infer_response.parameters[_FINAL].bool_param:
                connection.end()

        try:
            await connection.call(self._stream, body.request(part, stream=True), receive, end=False)
        except asyncio.CancelledError:
            connection.cancel()
            raise
        if errors:
            raise errors[0]


def _ignore(message: bytes) -> None:
    return

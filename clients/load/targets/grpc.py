"""KServe v2 over gRPC, by grpcio. Requests are encoded once; responses are decoded only where their content counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf import json_format

from shmserve.clients.load.plan import Endpoint
from shmserve.clients.load.targets.base import Arrays, ModelFacts, Part, RequestOptions, Slot
from shmserve.clients.load.targets.kserve import facts_of, parameters, raw_bytes
from shmserve.errors import ConnectionLost, InvalidRequest, ModelFailed, NotFound, ServeError, Unavailable, Unsupported
from shmserve.gateway.grpc.messages import INFERENCE, POOL, message_class, methods

OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
CODES: dict[Any, type[ServeError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
}
SLOTS = 64
"""Slots that share a connection: servers limit the streams of an HTTP/2 connection, usually to 100 or more."""
_PREFIX = f"/{INFERENCE}/"
_FINAL = "triton_final_response"


class GrpcTarget:
    def __init__(self, endpoint: Endpoint) -> None:
        self._address = endpoint.authority
        self._metadata = tuple((name.lower(), value) for name, value in endpoint.headers)
        self._methods = methods(INFERENCE)
        self._channels: list[Any] = []
        self._slots = 0
        self._request = message_class("inference.ModelInferRequest")
        self._response = message_class("inference.ModelStreamInferResponse")

    async def facts(self, model: str, version: str) -> ModelFacts:
        server = await self._ask("ServerMetadata")
        metadata = await self._ask("ModelMetadata", name=model, version=version)
        config = (await self._ask("ModelConfig", name=model, version=version)).get("config", {})
        return facts_of(metadata, config, server)

    def prepare(self, arrays: Arrays, facts: ModelFacts, options: RequestOptions) -> Any:
        request = self._request(model_name=options.model, model_version=options.version)
        for name, array in arrays.items():
            request.inputs.add(name=name, datatype=facts.inputs[name]["datatype"], shape=list(array.shape))
            request.raw_input_contents.append(raw_bytes(array))
        for name in options.outputs:
            request.outputs.add(name=name)
        return _Body(request, options, self._request)

    async def slot(self) -> Slot:
        channel = self._channel(self._slots // SLOTS)
        self._slots += 1
        return _GrpcSlot(channel, self._response, self._metadata, self._address)

    async def statistics(self, model: str, version: str) -> dict[str, Any]:
        try:
            entries = (await self._ask("ModelStatistics", name=model, version=version)).get("model_stats")
        except Unsupported:
            return {}
        return dict(entries[0]) if entries else {}

    async def close(self) -> None:
        while self._channels:
            await self._channels.pop().close()

    def _channel(self, number: int) -> Any:
        while len(self._channels) <= number:
            options = (*OPTIONS, ("grpc.use_local_subchannel_pool", 1))
            self._channels.append(grpc.aio.insecure_channel(self._address, options))
        return self._channels[number]

    async def _ask(self, method: str, **fields: Any) -> dict[str, Any]:
        kind = self._methods[method]
        request = message_class(kind.input_type.full_name)(**fields)
        call = self._channel(0).unary_unary(_PREFIX + method)
        try:
            answer = message_class(kind.output_type.full_name).FromString(
                await call(request.SerializeToString(), metadata=self._metadata)
            )
        except grpc.aio.AioRpcError as error:
            raise _error(error, self._address) from error
        found: dict[str, Any] = json_format.MessageToDict(
            answer, preserving_proto_field_name=True, descriptor_pool=POOL
        )
        return found


class _Body:
    """An encoded request. Fields of protobuf may be repeated in any order, so that parameters are only appended."""

    def __init__(self, request: Any, options: RequestOptions, kind: Any) -> None:
        self._options, self._kind = options, kind
        self._base: bytes = request.SerializeToString()
        self._whole: bytes = self._base + self._more(None, False)
        self._streamed: bytes = self._base + self._more(None, True)

    def request(self, part: Part | None, stream: bool = False) -> bytes:
        if part is None:
            return self._streamed if stream else self._whole
        return self._base + self._more(part, stream)

    def _more(self, part: Part | None, stream: bool) -> bytes:
        message = self._kind()
        found = parameters(self._options, part) | ({"triton_enable_empty_final_response": True} if stream else {})
        for name, value in found.items():
            if isinstance(value, bool):
                message.parameters[name].bool_param = value
            else:
                message.parameters[name].int64_param = value
        data: bytes = message.SerializeToString()
        return data


class _GrpcSlot:
    def __init__(self, channel: Any, response: Any, metadata: tuple[tuple[str, str], ...], where: str) -> None:
        self._infer = channel.unary_unary(_PREFIX + "ModelInfer")
        self._stream = channel.stream_stream(_PREFIX + "ModelStreamInfer")
        self._metadata = metadata
        self._where = where
        self._response = response

    async def send(self, body: Any, part: Part | None) -> None:
        try:
            await self._infer(body.request(part), metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise _error(error, self._where) from error

    async def stream(self, body: Any, part: Part | None, on_answer: Callable[[], None]) -> None:
        done = asyncio.Event()
        answers = self._stream(_one(body.request(part, stream=True), done), metadata=self._metadata)
        try:
            async for data in answers:
                answer = self._response.FromString(data)
                if answer.error_message:
                    raise ModelFailed(answer.error_message)
                final = answer.infer_response.parameters[_FINAL].bool_param
                if answer.infer_response.outputs:
                    on_answer()
                if final:
                    return
        except grpc.aio.AioRpcError as error:
            raise _error(error, self._where) from error
        finally:
            done.set()
            answers.cancel()


async def _one(request: bytes, done: asyncio.Event) -> AsyncIterator[bytes]:
    """The stream stays open until the last response."""
    yield request
    await done.wait()


def _error(error: Any, where: str) -> ServeError:
    code, text = error.code(), error.details() or "no text"
    if code is grpc.StatusCode.UNAVAILABLE and "connect" in text.lower():
        return ConnectionLost(f"no server at grpc://{where} ({text}): start one, or select another by --url")
    return CODES.get(code, ModelFailed)(f"gRPC {code.name}: {text}")

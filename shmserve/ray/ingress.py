"""The deployment that receives KServe requests from the proxies of Ray Serve and passes each to a replica.

If a replica is lost, its requests that belong to no sequence are sent to another replica, since they change nothing at
the server. A response that has begun is never repeated.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from shmserve.errors import ConnectionLost, Denied, Internal, InvalidRequest, ServeError
from shmserve.gateway.auth.actions import CHANGES, FORMS, STREAMED, TO_MODELS
from shmserve.gateway.http.routes import NoRoute, resolve
from shmserve.gateway.kserve.forms import form_of
from shmserve.gateway.kserve.status import grpc_of, http_of
from shmserve.gateway.upstream.documents import Route
from shmserve.protocol.actions import Action
from shmserve.protocol.grpc.messages import INFERENCE, message_class, read
from shmserve.ray.forward import Fields, end_to_end
from shmserve.ray.grpc_services import SERVER_ONLY, STREAM, EncodedReply, paths
from shmserve.ray.handle import as_serve_error, is_lost

log = logging.getLogger("shmserve")

UNAVAILABLE = {"http": 503, "call": grpc.StatusCode.UNAVAILABLE.value[0]}
"""Method of a replica -> the status of a request that the server refuses, or whose gateway has lost the broker."""
OF_ONE_SERVER = (CHANGES - frozenset(TO_MODELS)) | {Action.MEMORY_STATUS, Action.PAGE_EVENTS, Action.PAGE_MODEL}
OPENAI = frozenset(action for action in TO_MODELS if not any("{model}" in path for path in action.row.http))
"""Actions whose request names its model in the body."""
REFUSED = "send this to a server, not to the application"
NOT_REPEATED = "the server failed while processing this request; do not retry it, because it may have run"
SEQUENCE_FIELD = "x-sequence-id"
HEADER_LENGTH = "inference-header-content-length"
MAX_DIGITS = 19
"""Digits of the largest length; more are left to the server to refuse."""
STREAM_PATH = f"/{INFERENCE}/{STREAM}"
STREAM_RESPONSE = "inference.ModelStreamInferResponse"
OWN_METADATA = ("application", "request_id", "multiplexed_model_id", "session_id")
"""gRPC metadata that Ray Serve itself uses."""


class _Parameters(msgspec.Struct, frozen=True):
    sequence_id: int | str = 0


class _Document(msgspec.Struct, frozen=True):
    """The fields that the ingress needs from the JSON of a request."""

    model: str = ""
    parameters: _Parameters = _Parameters()


class CallTarget(msgspec.Struct, frozen=True):
    """`sequence`: the sequence of the request, if any. `repeatable`: the request may be sent again."""

    model: str = ""
    sequence: str = ""
    opaque: bool = False
    """The body is compressed, so the request may belong to a sequence."""

    @property
    def repeatable(self) -> bool:
        return not self.sequence and not self.opaque


def http_target(route: Route, fields: dict[str, str], body: bytes) -> CallTarget:
    """Parses the JSON only if it can name a model or a sequence."""
    model, sequence = route.model, fields.get(SEQUENCE_FIELD, "")
    if fields.get("content-encoding", "identity") != "identity":
        return CallTarget(model, sequence, opaque=True)
    if route.action in FORMS:
        return CallTarget(_model_in_form(body), sequence)
    length = fields.get(HEADER_LENGTH, "")
    is_number = length.isascii() and length.isdecimal() and len(length) <= MAX_DIGITS
    text = body[: int(length)] if is_number else body
    if route.action in OPENAI or (not sequence and b'"sequence_id"' in text):
        try:
            document = msgspec.json.decode(text, type=_Document)
        except (msgspec.DecodeError, RecursionError):
            return CallTarget(model, sequence)  # the server reports the error
        model = model or document.model
        sequence = sequence or str(document.parameters.sequence_id or "")
    return CallTarget(model, sequence)


def _model_in_form(body: bytes) -> str:
    work = form_of(body)
    try:
        while True:
            next(work)
    except StopIteration as end:
        model = end.value.fields.get("model", "")
        return model if isinstance(model, str) else ""
    except InvalidRequest:
        return ""  # the server reports the error


def grpc_target(name: str, message: bytes) -> CallTarget:
    if name == "ModelInfer":
        request = read(message_class("inference.ModelInferRequest"), message)
        parameter = request.parameters.get("sequence_id")
        sequence = "" if parameter is None else str(parameter.int64_param or parameter.string_param or "")
        return CallTarget(request.model_name, sequence)
    if name in ("ModelReady", "ModelMetadata", "ModelConfig"):
        return CallTarget(read(message_class(f"inference.{name}Request"), message).name)
    return CallTarget()


class Ingress:
    """`servers`: the handle of the replicas. `max_input_bytes`: maximum size of a request body."""

    def __init__(self, servers: Any, retries: int, max_input_bytes: int) -> None:
        self._servers = servers
        self._retries = retries
        self._max_input_bytes = max_input_bytes

    async def __call__(self, request: Request) -> Response:
        scope = request.scope
        path = request.url.path.removeprefix(scope.get("root_path", "")) or "/"
        if scope["query_string"]:
            path += "?" + scope["query_string"].decode("latin-1")
        route = resolve(request.method, path)
        if isinstance(route, NoRoute):
            allow = {"Allow": route.allow} if route.allow else None
            return _failed(route.status, route.text, allow)
        if route.action in OF_ONE_SERVER:
            return _failed(403, REFUSED)
        body = await self._body(request)
        if body is None:
            return _failed(413, f"the body exceeds the limit of {self._max_input_bytes} bytes (max_input_bytes)")
        fields = end_to_end((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw)
        target = http_target(route, {name.lower(): value for name, value in fields}, body)
        arguments = (target.model, request.method, path, fields, body)
        try:
            if route.action in STREAMED:
                return await self._streamed(target, arguments)
            status, headers, content = await self._send(target, "http", *arguments)
            return _response(Response(content, status), headers)
        except ServeError as error:
            return _failed(http_of(error), str(error))

    async def call(self, name: str, path: str, message: bytes, context: Any) -> EncodedReply:
        """A unary gRPC call."""
        try:
            if name in SERVER_ONLY:
                raise Denied(REFUSED)
            target = grpc_target(name, message)
            metadata = {key: value for key, value in context.invocation_metadata() if _is_passed(key)}
            code, details, reply = await self._send(target, "call", target.model, path, message, metadata)
        except ServeError as error:
            code, details, reply = _code(error), str(error), b""
        if code:
            context.set_code(_status(code))
            context.set_details(details)
            raise RefusedCall(details)
        return EncodedReply(reply)

    async def ModelStreamInfer(self, requests: AsyncIterator[bytes], grpc_context: Any) -> AsyncIterator[EncodedReply]:
        """Answers the messages one after another, each by the replica for its model and sequence."""
        metadata = {key: value for key, value in grpc_context.invocation_metadata() if _is_passed(key)}
        async for message in requests:
            try:
                target = grpc_target("ModelInfer", message)
                async for reply in self._parts(target, "stream_call", target.model, STREAM_PATH, message, metadata):
                    yield EncodedReply(reply)
            except ServeError as error:
                yield EncodedReply(message_class(STREAM_RESPONSE)(error_message=str(error)).SerializeToString())

    # ------------------------------------------------------------------------------------------------ internals

    async def _body(self, request: Request) -> bytes | None:
        """The request body, or None if it is too large."""
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_input_bytes:
            return None
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_input_bytes:
                return None
        return bytes(body)

    def _handle(self, target: CallTarget) -> Any:
        session = f"{target.model}:{target.sequence}" if target.sequence else ""
        return self._servers.options(multiplexed_model_id=target.model, session_id=session)

    async def _send(self, target: CallTarget, method: str, *arguments: Any) -> Any:
        """A replica's reply. Retries if the replica was lost, refused the request, or lost its server."""
        handle = getattr(self._handle(target), method)
        for remaining in range(self._retries if target.repeatable else 0, -1, -1):
            try:
                reply = await handle.remote(*arguments)
                if not (remaining and reply[0] == UNAVAILABLE[method]):
                    return reply
            except Exception as error:
                if not (remaining and is_lost(error)):
                    raise _error_for(error, target) from None
        raise AssertionError("the loop returns or raises")

    async def _streamed(self, target: CallTarget, arguments: tuple[Any, ...]) -> Response:
        parts = self._parts(target, "http_stream", *arguments)
        status, headers = await anext(parts)
        return _response(StreamingResponse(parts, status), headers)

    async def _parts(self, target: CallTarget, method: str, *arguments: Any) -> AsyncIterator[Any]:
        """The parts of a replica's reply. Retries until the first part has arrived."""
        handle = getattr(self._handle(target).options(stream=True), method)
        remaining, begun = self._retries if target.repeatable else 0, False
        while True:
            try:
                async for part in handle.remote(*arguments):
                    begun = True
                    yield part
                return
            except Exception as error:
                if begun or not (remaining and is_lost(error)):
                    raise _error_for(error, target) from None
                remaining -= 1


class RefusedCall(Exception):
    """A gRPC call that ends with the code and details of its context."""


def _error_for(error: BaseException, target: CallTarget) -> BaseException:
    if is_lost(error) and not target.repeatable:
        return ConnectionLost(NOT_REPEATED)
    converted = as_serve_error(error)
    if isinstance(converted, ServeError):
        return converted
    log.error("a request failed in Ray", exc_info=error)
    return Internal("the request failed in Ray; the log of the application says why")


def _response(response: Response, headers: Fields) -> Response:
    """The response with the server's header fields instead of those that starlette has set."""
    response.raw_headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    return response


def _failed(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps({"error": text}), status, headers, media_type="application/json")


def _is_passed(key: str) -> bool:
    return key not in OWN_METADATA and not key.startswith((":", "grpc-")) and key not in ("user-agent", "content-type")


def _code(error: ServeError) -> int:
    status = grpc.StatusCode[grpc_of(error)]
    return int(status.value[0])


def _status(code: int) -> Any:
    return next(status for status in grpc.StatusCode if status.value[0] == code)


def _call(name: str, path: str) -> Any:
    async def call(self: Ingress, request: bytes, grpc_context: Any) -> EncodedReply:
        return await self.call(name, path, request, grpc_context)

    call.__name__ = name
    return call


for _name, _path in paths().items():
    setattr(Ingress, _name, _call(_name, _path))

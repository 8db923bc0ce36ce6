"""Errors in the form of OpenAI: a JSON object with a message, a type, a parameter and a code.

Statuses are those of the other endpoints, with two exceptions, because OpenAI's clients retry a request after 429 and
after 500 or above: an exceeded share is 429, and an unsupported feature is 400.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shmserve.errors import InvalidRequest, ServeError
from shmserve.gateway.kserve.status import encodable, http_of, text_of
from shmserve.gateway.limits.caller_shares import ShareExceeded

KIND = "openai"
"""`Route.kind` of these endpoints."""
_INVALID, _SERVER = "invalid_request_error", "server_error"
_CODES = {
    "UNAUTHENTICATED": "invalid_api_key",
    "DENIED": "insufficient_permissions",
    "NOT_FOUND": "model_not_found",
    "UNSUPPORTED": "unsupported",
}
"""Code of an error -> `code` for the client, where OpenAI defines one. For other client errors, it is null."""
_ANTHROPIC = {
    "invalid_api_key": "authentication_error",
    "insufficient_permissions": "permission_error",
    "model_not_found": "not_found_error",
    "rate_limit_exceeded": "rate_limit_error",
    "unavailable": "overloaded_error",
}
"""`code` for the client -> `type` of Anthropic."""
_encode = msgspec.json.Encoder().encode


class BadParameter(InvalidRequest):
    """A field of the request is invalid. `param`: its name, as a path."""

    def __init__(self, param: str | None, text: str, hint: str | None = None) -> None:
        super().__init__(text)
        self.param = param
        self.hint = hint
        """`code` for the client."""


def body(status: int, text: str, code: str | None = None, param: str | None = None) -> bytes:
    """The error as a JSON document."""
    kind = _SERVER if status >= 500 else "requests" if status == 429 else _INVALID
    document: dict[str, Any] = {"message": encodable(text), "type": kind, "param": param, "code": code}
    return _encode({"error": document})


def response(error: ServeError) -> tuple[int, bytes]:
    """Status and body."""
    if isinstance(error, ShareExceeded):
        return 429, body(429, text_of(error), "rate_limit_exceeded")
    status = http_of(error)
    if isinstance(error, BadParameter):
        return status, body(status, text_of(error), error.hint, error.param)
    code = _CODES.get(error.code)
    if error.code == "UNSUPPORTED":
        status = 400
    if code is None and status >= 500:
        code = error.code.lower()
    return status, body(status, text_of(error), code)


def anthropic_body(document: bytes) -> bytes:
    """The error in Anthropic's form. `document`: in OpenAI's."""
    error = msgspec.json.decode(document)["error"]
    kind = _ANTHROPIC.get(error["code"], "api_error" if error["type"] == _SERVER else _INVALID)
    return _encode({"type": "error", "error": {"type": kind, "message": error["message"]}})

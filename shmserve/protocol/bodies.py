"""The JSON bodies of queries and operations."""

from __future__ import annotations

from typing import Any

import msgspec

from shmserve.errors import InvalidRequest

MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of the decoder for malformed input."""


def decode_body(body: bytes, kind: Any, what: str = "the operation") -> Any:
    """Decodes the JSON body of an operation without files. Raises InvalidRequest."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except MALFORMED as error:
        raise InvalidRequest(f"invalid body of {what}: {error}") from None

"""The JSON bodies of queries, operations and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from shmserve.errors import InvalidRequest
from shmserve.protocol.messages import FIELD_BYTES, Answer

MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of the decoder for malformed input. Nesting that is too deep raises RecursionError, even in a field that is
skipped."""


def decode_body(body: bytes, kind: Any, what: str = "the operation") -> Any:
    """Decodes the JSON body of a query or an operation. Raises InvalidRequest."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except MALFORMED as error:
        raise InvalidRequest(f"invalid body of {what}: {error}") from None


def pieces_of(body: bytes) -> list[bytes]:
    """The body in pieces that fit into a field; an empty body is one piece."""
    return [body[start : start + FIELD_BYTES] for start in range(0, len(body) or 1, FIELD_BYTES)]


def answers_of(request: int, pieces: Sequence[bytes]) -> list[Answer]:
    """The messages of an answer, in order."""
    return [Answer(request, piece, number < len(pieces)) for number, piece in enumerate(pieces, 1)]

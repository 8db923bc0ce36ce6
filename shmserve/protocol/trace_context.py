"""The W3C trace context of a request: its values are sent as the parameters `traceparent` and `tracestate`, over every
endpoint."""

from __future__ import annotations

import re

from msgspec import Struct

TRACE_PARENT, TRACE_STATE = "traceparent", "tracestate"
TRACE_CONTEXT = (TRACE_PARENT, TRACE_STATE)
"""The request parameters of the trace context. No response depends on them."""
PARENT_LENGTH = 55
"""Length of a traceparent of version 00. Later versions may append to it."""
STATE_LENGTH = 512
"""A longer tracestate is left out, as W3C permits."""

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", re.ASCII)
_SAMPLED = 1


class TraceContext(Struct, frozen=True):
    """`trace` and `span` are hexadecimal."""

    trace: str
    span: str
    sampled: bool
    state: str = ""


def parsed(parent: object, state: object = "") -> TraceContext | None:
    """None if `parent` is not a valid traceparent."""
    if not isinstance(parent, str):
        return None
    fields = _PARENT.match(parent)
    if fields is None:
        return None
    version, trace, span, flags = fields.groups()
    rest = parent[PARENT_LENGTH:]
    if version == "ff" or (rest and (version == "00" or rest[0] != "-")):
        return None
    if trace == "0" * 32 or span == "0" * 16:
        return None
    kept = state if isinstance(state, str) and len(state) <= STATE_LENGTH and state.isprintable() else ""
    return TraceContext(trace, span, bool(int(flags, 16) & _SAMPLED), kept)

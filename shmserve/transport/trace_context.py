"""The trace context of the calling code, if it uses OpenTelemetry."""

from __future__ import annotations

import sys

from shmserve.protocol.trace_context import TRACE_PARENT, TRACE_STATE

_SAMPLED = 1


def current_context() -> dict[str, str] | None:
    """The request parameters for the current span, if it is sampled. Does not import OpenTelemetry: if the application
    has not imported it, there is no span."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    context = api.get_current_span().get_span_context()
    if not context.is_valid or not context.trace_flags & _SAMPLED:
        return None
    found = {TRACE_PARENT: f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}
    if context.trace_state:
        found[TRACE_STATE] = context.trace_state.to_header()
    return found

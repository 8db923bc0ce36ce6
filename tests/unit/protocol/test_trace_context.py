"""The W3C trace context: the specification's examples of valid and invalid values."""

from __future__ import annotations

import pytest

from shmserve.protocol.trace_context import STATE_LENGTH, TraceContext, parsed
from tests.support.cases import cases

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(("flags", "sampled"), [("01", True), ("00", False), ("03", True), ("fe", False)])
def test_the_sampled_flag_is_the_lowest_bit(flags: str, sampled: bool) -> None:
    assert parsed(f"00-{TRACE}-{SPAN}-{flags}", "a=1,b=2") == TraceContext(TRACE, SPAN, sampled, "a=1,b=2")
    for more in ("", "-what-later-versions-append"):
        assert parsed(f"cc-{TRACE}-{SPAN}-{flags}{more}") == TraceContext(TRACE, SPAN, sampled)


@cases(
    "",
    7,
    None,
    "00",
    f"00-{TRACE}-{SPAN}",
    f"00-{TRACE}-{SPAN}-1",
    f"00-{TRACE.upper()}-{SPAN}-01",
    f"ff-{TRACE}-{SPAN}-01",
    f"00-{'0' * 32}-{SPAN}-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"00-{TRACE}-{SPAN}-01-x",
    f"cc-{TRACE}-{SPAN}-01x",
    f" 00-{TRACE}-{SPAN}-01",
    f"00-{TRACE}-{SPAN}-01\n",
)
def test_an_invalid_traceparent_is_ignored(parent: object) -> None:
    assert parsed(parent) is None


@pytest.mark.parametrize("state", ["a" * (STATE_LENGTH + 1), "a=1\nb=2", 5])
def test_an_invalid_tracestate_is_left_out(state: object) -> None:
    assert parsed(f"00-{TRACE}-{SPAN}-01", state) == TraceContext(TRACE, SPAN, True)

"""Headers and trace contexts that become parameters of requests."""

from __future__ import annotations

import pytest

from shmserve.errors import InvalidRequest
from shmserve.gateway.auth import header_forwarding
from shmserve.gateway.auth.header_forwarding import HeaderParameters
from shmserve.protocol.messages import PARAMETERS, Value


def test_matching_headers_are_forwarded() -> None:
    forward = header_forwarding.Forward("x-.*|User", ["x-key"])
    assert forward.of([("X-A", "1"), ("x-key", "2"), ("x-a", "3"), ("USER", "4"), ("ax-b", "5")]) == {
        "X-A": "1, 3",
        "USER": "4",
    }
    assert forward.of([("Host", "x")]) is None
    assert header_forwarding.Forward("(?-i)X-.*").of([("x-a", "1"), ("X-a", "2")]) == {"X-a": "2"}


def test_reserved_headers_are_refused() -> None:
    forward = header_forwarding.Forward(".*")
    names = "Timeout priority sequence_id Sequence_Start sequence_end triton_x headers binary_data_output"
    for name in names.split():
        with pytest.raises(InvalidRequest, match=f"header '{name}' is reserved for Triton usage"):
            forward.of([("a", "1"), (name, "1")])
    assert forward.of([("n" * 129, "1"), ("triton_grpc_error", "true")]) is None
    assert header_forwarding.Forward("x-.*").of((name, "1") for name in names) is None
    with pytest.raises(InvalidRequest, match="headers would be forwarded to the model"):
        forward.of((f"a{number}", "") for number in range(PARAMETERS + 1))


def test_hostile_header_names_match_in_linear_time() -> None:
    """With the module `re`, this would take practically forever."""
    forward = header_forwarding.Forward("(a+)+(b+)+(.*.*.*.*.*.*)+c")
    assert forward.of([("a" * 120, "")]) is None
    with pytest.raises(ValueError, match="the limit is"):
        header_forwarding.Forward("a" * 2000)
    with pytest.raises(ValueError, match="missing"):
        header_forwarding.Forward("(a")
    with pytest.raises(ValueError):
        header_forwarding.Forward("(((((a{100}){100}){100}){100}){100})")


def test_a_header_replaces_the_parameter_of_its_name() -> None:
    parameters: dict[str, Value] = {"a": 1, "x-user": "of the body"}
    assert header_forwarding.merged(parameters, None) is parameters
    assert header_forwarding.merged(None, {"b": "c"}) == {"b": "c"}
    assert header_forwarding.merged(parameters, {"X-User": "of the head"}) == {"a": 1, "X-User": "of the head"}
    assert parameters == {"a": 1, "x-user": "of the body"}
    with pytest.raises(InvalidRequest, match="including forwarded headers"):
        header_forwarding.merged({f"a{number}": 1 for number in range(PARAMETERS)}, {"b": "c"})


PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_sampled_trace_context_is_passed_on_while_it_is_wanted() -> None:
    wanted: list[bool] = []
    headers = HeaderParameters(None, lambda: bool(wanted))
    both = HeaderParameters(header_forwarding.Forward("x-.*"), lambda: bool(wanted))
    given = [("TraceParent", PARENT), ("x-a", "1"), ("tracestate", "a=1"), ("Tracestate", "b=2")]
    assert (headers.active, both.active) == (False, True)
    assert both.of(given) == {"x-a": "1"}
    wanted.append(True)
    assert (headers.active, both.active) == (True, True)
    assert headers.of(given) == {"traceparent": PARENT, "tracestate": "a=1,b=2"}
    assert headers.of(given[:2]) == {"traceparent": PARENT}
    assert both.of(given[:2]) == {"x-a": "1", "traceparent": PARENT}


@pytest.mark.parametrize("parents", [[], ["00-1-1-1"], [PARENT[:-1] + "0"], [PARENT, PARENT]])
def test_other_trace_contexts_are_left_out(parents: list[str]) -> None:
    """Contexts that are missing, invalid, not sampled or ambiguous."""
    given = [("traceparent", parent) for parent in parents] + [("tracestate", "a=1")]
    assert HeaderParameters(None, lambda: True).of(given) is None

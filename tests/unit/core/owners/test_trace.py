"""Traces: one record per traced request, none for other requests, and a limited number per second."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shmserve.core.effects import Log, Traced
from shmserve.core.limits import Limits
from shmserve.core.owners.trace import ID_LENGTH, PER_SECOND, Sample
from shmserve.protocol.messages import Infer, Options
from shmserve.protocol.trace_context import TraceContext
from shmserve.protocol.worker_messages import Call
from tests.support.core.calling import caller_of
from tests.support.core.fakes.client import FakeClient
from tests.support.core.fakes.tensors import one_input
from tests.support.core.policies import plain, step
from tests.support.core.world import Recorded

MS = 1_000_000
POLICY = plain(max_batch=256)


class Logged(Recorded):
    def __init__(self, contexts_per_second: int = 0) -> None:
        super().__init__(Limits(contexts_per_second=contexts_per_second))
        self.deploy(POLICY)
        self.client = self.connect("c")

    def traced(self) -> list[dict[str, Any]]:
        return [log.fields for log in self.of(Log) if log.fields and "trace_id" in log.fields]


def infer(
    client: FakeClient, number: int, timeout_us: int = 0, model: str = "m", **parameters: Any
) -> tuple[int, Infer]:
    options = Options(id="mine", parameters=parameters) if parameters else None
    return client.infer(number, model, 1, timeout_us, options)


def test_a_traced_request_of_a_batch() -> None:
    world = Logged()
    world.turn([infer(world.client, 1)])  # so that the next two wait and run together
    world.turn([infer(world.client, 2, trace_id="why"), infer(world.client, 3)])
    world.now += 5 * MS
    world.finish(took=MS)
    assert not world.traced()
    world.now += 4 * MS
    world.finish(took=3 * MS)
    (found,) = world.traced()
    batch = found.pop("batch")
    assert batch > 0
    assert found == {
        "trace_id": "why", "id": "mine", "model": "m", "version": 1, "client": 1, "request": 2, "rows": 1,
        "code": "OK", "answered_us": 9000, "instance": "m_0", "batch_rows": 2, "reason": "idle",
        "queued_us": 6000, "input_us": 0, "infer_us": 3000, "output_us": 0,
    }  # fmt: skip
    (log,) = (log for log in world.of(Log) if log.fields and "trace_id" in log.fields)
    assert log.level == "info"
    assert log.text.startswith("trace why: OK, model m, version 1, ")
    assert not world.core.state.observers.traces.active


def test_a_request_that_expires_in_the_queue_and_one_whose_client_disconnects() -> None:
    world = Logged()
    world.turn([infer(world.client, 1)])
    world.turn([infer(world.client, 2, timeout_us=1000, trace_id=7)])
    other = world.connect("d")
    world.turn([infer(other, 1, trace_id="gone")])
    world.gone(other)
    world.advance(world.now + 2 * MS)
    (found,) = world.traced()  # the other response had no client any more
    assert (found["trace_id"], found["code"]) == ("7", "DEADLINE_EXCEEDED")
    world.finish()
    assert not world.core.state.observers.traces.active


def test_traces_per_second_and_the_length_of_ids_are_limited() -> None:
    world = Logged()
    many = range(1, PER_SECOND + 11)
    world.turn([infer(world.client, number, trace_id="x" * 1000) for number in many])
    assert len(world.core.state.observers.traces.active) == PER_SECOND
    assert {len(trace.id) for trace in world.core.state.observers.traces.active.values()} == {ID_LENGTH}
    assert [log.level for log in world.of(Log) if "are not traced" in log.text] == ["warning"]
    world.now += 1000 * MS
    world.turn([infer(world.client, 1000, trace_id="next")])
    assert len(world.core.state.observers.traces.active) == PER_SECOND + 1


def test_a_model_has_its_own_sample_beside_the_records_of_callers() -> None:
    world = Logged()
    traces = world.core.state.observers.traces
    traces.change_sampling({"other": Sample(1)})
    world.turn([infer(world.client, 1)])
    assert not world.core.state.observers.traces.active
    traces.change_sampling({"m": Sample(1)})
    world.turn([infer(world.client, 2, timeout_us=1000, trace_id="why")])
    world.advance(world.now + 2 * MS)
    (sample,) = world.of(Traced)
    assert sample.log is not None
    assert sample.log.text.startswith("trace why: DEADLINE_EXCEEDED, ")
    assert sample.times == ()
    assert not world.traced()  # the record is removed together with the sample
    traces.change_sampling({})
    world.worker("m_0").finish(world.now)
    world.turn([infer(world.client, 3)])
    assert not world.core.state.observers.traces.active
    world.finish()


def test_steps_and_calls_are_traced_with_the_request_that_they_are_for() -> None:
    """Even if their own model is not sampled; `count` counts only requests of clients."""
    world = Logged()
    world.deploy(replace(POLICY, name="e", batching=None, steps=(step("m"),)))
    world.deploy(replace(POLICY, name="f", batching=None, steps=(step("e"),)))
    world.deploy(replace(POLICY, name="n"))
    world.core.state.observers.traces.change_sampling({"f": Sample(1, 1)})
    world.turn([infer(world.client, 2, model="f")])
    calling = world.worker("m_0")
    (parent,) = (request.number for request in world.core.state.requests.values() if request.version.model == "m")
    caller_of(calling).sends(1)
    calling.outbox.append(Call(1, parent, "n", 0, (one_input(),)))
    world.turn([*world.heard(calling), infer(world.client, 1)])
    for name in ("n_0", "m_0", "m_0"):
        world.finish(name)
    traced = [(sample.number, sample.parent, sample.fields["model"], sample.model) for sample in world.of(Traced)]
    assert traced == [(4, 3, "n", "f"), (3, 2, "m", "f"), (2, 1, "e", "f"), (1, 0, "f", "f")]
    assert all(len(sample.times) == (4 if sample.number > 2 else 0) for sample in world.of(Traced))
    assert not world.core.state.observers.traces.active
    world.turn([infer(world.client, 3, model="f")])
    assert not world.core.state.observers.traces.active, "the count is used up"


@given(st.integers(0, 6), st.integers(-1, 5), st.lists(st.integers(0, 20), max_size=8))
def test_a_sample_takes_the_same_requests_however_they_arrive(rate: int, remaining: int, counts: list[int]) -> None:
    """In packets of any size, or one by one: every `rate`-th request, until the count is used up. 0: none."""
    total = sum(counts)
    expected = [number for number in range(total) if rate and number % rate == rate - 1]
    if remaining >= 0:
        expected = expected[:remaining]
    sample, taken, before = Sample(rate, remaining), [], 0
    for count in counts:
        taken += [before + place for place in sample.take(count)]
        before += count
    assert taken == expected
    assert sample.remaining == (remaining - len(taken) if remaining >= 0 else -1)


PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_contexts_are_ignored_without_a_limit_for_them() -> None:
    world = Logged()
    world.core.state.observers.traces.change_sampling({"": Sample(3)})
    world.turn([infer(world.client, 1, traceparent=PARENT)])
    assert not world.core.state.observers.traces.active


def test_a_request_with_a_sampled_context_is_traced_regardless_of_the_rate() -> None:
    world = Logged(contexts_per_second=100)
    world.deploy(replace(POLICY, name="e", batching=None, steps=(step("m"),)))
    traces = world.core.state.observers.traces
    traces.change_sampling({"": Sample(3)})
    world.turn([infer(world.client, 1)])
    world.turn([infer(world.client, 2, model="e", traceparent=PARENT, tracestate="a=1")])
    world.turn([infer(world.client, 3, traceparent=PARENT[:-1] + "0")])
    world.turn([infer(world.client, 4, traceparent=7), infer(world.client, 5)])
    for _ in range(5):
        world.finish_all()
    found = {sample.fields["request"]: sample.context for sample in world.of(Traced) if not sample.parent}
    assert found == {2: TraceContext(PARENT[3:35], PARENT[36:52], True, "a=1"), 4: None}, (
        "1, 3 and 4 count for the rate"
    )
    (child,) = [sample for sample in world.of(Traced) if sample.parent]
    (whole,) = [sample for sample in world.of(Traced) if sample.fields["request"] == 2]
    assert (child.parent, child.root, child.context) == (whole.number, whole.number, whole.context)
    assert (child.fields["kind"], whole.root) == ("step", whole.number)


def test_contexts_are_limited_per_second_and_by_the_count() -> None:
    world = Logged(contexts_per_second=2)
    traces = world.core.state.observers.traces
    traces.change_sampling({"m": Sample(0, 4)})
    world.turn([infer(world.client, number, traceparent=PARENT) for number in (1, 2, 3)])
    assert (len(traces.active), traces.contexts_over_limit) == (2, 1)
    world.now += 1000 * MS
    world.turn([infer(world.client, number, traceparent=PARENT) for number in (4, 5)])
    world.now += 1000 * MS
    world.turn([infer(world.client, 6, traceparent=PARENT)])
    assert (len(traces.active), traces.samples["m"].remaining) == (4, 0)

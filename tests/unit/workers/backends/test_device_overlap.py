"""Two batches on the GPU at a time: TensorRT on the stand-ins, which run the work of a stream either at once or only
when something waits for it, so that a missing event or a shared buffer gives wrong values."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.protocol.worker_messages import rows_of
from shmserve.repo.backends import PINNED_LIMIT
from shmserve.repo.config import schema
from shmserve.workers.runner import OverlappingRunner, StackedRunner
from tests.support.workers.gpu.device_pair import Pair, arrays
from tests.support.workers.gpu.harness import Instance, adder, plan, tensor
from tests.support.workers.gpu.tensorrt_harness import NO_OVERLAP, Cuda, Gpu, check, config, rows, tuned

ORDERS: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "copies in": ("copy_in",),
    "computation": ("copy_in", "compute"),
    "everything": ("copy_in", "compute", "copy_out"),
}
"""The streams that run their work at once."""


def hurry(gpu: Gpu, order: str) -> None:
    """For the instance that was loaded last."""
    streams = dict(zip(("compute", "copy_out", "copy_in"), list(gpu.state.streams.values())[-3:], strict=True))
    gpu.state.eager = {streams[name] for name in ORDERS[order]}


class Flight:
    """Batches of `adder` that are begun and finished in turn. A source is overwritten when its batch has ended."""

    def __init__(self, instance: Instance, width: int, shared: bool) -> None:
        self.instance, self.width, self.shared = instance, width, shared
        self.flying: list[tuple[Any, list[Any]]] = []
        self._seed = 0

    def begin(self, *shares: int) -> None:
        self._seed += 1
        arrays = rows(*shares, width=self.width, seed=self._seed)
        work_items = [self.instance.work(shared=self.shared, x=array) for array in arrays]
        self.flying.append((self.instance.runner.begin(work_items), arrays))

    def finish(self) -> None:
        batch, arrays = self.flying.pop(0)
        results, _, _ = self.instance.runner.finish(batch)
        for row, array in zip(rows_of(results), arrays, strict=True):
            np.testing.assert_array_equal(self.instance.array(row), array + 1)
        for work in batch.work_items:
            for handle in work.inputs[0].data if self.shared else ():
                self.instance.client.free(handle.segment, handle.offset)
                segment = next(one for one in self.instance.client.segments if one.id == handle.segment)
                segment.memory[handle.offset : handle.offset + handle.size] = b"\xee" * handle.size

    def run(self) -> None:
        self.begin(1, 2)
        for shares in ((2, 1), (3,), (1,), (1, 1, 1)):
            self.begin(*shares)
            self.finish()
        self.finish()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("width", "shared"), [(4, False), (4, True), (5000, True), (40_000, True)])
def test_batches_are_independent(gpu: Gpu, tmp_path: Path, width: int, shared: bool, graphs: bool, order: str) -> None:
    adder(tmp_path, width)
    with gpu.load(tmp_path, tuned(Cuda(graphs=graphs))) as instance:
        assert type(instance.runner) is OverlappingRunner
        hurry(gpu, order)
        Flight(instance, width, shared).run()
        assert instance.arenas.used == 0


def test_outputs_without_room_in_an_arena(gpu: Gpu, tmp_path: Path) -> None:
    """They are written to a buffer of the model, of which there is one for each batch."""
    adder(tmp_path, 4000)
    with gpu.load(tmp_path) as instance:
        hurry(gpu, "everything")
        instance.arenas.limit = 0
        gpu.clear()
        batches = [instance.runner.begin([instance.work(x=array)]) for array in rows(1, 1, width=4000)]
        for batch in batches:
            instance.runner.finish(batch)
        first, second = (call[1] for call in gpu.state.named("memcpyAsync") if call[4] == 2)
        assert first != second


def test_a_batch_begins_without_waiting_for_the_one_before(gpu: Gpu, tmp_path: Path) -> None:
    adder(tmp_path)
    with gpu.load(tmp_path) as instance:
        flight = Flight(instance, 4, False)
        flight.begin(1)
        gpu.clear()
        flight.begin(1)
        assert gpu.state.named("eventSynchronize") == []
        flight.finish()
        assert len(gpu.state.named("eventSynchronize")) == 1
        flight.finish()


def test_sources_live_until_the_end_of_their_batch(gpu: Gpu, tmp_path: Path) -> None:
    """Also if the client's segment is withdrawn in the meantime: it is unpinned and unmapped after the batch."""
    adder(tmp_path, 40_000)
    with gpu.load(tmp_path) as instance:
        (x,) = rows(1, width=40_000)
        work = instance.work(x=x)
        (handle,) = work.inputs[0].data  # type: ignore[misc]
        batch = instance.runner.begin([work])
        instance.mapped.remove(handle.segment)  # type: ignore[union-attr]
        gc.collect()
        gpu.clear()
        (row,) = instance.runner.finish(batch)[0]
        np.testing.assert_array_equal(instance.array(row), x + 1)
        del batch
        gc.collect()
        assert [call[0] for call in gpu.state.calls] == ["eventSynchronize", "hostUnregister"]


def copied_to_pinned(gpu: Gpu) -> list[bool]:
    """Whether each copy to the host since `clear` goes to pinned memory. To other memory it blocks."""
    state = gpu.state
    pinned = [(address, memory.size) for address, memory in state.pinned.items()]
    pinned += state.registered.items()
    copies = [call[1:4] for call in state.named("memcpyAsync") if call[4] == 2]
    return [any(a <= to and to + size <= a + length for a, length in pinned) for to, _, size in copies]


def test_segments_in_use_are_not_evicted(gpu: Gpu, tmp_path: Path) -> None:
    """There is room for the client's segment only."""
    adder(tmp_path, 40_000)
    (x,) = rows(1, width=40_000)
    limit = 1 << 30
    for _ in range(2):  # the first time to learn the size of the segment
        with gpu.load(tmp_path, settings={PINNED_LIMIT: str(limit)}) as instance:
            work = instance.work(x=x)
            limit = instance.client.segments[0].size
            for _ in range(2):
                gpu.clear()
                (row,) = instance.runner.finish(instance.runner.begin([work]))[0]
                np.testing.assert_array_equal(instance.array(row), x + 1)
                assert copied_to_pinned(gpu) == [True]
                assert not {"deviceSynchronize", "hostUnregister"} & {call[0] for call in gpu.state.calls}


def test_outputs_are_copied_without_pinned_memory(gpu: Gpu, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    adder(tmp_path, 40_000)
    with gpu.load(tmp_path, settings={PINNED_LIMIT: "0"}) as instance:
        gpu.state.failures["hostAlloc"] = 2
        gpu.clear()
        check(instance, 1, width=40_000)
        check(instance, 1, width=40_000)
        assert copied_to_pinned(gpu) == [False, False]
        assert capfd.readouterr().err.count("copies of outputs block the next batch") == 1
    with gpu.load(tmp_path, config(parameters=NO_OVERLAP), settings={PINNED_LIMIT: "0"}) as instance:
        gpu.clear()
        check(instance, 1, width=40_000)
        assert copied_to_pinned(gpu) == [False]


@pytest.mark.parametrize("call", ["memcpyAsync", "streamWaitEvent", "eventRecord"])
def test_a_batch_that_cannot_be_queued_does_not_disturb_the_one_before(gpu: Gpu, tmp_path: Path, call: str) -> None:
    adder(tmp_path, 40_000)
    with gpu.load(tmp_path) as instance:
        first, second = (instance.work(x=array) for array in rows(1, 1, width=40_000))
        running = instance.runner.begin([first])
        gpu.state.failures[call] = 1
        refused = instance.runner.begin([second])
        assert all(stream.asked == stream.done for stream in gpu.state.streams.values())
        (row,) = instance.runner.finish(running)[0]
        np.testing.assert_array_equal(instance.array(row), rows(1, 1, width=40_000)[0] + 1)
        (row,) = instance.runner.finish(refused)[0]
        assert row.error is not None
        check(instance, 2, width=40_000)


def test_a_device_lost_with_two_batches_is_fatal(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shmserve.workers.backends import device_pipeline

    class Ended(BaseException):
        pass

    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(device_pipeline, "end_process", end)
    tensors = [tensor("input", "x", [-1, 4]), tensor("output", "y", [-1, 4])]
    plan(tmp_path, tensors, {"y": ["crash", "x"]}, {"x": [[1, 4], [1, 4], [8, 4]]})
    with gpu.load(tmp_path) as instance:
        first, second = (instance.runner.begin([instance.work(x=array)]) for array in rows(1, 1))
        with pytest.raises(Ended, match="70"):
            instance.runner.finish(first)
        for stream in gpu.state.streams.values():
            stream.waiting.clear()
        del second


def test_a_context_outlives_the_batches_that_use_it(gpu: Gpu, tmp_path: Path) -> None:
    adder(tmp_path, 40_000)
    with gpu.load(tmp_path) as instance:
        batch = instance.runner.begin([instance.work(x=array) for array in rows(1, width=40_000)])
        states = gpu.state.streams.values()
        pending: list[bool] = []
        for profile in instance.model._profiles:  # noqa: SLF001 - nobody else has the contexts
            weakref.finalize(profile.context, lambda: pending.append(any(stream.waiting for stream in states)))
        del profile
        assert any(stream.waiting for stream in states)
        instance.model.close()
        gc.collect()
        assert pending == [False]
        del batch


def test_no_memory_for_a_second_set_of_buffers(gpu: Gpu, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The model is served without the overlap, and the log says why."""
    adder(tmp_path, 40_000)
    gpu.state.total = 3_000_000  # a set has 2 * 1.28 MB
    with gpu.load(tmp_path, tuned(Cuda(graphs=True))) as instance:
        assert type(instance.runner) is StackedRunner
        check(instance, 1, 2, width=40_000)
        assert len(gpu.state.device) == 2
    text = capfd.readouterr().err
    assert "'m_0_0': batches do not overlap, as that needs a second set of buffers: no room for 1280000 bytes" in text
    assert "parameter overlap_batches" in text


@pytest.mark.parametrize("key", ["overlap_batches", "retry_alone"])
def test_the_overlap_can_be_turned_off(gpu: Gpu, tmp_path: Path, key: str) -> None:
    """Also by forbidding that requests run twice: one that has begun early is run again if the worker dies."""
    adder(tmp_path)
    with gpu.load(tmp_path, config(parameters={key: schema.ModelParameter(string_value="false")})) as instance:
        assert type(instance.runner) is StackedRunner
        assert len(gpu.state.device) == 2
        assert len(gpu.state.named("streamCreateWithPriority")) == 1
        check(instance, 1, 2)


def test_memory_of_another_process_is_closed_after_the_batches_that_read_it(gpu: Gpu, pair: Pair) -> None:
    (given,) = arrays(1)
    (row,) = pair.produce(given)
    work_items = pair.pass_on(row)
    batch = pair.consumer.runner.begin(work_items)
    gpu.clear()
    (handle,) = row.outputs[0].data  # type: ignore[misc]
    pair.consumer.mapped.remove(handle.segment)  # type: ignore[union-attr]
    assert [call[0] for call in gpu.state.calls] == ["deviceSynchronize", "ipcCloseMemHandle"]
    (found,) = pair.consumer.runner.finish(batch)[0]
    np.testing.assert_array_equal(pair.consumer.array(found), given + 2)
    pair.give_back(row)

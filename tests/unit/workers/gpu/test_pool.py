"""Memory for outputs that stay on a GPU: its limit, its reuse, and its lifetime across processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.errors import Unavailable
from shmserve.gpu.interface import UNIT_BYTES
from shmserve.protocol.messages import Handle
from shmserve.protocol.worker_messages import Load, Row, Work
from shmserve.repo.config.schema import ModelInstanceGroup
from shmserve.shm.mapped import Mapped
from shmserve.workers.loading import load
from shmserve.workers.output_arenas import NEAR_KNOB
from tests.support.gpu.fake_device import TO_DEVICE, TO_HOST, WITHIN, FakeGpu, fake_gpu
from tests.support.gpu.fake_processes import WIDTH, FakeProcess
from tests.support.workers.batch_parts import Array, Memory
from tests.support.workers.worker_harness import config

ROW = WIDTH * 4


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with fake_gpu() as gpu:
        yield gpu
        assert gpu.left() == {}


@pytest.fixture
def memory(gpu: FakeGpu) -> Iterator[Memory]:
    made = Memory()
    yield made
    made.close()


@pytest.fixture
def pair(gpu: FakeGpu, tmp_path: Path) -> Iterator[tuple[FakeProcess, FakeProcess]]:
    with ExitStack() as stack:
        made = [FakeProcess(gpu, name, tmp_path, owner) for name, owner in (("producer", 7), ("consumer", 8))]
        for process in made:
            stack.callback(process.close)
        yield made[0], made[1]


def xs(*shares: int) -> list[Array]:
    random = np.random.default_rng(1)
    return [random.integers(0, 1000, (share, WIDTH)).astype(np.float32) for share in shares]


def pass_on(producer: FakeProcess, consumer: FakeProcess, *rows: Row) -> list[Work]:
    producer.announce_to(consumer)
    works = []
    for number, row in enumerate(rows, 1000):
        (output,) = row.outputs
        works.append(Work(number, output.shape[0], (replace(output, name="x"),), None, "internal"))
    return works


# ------------------------------------------------------------------------------------------------ limits


def test_the_limit_is_for_all_audiences_together(memory: Memory) -> None:
    memory.arenas.near_limit = limit = 2 * UNIT_BYTES
    for audience in ("internal", "uid:1"):
        memory.arenas.allocate_near(audience, UNIT_BYTES)
    for audience in ("internal", "uid:1", "uid:2"):
        with pytest.raises(Unavailable, match=rf"GPU memory.*{limit} bytes are committed; raise {NEAR_KNOB}"):
            memory.arenas.allocate_near(audience, UNIT_BYTES)


def test_memory_is_committed_in_units_within_the_limit(gpu: FakeGpu, memory: Memory) -> None:
    memory.arenas.near_limit = 3 * UNIT_BYTES // 2
    memory.arenas.allocate_near("internal", 100)
    assert gpu.used == UNIT_BYTES
    with pytest.raises(Unavailable, match=f"{UNIT_BYTES} of {memory.arenas.near_limit} bytes are committed; raise"):
        memory.arenas.allocate_near("uid:1", 100)
    assert gpu.used == UNIT_BYTES


def test_a_full_gpu_is_an_error_with_the_numbers(gpu: FakeGpu, memory: Memory) -> None:
    gpu.size = UNIT_BYTES
    memory.arenas.allocate_near("internal", UNIT_BYTES)
    with pytest.raises(Unavailable, match=rf"on the GPU: 0 of {UNIT_BYTES} bytes are free"):
        memory.arenas.allocate_near("internal", UNIT_BYTES)


def test_outputs_beyond_the_limit_go_through_the_host_and_the_first_is_logged(
    gpu: FakeGpu, pair: tuple[FakeProcess, FakeProcess], capfd: pytest.CaptureFixture[str]
) -> None:
    producer, _ = pair
    producer.instance.arenas.near_limit = UNIT_BYTES
    given = xs(*[2] * 8)
    rows = [producer.produce(array)[0] for array in given]
    places = [producer.is_on_device(row) for row in rows]
    assert places == [True] * places.count(True) + [False] * places.count(False)
    assert 0 < places.count(True) < 8
    for row, array, near in zip(rows, given, places, strict=True):
        if not near:
            np.testing.assert_array_equal(producer.instance.read(row.outputs[0]), array + 1)
    log = capfd.readouterr()
    assert (log.out + log.err).count(f"raise {NEAR_KNOB}") == 1
    producer.free(*rows)
    (row,) = producer.produce(given[0])
    assert producer.is_on_device(row), "there is room again"
    producer.free(row)


def test_without_memory_for_tensors_on_the_gpu_nothing_is_logged(
    gpu: FakeGpu, pair: tuple[FakeProcess, FakeProcess], capfd: pytest.CaptureFixture[str]
) -> None:
    producer, _ = pair
    producer.instance.arenas.near_limit = 0
    (row,) = producer.produce(*xs(1))
    assert not producer.is_on_device(row)
    log = capfd.readouterr()
    assert NEAR_KNOB not in log.out + log.err
    producer.free(row)


@pytest.mark.parametrize(("given", "expected"), [("0:4194304,1:2097152", [4 << 20, 2 << 20]), ("1:0,-1:8", [8, 0])])
def test_an_instance_has_the_limit_of_its_gpu(tmp_path: Path, given: str, expected: list[int]) -> None:
    x, y = {"x": ("FP32", (4,))}, {"y": ("FP32", (4,))}
    group = ModelInstanceGroup(name="m_0", kind="KIND_GPU", count=1, gpus=(0, 1))
    model = replace(config("identity", x, y, max_batch=8), instance_group=(group,))
    found = []
    for instance in ("m_0_0", "m_0_1"):
        memory = Memory()
        order = Load(7, "m", 1, instance, str(tmp_path), {NEAR_KNOB: given})
        loaded = load(order, msgspec.json.encode(model), memory.outbox, Mapped())
        found.append(loaded.arenas.near_limit)
        loaded.backend.close()
        loaded.arenas.close()
        memory.close()
    assert found == expected


# ------------------------------------------------------------------------------------------------ reuse


def test_the_block_that_was_freed_last_is_used_next(gpu: FakeGpu, memory: Memory) -> None:
    blocks = [memory.arenas.allocate_near("internal", ROW) for _ in range(3)]
    before = gpu.allocations
    for block in (blocks[0], blocks[2], blocks[1]):
        memory.arenas.free([Handle(block.segment, block.offset, block.size)])
    again = [memory.arenas.allocate_near("internal", ROW) for _ in range(3)]
    assert [block.address for block in again] == [blocks[1].address, blocks[2].address, blocks[0].address]
    assert gpu.allocations == before


def test_batches_allocate_nothing_on_the_gpu(gpu: FakeGpu, pair: tuple[FakeProcess, FakeProcess]) -> None:
    producer, consumer = pair
    given = xs(1, 2)
    before = 0
    for turn in range(20):
        rows = producer.produce(*given)
        found = consumer.run(*pass_on(producer, consumer, *rows))
        for row, array in zip(found, given, strict=True):
            np.testing.assert_array_equal(consumer.instance.array(row), array + 2)
        producer.free(*rows)
        before = before or gpu.allocations
        assert gpu.allocations == before, f"batch {turn} allocated memory"
    assert producer.instance.arenas.used == 0


# ------------------------------------------------------------------------------------------------ across processes


@pytest.mark.parametrize("shares", [(1,), (3,), (1, 2, 1)], ids=str)
def test_tensors_between_processes_stay_on_the_gpu(
    gpu: FakeGpu, pair: tuple[FakeProcess, FakeProcess], shares: tuple[int, ...]
) -> None:
    producer, consumer = pair
    given = xs(*shares)
    gpu.copies.clear()
    rows = producer.produce(*given)
    assert {direction for _, direction in gpu.copies} == {TO_DEVICE}
    gpu.copies.clear()
    found = consumer.run(*pass_on(producer, consumer, *rows))
    gathered = [(share * ROW, WITHIN) for share in shares] if len(shares) > 1 else []
    assert gpu.copies == [*gathered, (sum(shares) * ROW, TO_HOST)]
    for row, array in zip(found, given, strict=True):
        np.testing.assert_array_equal(consumer.instance.array(row), array + 2)
    producer.free(*rows)


def test_a_segment_that_its_owner_withdraws_is_closed_before_it_is_freed(
    gpu: FakeGpu, pair: tuple[FakeProcess, FakeProcess]
) -> None:
    producer, consumer = pair
    rows = producer.produce(*xs(1))
    for row in consumer.run(*pass_on(producer, consumer, *rows)):
        consumer.free(row)
    assert gpu.left()["opened"] == 1
    (segment,) = consumer.instance.mapped.on_device
    consumer.instance.mapped.remove(segment)
    assert "opened" not in gpu.left()
    producer.free(*rows)


@pytest.mark.parametrize("function", ["copy", "synchronize_stream"])
def test_a_batch_that_fails_leaves_no_block(gpu: FakeGpu, pair: tuple[FakeProcess, FakeProcess], function: str) -> None:
    producer, _ = pair
    gpu.fail(function)
    (row,) = producer.produce(*xs(1))
    assert row.error is not None
    producer.instance.failures.clear()  # their tracebacks refer to arrays
    assert producer.instance.arenas.used == 0
    with gpu.process("producer") as device:
        device.settle()
    (row,) = producer.produce(*xs(1))
    assert row.error is None
    producer.free(row)

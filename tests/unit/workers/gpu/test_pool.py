"""Memory for outputs that stay on a GPU: its limit and its reuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.errors import Unavailable
from shmserve.gpu.interface import UNIT_BYTES
from shmserve.protocol.worker_messages import Load
from shmserve.repo.backends import CUDA_POOL_LIMIT
from shmserve.repo.config.schema import ModelInstanceGroup
from shmserve.workers.loading import load
from tests.support.workers.batch_parts import Memory
from tests.support.workers.gpu.device_pair import Pair, arrays
from tests.support.workers.gpu.tensorrt_harness import Gpu
from tests.support.workers.worker_harness import assert_failed, config


@pytest.fixture
def memory(gpu: Gpu) -> Iterator[Memory]:
    made = Memory()
    yield made
    made.close()


def used(gpu: Gpu) -> int:
    """Bytes of device memory in use."""
    return sum(memory.size for memory in gpu.state.device.values())


def test_memory_is_committed_in_units_within_one_limit_for_all_audiences(gpu: Gpu, memory: Memory) -> None:
    memory.arenas.near_limit = limit = 5 * UNIT_BYTES // 2
    for audience in ("internal", "uid:1"):
        memory.arenas.allocate_near(audience, UNIT_BYTES)
    assert used(gpu) == 2 * UNIT_BYTES
    committed = f"{2 * UNIT_BYTES} of {limit} bytes are committed; raise {CUDA_POOL_LIMIT}"
    for audience in ("internal", "uid:1", "uid:2"):
        with pytest.raises(Unavailable, match=f"GPU memory.*{committed}"):
            memory.arenas.allocate_near(audience, UNIT_BYTES)
    assert used(gpu) == 2 * UNIT_BYTES
    gpu.state.total, memory.arenas.near_limit = used(gpu), 5 * UNIT_BYTES
    with pytest.raises(Unavailable, match=rf"on the GPU: 0 of {gpu.state.total} bytes are free"):
        memory.arenas.allocate_near("internal", UNIT_BYTES)


def test_outputs_beyond_the_limit_go_through_the_host_and_the_first_is_logged(
    pair: Pair, capfd: pytest.CaptureFixture[str]
) -> None:
    producer = pair.producer
    producer.arenas.near_limit = UNIT_BYTES
    given = arrays(*[2] * 8)
    rows = [pair.produce(array)[0] for array in given]
    places = [producer.is_on_device(row) for row in rows]
    assert places == [True] * places.count(True) + [False] * places.count(False)
    assert 0 < places.count(True) < 8
    for row, array, near in zip(rows, given, places, strict=True):
        if not near:
            np.testing.assert_array_equal(producer.read(row.outputs[0]), array + 1)
    log = capfd.readouterr()
    assert (log.out + log.err).count(f"raise {CUDA_POOL_LIMIT}") == 1
    pair.give_back(*rows)
    (row,) = pair.produce(given[0])
    assert producer.is_on_device(row), "there is room again"
    pair.give_back(row)


def test_without_memory_for_tensors_on_the_gpu_nothing_is_logged(pair: Pair, capfd: pytest.CaptureFixture[str]) -> None:
    producer = pair.producer
    producer.arenas.near_limit = 0
    (row,) = pair.produce(*arrays(1))
    assert not producer.is_on_device(row)
    log = capfd.readouterr()
    assert CUDA_POOL_LIMIT not in log.out + log.err
    pair.give_back(row)


@pytest.mark.parametrize(("given", "expected"), [("0:4194304,1:2097152", [4 << 20, 2 << 20]), ("1:0,-1:8", [8, 0])])
def test_an_instance_has_the_limit_of_its_gpu(tmp_path: Path, given: str, expected: list[int]) -> None:
    x, y = {"x": ("FP32", (4,))}, {"y": ("FP32", (4,))}
    group = ModelInstanceGroup(name="m_0", kind="KIND_GPU", count=1, gpus=(0, 1))
    model = replace(config("identity", x, y, max_batch=8), instance_group=(group,))
    found = []
    for instance in ("m_0_0", "m_0_1"):
        memory = Memory()
        order = Load(7, "m", 1, instance, str(tmp_path), {CUDA_POOL_LIMIT: given})
        loaded = load(order, msgspec.json.encode(model), memory.outbox)
        found.append(loaded.arenas.near_limit)
        loaded.close()
        loaded.arenas.close()
        memory.close()
    assert found == expected


def test_batches_allocate_nothing_on_the_gpu(pair: Pair) -> None:
    given = arrays(1, 2)
    for turn in range(20):
        rows = pair.produce(*given)
        found = pair.consumer.run(*pair.pass_on(*rows))
        for row, array in zip(found, given, strict=True):
            np.testing.assert_array_equal(pair.consumer.array(row), array + 2)
        pair.give_back(*rows)
        assert not turn or pair.runtime.state.named("malloc") == [], f"batch {turn} allocated memory"
    assert pair.producer.arenas.used == 0


@pytest.mark.parametrize("function", ["memcpyAsync", "eventSynchronize"])
def test_a_batch_that_fails_leaves_no_block(pair: Pair, function: str) -> None:
    pair.fail(function)
    (row,) = pair.produce(*arrays(1))
    assert_failed(row, "MODEL_FAILED")
    pair.producer.failures.clear()  # their tracebacks refer to arrays
    assert pair.producer.arenas.used == 0
    (row,) = pair.produce(*arrays(1))
    assert row.error is None
    pair.give_back(row)

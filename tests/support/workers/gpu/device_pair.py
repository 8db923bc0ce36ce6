"""Two instances on a GPU: tensors of the first stay there as inputs of the second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from shmserve.protocol.worker_messages import Row, StepOptions, Work
from shmserve.repo.config.schema import ModelConfig, ModelInstanceGroup
from shmserve.workers.gpu.shared import memory_of
from tests.support.workers.batch_parts import Array
from tests.support.workers.gpu.harness import Instance, adder
from tests.support.workers.worker_harness import config

HOST_TO_DEVICE, DEVICE_TO_HOST, WITHIN = 1, 2, 3
WIDTH = 40_000


def adding(backend: str, width: int = WIDTH) -> ModelConfig:
    """y = x + 1, or another function of rows of this width."""
    return config(backend, {"x": ("FP32", (width,))}, {"y": ("FP32", (width,))}, max_batch=8)


class Pair:
    """A producer, y = x + 1 of TensorRT on the stand-ins, and a consumer, by default of the same kind. The test takes
    the place of the broker between them."""

    def __init__(self, runtime: Any, folder: Path) -> None:
        from shmserve.workers.backends.tensorrt.backend import TensorRT

        self.runtime = runtime
        for name in ("a", "b"):
            adder(folder / name, WIDTH)
        self.producer = Instance(TensorRT, folder / "a", ModelConfig(name="m", backend="tensorrt"))
        self.consumer = self.open_consumer(TensorRT, folder / "b", adding("tensorrt"))
        self._announced = 0

    def take_copies(self) -> list[tuple[int, int]]:
        """Returns (bytes, direction) of each copy since the last call."""
        found = [(call[3], call[4]) for call in self.runtime.state.named("memcpyAsync")]
        self.runtime.state.calls.clear()
        return found

    def open_consumer(self, backend: Any, folder: Path, model: ModelConfig) -> Instance:
        return Instance(backend, folder, model, owner=8)

    def fail(self, name: str, status: int = 1) -> None:
        self.runtime.state.failures[name] = status

    @property
    def opened(self) -> int:
        """Allocations that are open in a second process."""
        return len(self.runtime.state.opened)

    def produce(self, *arrays: Array, near: tuple[str, ...] = ("y",), **more: Any) -> list[Row]:
        work_items = [replace(self.producer.work(x=array, **more), step=StepOptions(near)) for array in arrays]
        self.take_copies()
        return self.producer.run(*work_items)

    def pass_on(self, *rows: Row) -> list[Work]:
        """Announces new segments, then makes requests with the outputs as inputs."""
        for message in self.producer.maps[self._announced :]:
            self._announced += 1
            if message.name is not None:
                self.consumer.mapped.add(message.segment, message.size, name=message.name)
        work_items = []
        for number, row in enumerate(rows, 1000):
            assert row.error is None, row.error
            (output,) = row.outputs
            work_items.append(Work(number, output.shape[0], (replace(output, name="x"),), None, "internal"))
        return work_items

    def give_back(self, *rows: Row) -> None:
        for row in rows:
            self.producer.free(row.outputs[0])

    def copies(self) -> list[tuple[int, int]]:
        """The copies since the last call, as (rows, direction)."""
        return [(size // (WIDTH * 4), direction) for size, direction in self.take_copies()]

    def replace_consumer(self, backend: Any, folder: Path, consumer: ModelConfig) -> None:
        """Uses a backend that computes on the host, whose memory is the fake's device memory."""
        self.consumer.close()
        group = ModelInstanceGroup(name="m_0", kind="KIND_CPU", count=1)
        model = replace(consumer, instance_group=(group,))
        self.consumer = self.open_consumer(backend, folder, model)

    def check(self, row: Row, expected: dict[str, Array], near: Sequence[str]) -> None:
        """All outputs have these values, and those of `near` are on the GPU. Frees them."""
        assert row.error is None, row.error
        assert [output.name for output in row.outputs] == list(expected)
        for output in row.outputs:
            assert isinstance(output.data, tuple)
            (handle,) = output.data
            on_device = handle.segment in self.consumer.mapped.on_device
            assert on_device == (output.name in near)
            if on_device:
                piece = memory_of(self.consumer.mapped).piece(handle, np.dtype(np.float32), output.shape)
                np.testing.assert_array_equal(piece.host(), expected[output.name])
            else:
                np.testing.assert_array_equal(self.consumer.read(output), expected[output.name])
            self.consumer.free(output)

    def close(self) -> None:
        self.consumer.close()
        self.producer.close()


def gathered(shares: Sequence[int]) -> list[tuple[int, int]]:
    """The copies on the GPU that gather the rows of several requests; a single request is not copied."""
    return [(share, WITHIN) for share in shares] if len(shares) > 1 else []


def arrays(*shares: int, width: int = WIDTH) -> list[Array]:
    random = np.random.default_rng(5)
    return [random.integers(0, 1000, (share, width)).astype(np.float32) for share in shares]

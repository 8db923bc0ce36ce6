"""Workers on a fake GPU, each in a process of its own as far as the GPU is concerned."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from shmserve.dtypes import elements
from shmserve.errors import InvalidRequest, ServeError
from shmserve.protocol.worker_messages import Row, Work
from shmserve.repo.config.schema import ModelConfig
from shmserve.shm.views import address_of
from shmserve.workers.backends.base import Context, StackedBackend
from shmserve.workers.backends.device_buffers import Feed, Pinned
from shmserve.workers.batch.gather import GatherGroup
from shmserve.workers.batch.results import Results
from shmserve.workers.batch.specs import model_inputs_of
from shmserve.workers.gpu import api
from shmserve.workers.gpu.shared import memory_of
from tests.support.gpu.fake_device import FakeDevice, FakeError, FakeGpu
from tests.support.gpu.fake_memory import ByteRange
from tests.support.workers.batch_parts import WORKER
from tests.support.workers.gpu.harness import Instance
from tests.support.workers.worker_harness import config

WIDTH = 40_000


class AddOne(StackedBackend):
    """y = x + 1, computed on the fake."""

    on_device = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        device = api.open_device()
        assert isinstance(device, FakeDevice)
        self._device = device
        self._stream = device.stream()
        self._pinned = Pinned(device)
        self._feed = Feed(device, self._pinned, True, 0, self._stream)
        self._buffers: list[int] = []

    def complete(self, config: ModelConfig) -> ModelConfig:
        return config

    def load(self, config: ModelConfig) -> None:
        (self._input,) = model_inputs_of(config)
        size = elements(self._input.shape) * self._input.item * config.max_batch_size
        self._buffers = [self._device.allocate(size), self._device.allocate(size)]

    def close(self) -> None:
        self._feed.close()
        self._pinned.close()
        for buffer in self._buffers:
            self._device.free(buffer)
        self._device.destroy_stream(self._stream)

    def execute(self, inputs: GatherGroup, outputs: Results) -> None:
        try:
            self._execute(inputs, outputs)
        except (FakeError, ServeError) as error:
            self._device.synchronize_stream(self._stream)  # the memory of the batch is used again
            raise self._device.failure(error) if isinstance(error, FakeError) else error from None

    def _execute(self, inputs: GatherGroup, outputs: Results) -> None:
        device, stream, spec = self._device, self._stream, self._input
        shape = inputs.shape(0)
        assert shape is not None
        if shape[1:] != spec.shape:
            raise InvalidRequest(f"input 'x' has shape {list(shape)}")
        size = elements(shape) * spec.item
        source = self._feed.address_on_device(inputs, 0)
        if not source:
            source = self._buffers[0]
            self._feed.put(inputs, 0, spec.numpy, shape, size, source)
        inputs.computing()
        near = outputs.near(0, shape)
        target = self._buffers[1] if near is None else near

        def compute() -> None:
            values = np.frombuffer(ctypes.string_at(source, size), np.float32) + np.float32(1)
            ctypes.memmove(target, values.ctypes.data, size)

        device.compute(compute, stream, [ByteRange(source, source + size)], [ByteRange(target, target + size)])
        if near is None:
            device.copy(address_of(outputs.place(0, shape)), target, size, device.to_host, stream)
        device.synchronize_stream(stream)


class GpuProcess(Instance):
    """An instance in a process of its own, as far as the GPU is concerned. By default one of AddOne."""

    def __init__(
        self,
        gpu: FakeGpu,
        name: str,
        folder: Path,
        owner: int = WORKER,
        backend: Any = AddOne,
        model: ModelConfig | None = None,
    ) -> None:
        self._gpu = gpu
        self._process = name
        with gpu.process(name):
            super().__init__(backend, folder, model or adding("fake"), owner=owner)
            memory_of(self.mapped)  # tests look at it from outside of the process

    def run(self, *work_items: Work) -> list[Row]:
        with self._gpu.process(self._process):
            return super().run(*work_items)

    def close(self) -> None:
        with self._gpu.process(self._process):
            super().close()

    def is_on_device(self, row: Row) -> bool:
        assert row.error is None, row.error
        data: Any = row.outputs[0].data
        return data[0].segment in self.mapped.on_device


def adding(backend: str, width: int = WIDTH) -> ModelConfig:
    """y = x + 1, or another function of rows of this width."""
    return config(backend, {"x": ("FP32", (width,))}, {"y": ("FP32", (width,))}, max_batch=8)

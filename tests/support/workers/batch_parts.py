"""The parts that turn requests into arrays and arrays into rows, without a worker process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shmserve.dtypes import from_numpy
from shmserve.protocol import codec
from shmserve.protocol.messages import Handle, Map, Tensor
from shmserve.protocol.worker_messages import WorkerReport
from shmserve.repo.config.schema import ModelConfig
from shmserve.shm.arena import Arena, Segment
from shmserve.shm.extents import memfd
from shmserve.shm.mapped import Mapped
from shmserve.workers.backends.base import BackendModel, Context
from shmserve.workers.batch.gather import Gather
from shmserve.workers.batch.scatter import Scatter
from shmserve.workers.batch.specs import inputs_of, outputs_of
from shmserve.workers.gpu.shared import DeviceMemory
from shmserve.workers.hidden_tensors import hidden_tensors_of
from shmserve.workers.outbox import Outbox
from shmserve.workers.output_arenas import Arenas
from shmserve.workers.runner import Runner, runner_of
from tests.support.workers.worker_harness import array_of

Array = np.ndarray[Any, np.dtype[Any]]
WORKER = 7
CONTEXT = Context("m", 1, "m_0", Path(), Path(), {})


class RecordingLink:
    """A link that records the announced segments and discards all other messages."""

    def __init__(self) -> None:
        self.maps: list[Map] = []
        self._codec = codec.Codec(WorkerReport)

    def send_packet(self, packet: bytes, descriptors: Sequence[int]) -> None:
        self.maps += [message for message in self._codec.decode(packet) if isinstance(message, Map)]


class Memory:
    """The output arenas of a worker, and the memory of one client, which the worker has mapped."""

    def __init__(self, owner: int = WORKER, on_gpu: bool = True) -> None:
        self.mapped = Mapped(DeviceMemory if on_gpu else None)
        self._link = RecordingLink()
        self.outbox = Outbox(self._link)  # type: ignore[arg-type]
        self.client = Arena(1, memfd.create, limit_bytes=1 << 28, announce=self._announce)
        self.arenas = Arenas(owner, self.outbox, self.mapped)

    def _announce(self, segment: Segment) -> None:
        self.mapped.add(segment.id, segment.size, fd=os.dup(segment.fd))

    @property
    def maps(self) -> list[Map]:
        self.outbox.flush()
        return self._link.maps

    def share(self, data: bytes) -> Handle:
        block = self.client.allocate(len(data))
        block.memory()[: len(data)] = data
        return block.handle()

    def tensor(self, name: str, array: Array, parts: Sequence[int] = ()) -> Tensor:
        """`parts` empty: inline; else the rows at which each part in shared memory begins."""
        dtype = from_numpy(array.dtype)
        if not parts:
            return Tensor(name, dtype, array.shape, array.tobytes())
        ends = [*parts[1:], len(array)]
        handles = [self.share(array[start:end].tobytes()) for start, end in zip(parts, ends, strict=True)]
        return Tensor(name, dtype, array.shape, tuple(handles))

    def read(self, tensor: Tensor) -> Array:
        """A copy of an output."""
        data = tensor.data
        if isinstance(data, tuple):
            data = b"".join(self.mapped.memory(handle).tobytes() for handle in data)
        assert isinstance(data, bytes)
        return array_of(tensor, data)

    def free(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            if isinstance(tensor.data, tuple):
                self.arenas.free([handle for handle in tensor.data if self.arenas.owns(handle.segment)])

    def close(self) -> None:
        self.outbox.flush()
        self.arenas.close()
        self.client.close()
        self.mapped.close()


class Parts(Memory):
    """The parts around a model with this configuration."""

    def __init__(self, config: ModelConfig, labels: Sequence[tuple[str, ...]] = (), text: bool = False) -> None:
        super().__init__()
        self.config = config
        self.gather = Gather("m", inputs_of(config), self.mapped, text)
        self.scatter = Scatter("m", outputs_of(config), self.arenas, self.mapped, labels)

    def runner(self, model: BackendModel, folder: Path = CONTEXT.folder) -> Runner[Any]:
        hidden = hidden_tensors_of(self.config, folder, model)
        return runner_of("m_0", "", model, self.gather, self.scatter, lambda *_: None, hidden)

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

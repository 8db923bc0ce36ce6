"""Models on a GPU without one: an instance of a backend in this process, on the libraries of tests/standins.

The rule: what the test says of memory is looked up in the stand-in, not in what the backend believes.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from shmserve.dtypes import from_numpy, to_numpy
from shmserve.protocol import codec
from shmserve.protocol.messages import INLINE_BYTES, Handle, Map, Row, Tensor, Work, WorkerReport
from shmserve.repo.config.schema import ModelConfig, ModelInstanceGroup
from shmserve.shm.arena import Arena, Segment
from shmserve.shm.extents import memfd
from shmserve.shm.mapped import Mapped
from shmserve.workers.backends.base import Context
from shmserve.workers.batch.gather import Gather
from shmserve.workers.batch.scatter import Scatter
from shmserve.workers.batch.specs import inputs_of, outputs_of
from shmserve.workers.outbox import Outbox
from shmserve.workers.output_arenas import Arenas
from shmserve.workers.runner import Runner
from tests import STANDINS

Array = np.ndarray[Any, np.dtype[Any]]
NAMES = ("cupy", "cupy.cuda", "cupy.cuda.runtime", "tensorrt", "pynvml")
WORKER = 7


@contextmanager
def standins() -> Iterator[tuple[Any, Any]]:
    """The runtime and TensorRT, new ones, where cupy and tensorrt would be."""
    before = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    sys.path.insert(0, str(STANDINS))
    try:
        yield importlib.import_module("cupy.cuda.runtime"), importlib.import_module("tensorrt")
    finally:
        sys.path.remove(str(STANDINS))
        for name in NAMES:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def plan(folder: Path, tensors: Sequence[dict[str, Any]], ops: dict[str, Any], *profiles: Any, **more: Any) -> Path:
    """Writes a plan for the stand-in."""
    path: Path = folder / "1" / more.pop("name", "model.plan")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"tensors": tensors, "ops": ops, "profiles": profiles or [{}], **more}))
    return path


def tensor(mode: str, name: str, shape: Sequence[int], dtype: str = "FLOAT", **more: Any) -> dict[str, Any]:
    return {"name": name, "mode": mode.upper(), "dtype": dtype, "shape": list(shape), **more}


def adder(folder: Path, width: int = 4, low: int = 1, best: int = 4, high: int = 8, **more: Any) -> Path:
    """y = x + 1, batches of `low` to `high` rows."""
    return plan(
        folder,
        [tensor("input", "x", [-1, width]), tensor("output", "y", [-1, width])],
        {"y": ["add", "x", 1]},
        {"x": [[low, width], [best, width], [high, width]]},
        **more,
    )


class Kept:
    """A link whose other end keeps what was said of segments."""

    def __init__(self) -> None:
        self.maps: list[Map] = []
        self._codec = codec.Codec(WorkerReport)

    def send_packet(self, packet: bytes, descriptors: Sequence[int]) -> None:
        self.maps += [message for message in self._codec.decode(packet) if isinstance(message, Map)]


class Instance:
    """A backend that is loaded, with requests that come to it as they do in a worker."""

    def __init__(
        self,
        backend: Any,
        folder: Path,
        config: ModelConfig,
        settings: dict[str, str] | None = None,
        name: str = "m_0_0",
        owner: int = WORKER,
    ) -> None:
        if not config.instance_group:
            config = _with_group(config)
        self.mapped = Mapped()
        self._link = Kept()
        self._outbox = Outbox(self._link)  # type: ignore[arg-type]
        self.client = Arena(1, memfd.create, limit_bytes=1 << 28, announce=self._announce)
        self.arenas = Arenas(owner, self._outbox, self.mapped)
        self._number = 0
        self._given: list[Handle] = []
        context = Context("m", 1, name, folder, folder / "1", settings or {})
        try:
            self.backend = backend(context)
            try:
                self.config = self.backend.complete(config)
                self.backend.load(self.config)
            except BaseException:
                self.backend.close()
                raise
        except BaseException:
            self._give_back()
            raise
        gather = Gather("m", inputs_of(self.config), self.mapped)
        gather.on_device = self.backend.on_device
        scatter = Scatter("m", outputs_of(self.config), self.arenas, self.mapped)
        self.failures: list[BaseException] = []
        self.runner = Runner(
            name, str(folder), self.backend, gather, scatter, lambda _, error: self.failures.append(error)
        )

    def _announce(self, segment: Segment) -> None:
        self.mapped.add(segment.id, segment.size, fd=os.dup(segment.fd))

    def work(self, *, shared: bool | None = None, outputs: Any = None, **arrays: Array) -> Work:
        self._number += 1
        tensors = tuple(self._tensor(name, array, shared) for name, array in arrays.items())
        length = next(iter(arrays.values())).shape[0]
        return Work(self._number, length if self.config.max_batch_size else 0, tensors, outputs, "internal")

    def _tensor(self, name: str, array: Array, shared: bool | None) -> Tensor:
        dtype = from_numpy(array.dtype)
        if not (array.nbytes > INLINE_BYTES if shared is None else shared):
            return Tensor(name, dtype, array.shape, array.tobytes())
        block = self.client.allocate(array.nbytes)
        block.memory()[: array.nbytes] = array.tobytes()
        self._given.append(block.handle())
        return Tensor(name, dtype, array.shape, (block.handle(),))

    @property
    def maps(self) -> list[Map]:
        """The segments that it has announced."""
        self._outbox.flush()
        return self._link.maps

    def run(self, *works: Work) -> list[Row]:
        """One batch. Then the memory of the inputs is its callers' again, who write something else there."""
        rows, _, _ = self.runner.run(works)
        for segment in self.client.segments:
            for handle in self._given:
                if handle.segment == segment.id:
                    segment.memory[handle.offset : handle.offset + handle.size] = b"\xee" * handle.size
                    self.client.free(handle.segment, handle.offset)
        self._given.clear()
        return rows

    def array(self, row: Row, index: int = 0) -> Array:
        """An output, copied: its memory goes back."""
        assert row.error is None, row.error
        found = row.outputs[index]
        dtype = to_numpy(found.dtype)
        if isinstance(found.data, bytes):
            return np.frombuffer(found.data, dtype).reshape(found.shape)
        assert isinstance(found.data, tuple)
        data = b"".join(self.mapped.memory(handle).tobytes() for handle in found.data)
        self.arenas.free([handle for handle in found.data if self.arenas.owns(handle.segment)])
        return np.frombuffer(data, dtype).reshape(found.shape)

    def close(self) -> None:
        self.backend.close()
        self._give_back()

    def _give_back(self) -> None:
        self._outbox.flush()
        self.arenas.close()
        self.client.close()
        self.mapped.close()

    def __enter__(self) -> Instance:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _with_group(config: ModelConfig) -> ModelConfig:
    return replace(config, instance_group=(ModelInstanceGroup(name="m_0", kind="KIND_GPU", count=1, gpus=(0,)),))

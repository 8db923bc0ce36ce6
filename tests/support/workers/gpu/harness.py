"""Models on a GPU without one: an instance of a backend in this process, on the libraries of tests/standins.

Assertions about memory use the state of the stand-in, not that of the backend.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from shmserve.protocol.messages import INLINE_BYTES, Handle
from shmserve.protocol.worker_messages import Row, Work
from shmserve.repo.config.schema import ModelConfig, ModelInstanceGroup
from shmserve.workers.backends.base import Context
from shmserve.workers.batch.gather import Gather
from shmserve.workers.batch.scatter import Scatter
from shmserve.workers.batch.specs import inputs_of, outputs_of
from shmserve.workers.runner import runner_of
from tests import STANDINS
from tests.support.workers.batch_parts import WORKER, Array, Memory

NAMES = ("cupy", "cupy.arrays", "cupy.cuda", "cupy.cuda.runtime", "tensorrt", "pynvml")


@contextmanager
def standins() -> Iterator[tuple[Any, Any]]:
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
    path: Path = folder / "1" / more.pop("name", "model.plan")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"tensors": tensors, "ops": ops, "profiles": profiles or [{}], **more}))
    return path


def tensor(mode: str, name: str, shape: Sequence[int], dtype: str = "FLOAT", **more: Any) -> dict[str, Any]:
    return {"name": name, "mode": mode.upper(), "dtype": dtype, "shape": list(shape), **more}


def adder(folder: Path, width: int = 4, high: int = 8, **more: Any) -> Path:
    """y = x + 1, batches of 1 to `high` rows."""
    return plan(
        folder,
        [tensor("input", "x", [-1, width]), tensor("output", "y", [-1, width])],
        {"y": ["add", "x", 1]},
        {"x": [[1, width], [4, width], [high, width]]},
        **more,
    )


class Instance(Memory):
    """A loaded model that runs requests as a worker does."""

    def __init__(
        self,
        backend: Any,
        folder: Path,
        config: ModelConfig,
        settings: dict[str, str] | None = None,
        name: str = "m_0_0",
        owner: int = WORKER,
        on_gpu: bool = True,
    ) -> None:
        if not config.instance_group:
            group = ModelInstanceGroup(name="m_0", kind="KIND_GPU", count=1, gpus=(0,))
            config = replace(config, instance_group=(group,))
        super().__init__(owner, on_gpu)
        self._number = 0
        self._inputs: list[Handle] = []
        context = Context("m", 1, name, folder, folder / "1", settings or {})
        try:
            self.backend = backend(context)
            try:
                self.config = self.backend.complete(config)
                self.model = self.backend.load(self.config)
            except BaseException:
                self.backend.close()
                raise
        except BaseException:
            super().close()
            raise
        on_device, stored = self.model.on_device, self.model.stored
        gather = Gather("m", inputs_of(self.config), self.mapped, on_device=on_device, stored=stored)
        scatter = Scatter("m", outputs_of(self.config), self.arenas, self.mapped, strict=self.model.strict)
        self.failures: list[BaseException] = []
        self.runner: Any = runner_of(
            name, str(folder), self.model, gather, scatter, lambda _, error: self.failures.append(error), None
        )

    def work(self, *, shared: bool | None = None, outputs: Any = None, **arrays: Array) -> Work:
        """`shared` None: large inputs are in shared memory, small ones in the message."""
        self._number += 1
        tensors = [
            self.tensor(name, array, [0] if (array.nbytes > INLINE_BYTES if shared is None else shared) else [])
            for name, array in arrays.items()
        ]
        self._inputs += [handle for tensor in tensors if isinstance(tensor.data, tuple) for handle in tensor.data]
        length = next(iter(arrays.values())).shape[0]
        return Work(self._number, length if self.config.max_batch_size else 0, tuple(tensors), outputs, "internal")

    def run(self, *work_items: Work) -> list[Row]:
        """Runs one batch. Then its inputs are overwritten, as their callers may do."""
        rows: list[Row] = self.runner.run(work_items)[0]
        for segment in self.client.segments:
            for handle in self._inputs:
                if handle.segment == segment.id:
                    segment.memory[handle.offset : handle.offset + handle.size] = b"\xee" * handle.size
                    self.client.free(handle.segment, handle.offset)
        self._inputs.clear()
        return rows

    def array(self, row: Row, index: int = 0) -> Array:
        """A copy of an output, whose memory is returned."""
        assert row.error is None, row.error
        found = self.read(row.outputs[index])
        self.free(row.outputs[index])
        return found

    def is_on_device(self, row: Row) -> bool:
        assert row.error is None, row.error
        data: Any = row.outputs[0].data
        return data[0].segment in self.mapped.on_device

    def close(self) -> None:
        self.model.close()
        self.backend.close()
        super().close()

    def __enter__(self) -> Instance:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

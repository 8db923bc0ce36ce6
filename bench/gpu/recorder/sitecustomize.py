"""Counts the copies of tensors in a worker: one line per copy in the folder SHMSERVE_MODEL_COPIES, in a file named
after the process. At the front of PYTHONPATH, it is imported by every process before anything else.

A line has the kind, as CUDA numbers it (1 to the device, 2 to the host, 3 within it), and the library. The copies of
CUDA's runtime through cupy are those of the worker itself. Those of PyTorch are the calls of tensor methods: copies
inside a TorchScript program are the model's.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

FOLDER = os.environ.get("SHMSERVE_MODEL_COPIES", "")


def note(kind: int, library: str) -> None:
    with open("/proc/self/comm") as process, open(f"{FOLDER}/{process.read().strip()}", "a") as file:
        file.write(f"{kind} {library}\n")


def watch_cupy(runtime: Any) -> None:
    copy = runtime.memcpyAsync

    def memcpyAsync(target: int, source: int, size: int, kind: int, stream: int) -> None:
        note(kind, "cuda")
        copy(target, source, size, kind, stream)

    runtime.memcpyAsync = memcpyAsync


def watch_torch(torch: Any) -> None:
    kinds = {("cpu", "cuda"): 1, ("cuda", "cpu"): 2, ("cuda", "cuda"): 3}
    kept = torch.Tensor.copy_, torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.clone

    def copy_(self: Any, source: Any, *more: Any, **options: Any) -> Any:
        if kind := kinds.get((source.device.type, self.device.type)):
            note(kind, "torch")
        return kept[0](self, source, *more, **options)

    def recording(method: Callable[..., Any]) -> Callable[..., Any]:
        def copied(self: Any, *arguments: Any, **options: Any) -> Any:
            result = method(self, *arguments, **options)
            kind = kinds.get((self.device.type, result.device.type))
            if kind and result.data_ptr() != self.data_ptr():
                note(kind, "torch")
            return result

        return copied

    torch.Tensor.copy_ = copy_
    torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.clone = map(recording, kept[1:])


WATCHED: dict[str, Callable[[Any], None]] = {"cupy.cuda.runtime": watch_cupy, "torch": watch_torch}


class RecorderFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        watch = WATCHED.pop(name, None)
        if watch is None:
            return None
        spec = importlib.util.find_spec(name)  # by the other finders: this one no longer knows the name
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            watch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if FOLDER:
    sys.meta_path.insert(0, RecorderFinder())

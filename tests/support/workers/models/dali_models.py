"""Models for DALI: serialized pipelines for the CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shmserve.repo.config.schema import ModelConfig
from tests.support.workers.worker_harness import config, echo_config

INSTALLED = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None
X, Y = {"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,))}


def pipeline(folder: Path, make: Callable[[Any, Any], Any], *, batch: int = 4, **declared: Any) -> Path:
    """Writes the pipeline that `make` defines with `fn` and `types` of DALI."""
    from nvidia.dali import Pipeline, fn, types

    made = Pipeline(batch_size=batch, num_threads=1, device_id=None, **declared)
    with made:
        found = make(fn, types)
        made.set_outputs(*(found if isinstance(found, tuple) else (found,)))
    path = folder / "1" / "model.dali"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(made.serialize())
    return path


def data_type(types: Any, dtype: str) -> Any:
    return getattr(types, {"FP16": "FLOAT16", "FP32": "FLOAT", "FP64": "FLOAT64"}.get(dtype, dtype))


def source(fn: Any, types: Any, name: str, dtype: str, rank: int) -> Any:
    return fn.external_source(name=name, dtype=data_type(types, dtype), ndim=rank)


def echo(folder: Path, dtypes: Sequence[str], dims: Sequence[int], max_batch: int) -> ModelConfig:
    def make(fn: Any, types: Any) -> Any:
        return tuple(source(fn, types, f"x{dtype}", dtype, len(dims)) for dtype in dtypes)

    pipeline(folder, make)
    return echo_config("dali", dtypes, dims, max_batch)


def failing(folder: Path) -> ModelConfig:
    """y = x, after a lookup of element x[0] of four, which fails if it does not exist."""

    def make(fn: Any, types: Any) -> Any:
        x = source(fn, types, "x", "FP32", 1)
        table = types.Constant([0.0, 0.0, 0.0, 0.0], device="cpu")
        place = fn.cast(fn.slice(x, 0, 1, axes=[0]), dtype=types.INT32)
        return x + fn.slice(table, place, 1, axes=[0], out_of_bounds_policy="error")

    pipeline(folder, make)
    return config("dali", X, Y, max_batch=8)

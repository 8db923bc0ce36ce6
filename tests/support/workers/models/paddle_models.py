"""Models for PaddlePaddle."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from shmserve.repo.config.schema import ModelConfig
from tests.support.workers.worker_harness import config, echo_config

INSTALLED = importlib.util.find_spec("paddle") is not None
if INSTALLED:  # imported now: the import and the first run start threads, which would count as leaks of a test
    os.environ.setdefault("GLOG_minloglevel", "2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import paddle
        import paddle.inference
    paddle.enable_static()
    paddle.static.Executor(paddle.CPUPlace()).run(paddle.static.Program())
    paddle.disable_static()

DTYPES = ("BOOL", "UINT8", "INT8", "INT32", "INT64", "FP16", "FP32", "FP64")
X, Y = {"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,))}
Build = Callable[[], tuple[list[Any], list[Any]]]


def save(folder: Path, build: Build, older: bool = False) -> None:
    """Writes model.json, or the older model.pdmodel, and model.pdiparams if the model has weights."""
    (folder / "1").mkdir(parents=True, exist_ok=True)
    if older:
        with paddle.pir_utils.OldIrGuard():
            _save(folder, build)
    else:
        _save(folder, build)


def _save(folder: Path, build: Build) -> None:
    paddle.enable_static()
    try:
        program, startup = paddle.static.Program(), paddle.static.Program()
        with paddle.static.program_guard(program, startup):
            inputs, outputs = build()
            executor = paddle.static.Executor(paddle.CPUPlace())
            executor.run(startup)
            path = str(folder / "1" / "model")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it warns of models without weights
                paddle.static.save_inference_model(path, inputs, outputs, executor, program=program)
    finally:
        paddle.disable_static()


def data(name: str, dims: Sequence[int], dtype: str = "FP32") -> Any:
    names = {"FP16": "float16", "FP32": "float32", "FP64": "float64"}
    return paddle.static.data(name, list(dims), names.get(dtype, dtype.lower()))


def _json(found: ModelConfig) -> ModelConfig:
    return replace(found, default_model_filename="model.json")


def echo(folder: Path, dtypes: Sequence[str], dims: Sequence[int], max_batch: int) -> ModelConfig:
    full = [-1, *dims] if max_batch else list(dims)

    def build() -> tuple[list[Any], list[Any]]:
        inputs = [data(f"x{dtype}", full, dtype) for dtype in dtypes]
        return inputs, [paddle.assign(tensor) for tensor in inputs]

    save(folder, build)
    return _json(echo_config("paddle", dtypes, dims, max_batch))


def failing(folder: Path) -> ModelConfig:
    """y = x, after a lookup of all values in a table of four, which fails for others."""

    def build() -> tuple[list[Any], list[Any]]:
        x = data("x", [-1, -1])
        place = paddle.cast(paddle.flatten(x), "int64")
        looked = paddle.gather(paddle.zeros([4]), place)
        return [x], [paddle.assign(x), paddle.reshape(looked, paddle.shape(x))]

    save(folder, build)
    return _json(config("paddle", X, {**Y, "looked": ("FP32", (-1,))}, max_batch=8))


def adding(folder: Path) -> None:
    def build() -> tuple[list[Any], list[Any]]:
        a, b = data("a", [-1, 2]), data("b", [-1, 2])
        return [a, b], [a + b]

    save(folder, build)

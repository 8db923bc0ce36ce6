"""Writes models of other frameworks as ONNX files, each with the converter that exists for its framework.

Invariant: a framework is imported only for a model of its own.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shmserve.dtypes import FROM_CONFIG
from shmserve.errors import InvalidRequest, ModelFailed, ServeError, Unsupported
from shmserve.paths import python
from shmserve.repo.config.schema import ModelConfig, ModelInput

ROWS = 2
"""Rows of the example with which PyTorch traces a model; one row could be taken for a fixed size."""
FREE = 16
"""Size in this example of other dims that can have any size."""
EXPORT_S = 600.0
PADDLE_OPSET = 17
"""The default of its converter is too old for many operators."""
Export = Callable[[Path, ModelConfig, Path, "int | None"], None]
"""Takes the model's file, its configuration as a server completes it, the file to write, and the version of the ONNX
operators, None for the converter's default."""


def export(file: Path, config: ModelConfig, out: Path, opset: int | None) -> None:
    """Writes the ONNX file. Raises InvalidRequest, ModelFailed, and ModuleNotFoundError for a missing converter."""
    write = EXPORTS.get(config.backend)
    if write is None:
        raise InvalidRequest(f"backend '{config.backend}' cannot be converted; expected one of {', '.join(EXPORTS)}")
    try:
        write(file, config, out, opset)
    except (ModuleNotFoundError, ServeError):
        raise
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        raise ModelFailed(f"{file.name} cannot be converted: {text.splitlines()[0]}") from error


def _torch(file: Path, config: ModelConfig, out: Path, opset: int | None) -> None:
    import torch

    names: dict[str, Any] = {
        "input_names": [entry.name for entry in config.input],
        "output_names": [entry.name for entry in config.output],
        "opset_version": opset,
    }
    if file.suffix == ".pt2":
        torch.onnx.export(torch.export.load(file), (), out, dynamo=True, external_data=False, verbose=False, **names)
        return
    rows = config.max_batch_size > 0
    example = tuple(torch.zeros(_size(entry, rows), dtype=_torch_type(torch, entry)) for entry in config.input)
    free = {entry.name: dict(_free(entry.name, entry.dims, rows)) for entry in config.input}
    free |= {entry.name: dict(_free(entry.name, entry.dims, rows)) for entry in config.output}
    torch.onnx.export(torch.jit.load(file, "cpu"), example, out, dynamo=False, dynamic_axes=free, **names)


def _size(entry: ModelInput, rows: bool) -> list[int]:
    return [ROWS] * rows + [FREE if dim < 0 else dim for dim in entry.dims]


def _free(name: str, dims: Sequence[int], rows: bool) -> Iterator[tuple[int, str]]:
    """The axes that can have any size, with a name for each."""
    if rows:
        yield 0, "rows"
    for axis, dim in enumerate(dims, start=int(rows)):
        if dim < 0:
            yield axis, f"{name}_{axis}"


def _torch_type(torch: Any, entry: ModelInput) -> Any:
    from shmserve.workers.backends.pytorch.programs import DTYPES

    wanted = FROM_CONFIG[entry.data_type]
    return next((dtype for dtype, name in DTYPES.items() if name == wanted), torch.float32)


def _tensorflow(file: Path, config: ModelConfig, out: Path, opset: int | None) -> None:
    """The converter has only a command for SavedModels."""
    command = [*python(), "-m", "tf2onnx.convert", "--saved-model", str(file), "--output", str(out)]
    command += ["--opset", str(opset)] if opset is not None else []
    import tf2onnx  # noqa: F401 - a missing package is reported as for the other converters

    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=EXPORT_S)
    if ran.returncode:
        raise ModelFailed(f"{file.name} cannot be converted: {ran.stderr.strip().rpartition(chr(10))[2]}")


def _paddle(file: Path, config: ModelConfig, out: Path, opset: int | None) -> None:
    try:
        import paddle2onnx
    except ImportError as error:  # no extra has it, because it needs an older version of the package onnx
        raise Unsupported("PaddlePaddle's converter is not installed: pip install paddle2onnx") from error
    weights = file.with_suffix(".pdiparams")
    files = (str(file), str(weights) if weights.exists() else "", str(out))
    # The optimizer, on by default, installs packages.
    paddle2onnx.export(*files, opset_version=opset or PADDLE_OPSET, optimize_tool="None")


def _sklearn(file: Path, config: ModelConfig, out: Path, opset: int | None) -> None:
    import skl2onnx
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType

    if file.suffix != ".joblib":
        raise InvalidRequest("of Python models, only those of scikit-learn with a file model.joblib can be converted")
    import joblib

    model = joblib.load(file)
    features = getattr(model, "n_features_in_", None)
    kind = StringTensorType([None, 1]) if features is None else FloatTensorType([None, features])
    options = {id(model): {"zipmap": False}} if hasattr(model, "predict_proba") else None
    name = config.input[0].name
    converted = skl2onnx.convert_sklearn(model, initial_types=[(name, kind)], options=options, target_opset=opset)
    out.write_bytes(converted.SerializeToString())


EXPORTS: Mapping[str, Export] = {"pytorch": _torch, "tensorflow": _tensorflow, "paddle": _paddle, "python": _sklearn}
"""Backend -> the function that writes its models as ONNX."""

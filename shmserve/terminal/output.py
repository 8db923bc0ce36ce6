"""Prints the outputs of a model as a table or as JSON, or writes them to files.

Invariant: no value is changed silently. Values that .npy cannot hold are errors; values that JSON cannot express become
strings.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmserve.dtypes import from_bfloat16, from_numpy
from shmserve.terminal.errors import Failed
from shmserve.terminal.tables import duration_text, plain_text, shape_text, table, values_text

Outputs = Mapping[str, NDArray[Any]]
Dtypes = Mapping[str, str]
"""Output name -> data type from the model's metadata. The array alone is not sufficient, as numpy has no BF16."""
Files = Mapping[str, Path]
"""Output name -> the file with its values. If empty, the values are printed."""


def _dtype(name: str, array: NDArray[Any], dtypes: Dtypes) -> str:
    return dtypes.get(name) or from_numpy(array.dtype)


def _plain(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The array to print. Converts BF16 to float32, as numpy would print its bits."""
    return from_bfloat16(array) if dtype == "BF16" else array


def outputs_table(outputs: Outputs, dtypes: Dtypes, files: Files) -> str:
    rows = []
    for name, array in outputs.items():
        dtype = _dtype(name, array, dtypes)
        row = [name, dtype, shape_text(array.shape), values_text(_plain(array, dtype))]
        rows.append([*row, str(files[name])] if files else row)
    return table(["output", "dtype", "shape", "values", *(["file"] if files else [])], rows)


def timing(seconds: Sequence[float]) -> str:
    """One line with the duration of one request, or with the median and 99th percentile of several."""
    if len(seconds) == 1:
        return duration_text(seconds[0])
    median, p99 = statistics.median(seconds), percentile(seconds, 99)
    return f"{len(seconds)} requests one after another: median {duration_text(median)}, p99 {duration_text(p99)}"


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile: the smallest value v such that at least `share` percent of the values are <= v."""
    return sorted(values)[max(0, math.ceil(len(values) * share / 100) - 1)]


def document(
    model: str, version: int, outputs: Outputs, dtypes: Dtypes, files: Files, seconds: Sequence[float]
) -> dict[str, Any]:
    """The result as a JSON document."""
    described = {}
    for name, array in outputs.items():
        dtype = _dtype(name, array, dtypes)
        described[name] = entry = {"dtype": dtype, "shape": list(array.shape)}
        if files:
            entry["file"] = str(files[name])
        else:
            entry["data"] = as_json(_plain(array, dtype).tolist())
    microseconds = [round(value * 1e6, 1) for value in seconds]
    latency = {"requests": len(seconds), "median": round(statistics.median(microseconds), 1)}
    latency["p99"] = percentile(microseconds, 99)
    return {"model": model, "version": version, "outputs": described, "latency_us": latency}


def as_json(value: Any) -> Any:
    """Converts NaN, infinities and bytes, which JSON lacks, to strings."""
    if isinstance(value, list):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return plain_text(value) if isinstance(value, bytes) else value


def file_name(output: str) -> str:
    """The file name for an output. Replaces slashes and other special characters, so that the file stays in its
    directory."""
    return re.sub(r"[^\w.-]", "_", output).lstrip(".") + ".npy"


def write(folder: Path, outputs: Outputs, dtypes: Dtypes) -> dict[str, Path]:
    """Writes each output to `folder`/NAME.npy and returns the paths. Raises Failed."""
    files: dict[str, Path] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in outputs.items():
            path = folder / file_name(name)
            if path in files.values():
                raise Failed(f"outputs would share the file {path}; choose one of them with --outputs")
            np.save(path, storable(name, array, _dtype(name, array, dtypes)), allow_pickle=False)
            files[name] = path
    except OSError as error:
        raise Failed(f"cannot write to {folder}: {error.strerror or error}") from error
    return files


def storable(name: str, array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Converts to types that .npy can hold without pickle: strings get a fixed width, BF16 becomes its uint16 bits."""
    if dtype == "BF16":
        return np.ascontiguousarray(array).view(np.uint16).reshape(array.shape)
    if dtype != "BYTES":
        return array
    if any(value.endswith(b"\0") for value in array.reshape(-1)):
        raise Failed(f"output '{name}' has strings that end with a zero byte, which .npy cannot hold; use --json")
    return array.astype(np.bytes_)

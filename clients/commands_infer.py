"""`shmserve infer`: one request, or the same one again and again, and its answer for a person, a program or a file."""

from __future__ import annotations

import argparse
import math
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shmserve.clients import commands_inputs as inputs
from shmserve.clients.commands_base import Failed, Misuse, connected, print_json
from shmserve.clients.tables import duration_text, plain_text, shape_text, table, values_text
from shmserve.dtypes import from_numpy

if TYPE_CHECKING:
    from shmserve.clients.sync import Client
    from shmserve.session import Result

Dtypes = Mapping[str, str]
"""Output name -> wire type, as the model's metadata says."""


def infer(args: argparse.Namespace) -> int:
    _check(args)
    with connected(args) as client:
        metadata = client.metadata(args.model, args.version)
        given = _inputs(args, client, inputs.specs(metadata))
        result, seconds = _run(args, client, given)
        dtypes = {spec["name"]: spec["datatype"] for spec in metadata["outputs"]}
        files = _write(args.out, result, dtypes) if args.out is not None else {}
        if args.json:
            print_json(_document(args.model, result, dtypes, files, seconds), indent=None)
        else:
            _show(args.model, result, dtypes, files, seconds)
    return 0


def _check(args: argparse.Namespace) -> None:
    if not args.random:
        for name in ("batch", "seed", "shape"):
            if getattr(args, name) not in (None, []):
                raise Misuse(f"--{name} is for random data: give --random too")


def _inputs(args: argparse.Namespace, client: Client, known: Mapping[str, inputs.Spec]) -> inputs.Given:
    given: inputs.Given = {}
    if args.file is not None:
        given.update(inputs.from_json(args.file, known))
    given.update(inputs.from_arguments(args.input, known))
    if args.random:
        left = {name: spec for name, spec in known.items() if name not in given}
        if args.batch is not None:
            most = client.config(args.model, args.version)["max_batch_size"]
            if args.batch > most:
                raise Misuse(f"--batch {args.batch}: the max_batch_size of model '{args.model}' is {most}")
        given.update(inputs.random(left, args.batch, inputs.shapes_from(args.shape, left), args.seed))
    if known and not given:
        example = next(iter(known))
        raise Misuse(
            f"model '{args.model}' needs {inputs.describe(known)}: "
            f"give --input {example}=VALUE, a JSON file, or --random for data without a meaning"
        )
    return given


def _run(args: argparse.Namespace, client: Client, given: inputs.Given) -> tuple[Result, list[float]]:
    outputs = args.outputs.split(",") if args.outputs else None
    seconds = []
    for _ in range(args.repeat):
        started = time.perf_counter()
        result = client.infer(args.model, given, outputs=outputs, version=args.version, timeout=args.timeout)
        seconds.append(time.perf_counter() - started)
    return result, seconds


# ------------------------------------------------------------------------------------------ the answer


def _dtype(name: str, array: NDArray[Any], dtypes: Dtypes) -> str:
    return dtypes.get(name) or from_numpy(array.dtype)


def _plain(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The array in a type that prints as numbers."""
    return inputs.from_bfloat16(array) if dtype == "BF16" else array


def _show(model: str, result: Result, dtypes: Dtypes, files: Mapping[str, Path], seconds: Sequence[float]) -> None:
    rows = []
    for name, array in result.items():
        dtype = _dtype(name, array, dtypes)
        row = [name, dtype, shape_text(array.shape), values_text(_plain(array, dtype))]
        rows.append([*row, str(files[name])] if files else row)
    print(table(["output", "dtype", "shape", "values", *(["file"] if files else [])], rows))
    print()
    print(f"{model} version {result.version}, {timing(seconds)}")


def timing(seconds: Sequence[float]) -> str:
    """One request: how long it took. More: median and 99th percentile, one after another."""
    if len(seconds) == 1:
        return duration_text(seconds[0])
    median, p99 = statistics.median(seconds), percentile(seconds, 99)
    return f"{len(seconds)} requests one after another: median {duration_text(median)}, p99 {duration_text(p99)}"


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` percent of all do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * share / 100) - 1)]


def _document(
    model: str, result: Result, dtypes: Dtypes, files: Mapping[str, Path], seconds: Sequence[float]
) -> dict[str, Any]:
    outputs = {}
    for name, array in result.items():
        dtype = _dtype(name, array, dtypes)
        outputs[name] = entry = {"dtype": dtype, "shape": list(array.shape)}
        if files:
            entry["file"] = str(files[name])
        else:
            entry["data"] = as_json(_plain(array, dtype).tolist())
    microseconds = [round(value * 1e6, 1) for value in seconds]
    latency = {"requests": len(seconds), "median": round(statistics.median(microseconds), 1)}
    latency["p99"] = percentile(microseconds, 99)
    return {"model": model, "version": result.version, "outputs": outputs, "latency_us": latency}


def as_json(value: Any) -> Any:
    """JSON has no NaN and no bytes: they become strings."""
    if isinstance(value, list):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return plain_text(value) if isinstance(value, bytes) else value


def file_name(output: str) -> str:
    """An output's name may hold slashes and more; its file stays in the directory."""
    return re.sub(r"[^\w.-]", "_", output).lstrip(".") + ".npy"


def _write(folder: Path, result: Result, dtypes: Dtypes) -> dict[str, Path]:
    files: dict[str, Path] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in result.items():
            path = folder / file_name(name)
            if path in files.values():
                raise Failed(f"outputs would share the file {path}; choose one of them by --outputs")
            np.save(path, _storable(name, array, _dtype(name, array, dtypes)), allow_pickle=False)
            files[name] = path
    except OSError as error:
        raise Failed(f"cannot write to {folder}: {error.strerror or error}") from error
    return files


def _storable(name: str, array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """What .npy can hold without pickle: strings of one width, and the bits of BF16."""
    if dtype == "BF16":
        return np.ascontiguousarray(array).view(np.uint16).reshape(array.shape)
    if dtype != "BYTES":
        return array
    if any(value.endswith(b"\0") for value in array.reshape(-1)):
        raise Failed(f"output '{name}' has strings that end with a zero byte, which .npy cannot hold; use --json")
    return array.astype(np.bytes_)

"""Finds the tensors of a PyTorch file, for `shmserve init`: `python -m shmserve.workers.backends.pytorch.describe FILE`
prints them as JSON, null if they cannot be found.

A torch.export program describes its tensors. TorchScript contains only the names of the arguments: sizes are guessed
from the weights, and used only if the program runs with them, with one row and with several.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from shmserve.errors import ServeError
from shmserve.repo.config.complete import TensorFacts
from shmserve.repo.starters.starter import WRONG_FILE
from shmserve.workers.backends.pytorch.programs import DTYPES, Program, Script, open_program

ROWS = 3
IMAGES = (224, 32, 28, 64, 256, 299)
"""Widths and heights to try for the input of a convolution."""
LENGTH = 16
TRIES = 40
GROWTH = 32
"""Amount by which a size is changed to test whether it may vary. A multiple of 32, so that networks that halve sizes
round in the same way."""
_Named = dict[str, Any]


def describe(path: Path) -> dict[str, Any] | None:
    """{"inputs", "outputs": [name, dtype, dims], "batches": bool, "note": str}; None if they cannot be found.
    `dims` have the dimension for rows if `batches`.
    """
    program = open_program(path, torch.device("cpu"))
    facts = program.facts()
    if facts is not None:
        inputs, outputs = ([tensor for tensor in tensors if tensor is not None] for tensors in facts)
        batches = all(tensor.dims and tensor.dims[0] == -1 for tensor in (*inputs, *outputs))
        return {"inputs": inputs, "outputs": outputs, "batches": batches, "note": ""}
    return _probed(program) if isinstance(program, Script) else None


def _probed(program: Script) -> dict[str, Any] | None:
    needed = [argument.names[0] for argument in program.arguments if not argument.optional]
    if program.whole_dict or not needed or any(argument.strings for argument in program.arguments):
        return None
    for dtype, size in islice(_candidates(program.module), TRIES):
        one, several = (_run(program, dtype, (rows, *size)) for rows in (1, ROWS))
        if one is not None and several is not None and _has_rows(one, 1) and _has_rows(several, ROWS):
            dims, outputs = _free(program, dtype, size, several)
            inputs = [TensorFacts(name, DTYPES[dtype], (-1, *dims)) for name in needed]
            note = "Found by running the file with zeros: check them."
            return {"inputs": inputs, "outputs": outputs, "batches": True, "note": note}
    return None


def _candidates(module: Any) -> Iterator[tuple[torch.dtype, tuple[int, ...]]]:
    """Types and sizes of a row, starting with the first weights of each kind."""
    for name, weight in module.named_parameters():
        if not name.endswith("weight"):
            continue
        if weight.dim() == 4:
            yield from ((weight.dtype, (weight.shape[1], side, side)) for side in IMAGES)
        elif weight.dim() == 3:
            yield weight.dtype, (weight.shape[1], LENGTH)
        elif weight.dim() == 2:
            yield weight.dtype, (weight.shape[1],)
            yield weight.dtype, (LENGTH, weight.shape[1])
            yield torch.int64, (LENGTH,)
    yield torch.float32, (LENGTH,)
    yield torch.float32, (3, IMAGES[0], IMAGES[0])


def _run(program: Program, dtype: torch.dtype, size: Sequence[int]) -> _Named | None:
    """The outputs for zeros of this size; None if the program refuses them."""
    leaves = [None if argument.optional else torch.zeros(size, dtype=dtype) for argument in program.arguments]
    try:
        with torch.inference_mode():
            result = program.call(leaves)
    except (RuntimeError, IndexError, NotImplementedError, TypeError, ValueError):  # another size may be right
        return None
    if isinstance(result, torch.Tensor):
        named = {"OUTPUT__0": result}
    elif isinstance(result, dict):
        named = dict(result)
    elif isinstance(result, (tuple, list)):
        fields = getattr(result, "_fields", [f"OUTPUT__{place}" for place in range(len(result))])
        named = dict(zip(fields, result, strict=True))
    else:
        return None
    known = all(isinstance(value, torch.Tensor) and value.dtype in DTYPES for value in named.values())
    return named if named and known else None


def _has_rows(outputs: _Named, rows: int) -> bool:
    return all(value.dim() > 0 and value.shape[0] == rows for value in outputs.values())


def _free(
    program: Program, dtype: torch.dtype, size: Sequence[int], outputs: _Named
) -> tuple[list[int], list[TensorFacts]]:
    """The dims of a row and the outputs, with -1 for each size that may vary."""
    dims = list(size)
    shapes = {name: [-1, *value.shape[1:]] for name, value in outputs.items()}
    for place, length in enumerate(size):
        other = [ROWS, *size]
        other[place + 1] = length + GROWTH
        results = _run(program, dtype, other)
        if results is None or results.keys() != outputs.keys() or not _has_rows(results, ROWS):
            continue
        if any(results[name].dim() != value.dim() for name, value in outputs.items()):
            continue
        dims[place] = -1
        for name, shape in shapes.items():
            shape[:] = [
                old if old == new else -1 for old, new in zip(shape, (-1, *results[name].shape[1:]), strict=True)
            ]
    return dims, [TensorFacts(name, DTYPES[value.dtype], tuple(shapes[name])) for name, value in outputs.items()]


def main() -> int:
    try:
        print(json.dumps(describe(Path(sys.argv[1]))))
    except ServeError as error:
        print(error, file=sys.stderr)
        return WRONG_FILE
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The inputs of the requests: from texts and files, which are cycled, and random for the rest, without optional ones.

Invariant: dtype and shape come from the model's metadata; a value that does not fit is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from shmserve.terminal import inputs
from shmserve.terminal.errors import Misuse
from shmserve.terminal.files import from_file
from shmserve.terminal.inputs import Arrays
from shmserve.terminal.values import Spec
from shmserve.tools.load.plan import RequestInputs
from shmserve.tools.load.targets.base import ModelFacts

MAX_BYTES = 256 << 20
"""Random requests are distinct as long as they need no more memory than this."""


def request_inputs(wanted: RequestInputs, model: str, facts: ModelFacts) -> list[Arrays]:
    """The inputs of each distinct request. Lists of different lengths are cycled until the longest ends."""
    known = facts.inputs
    lists: dict[str, list[Any]] = {}
    for text in wanted.texts:
        name, values = _from_text(text, known)
        lists[name] = values
    documents = _from_data(wanted.data, known) if wanted.data is not None else []
    fixed = {name for document in documents for name in document}
    shaped = {text.partition("=")[0] for text in wanted.shapes}
    left_out = facts.optional - shaped
    remaining = {name: known[name] for name in known if not (name in lists or name in fixed or name in left_out)}
    if wanted.batch is not None and wanted.batch > facts.max_batch:
        raise Misuse(f"--batch {wanted.batch}: the max_batch_size of model '{model}' is {facts.max_batch}")
    shapes = inputs.shapes_from(wanted.shapes, remaining)
    randoms = [inputs.random(remaining, wanted.batch, shapes, wanted.seed)] if remaining else []
    if remaining:
        size = max(1, sum(getattr(array, "nbytes", 0) for array in randoms[0].values()))
        count = max(1, min(wanted.distinct, MAX_BYTES // size))
        randoms += [inputs.random(remaining, wanted.batch, shapes, wanted.seed + number) for number in range(1, count)]
    longest = max([len(values) for values in lists.values()] + [len(documents), len(randoms), 1])
    return [
        {name: values[number % len(values)] for name, values in lists.items()}
        | (documents[number % len(documents)] if documents else {})
        | (randoms[number % len(randoms)] if randoms else {})
        for number in range(longest)
    ]


def mean_rows(requests: Sequence[Arrays], max_batch: int) -> float:
    """The mean number of rows: files may have different numbers. A request without inputs counts as one row."""
    if not max_batch:
        return 1
    return fmean(int(next(iter(arrays.values())).shape[0]) if arrays else 1 for arrays in requests)


def _from_text(text: str, known: Mapping[str, Spec]) -> tuple[str, list[Any]]:
    """NAME=VALUE as for `infer`, or NAME=@FILE, or NAME=@DIRECTORY: each of its files in turn, by name."""
    name, separator, value = text.partition("=")
    if not separator or not value.startswith("@"):
        ((name, array),) = inputs.from_arguments([text], known).items()
        return name, [array]
    spec = known.get(name)
    if spec is None:
        raise Misuse(f"the model has no input '{name}'; it has {inputs.describe(known)}")
    return name, [from_file(file, spec) for file in _files(Path(value[1:]), f"--input {text}")]


def _files(path: Path, what: str) -> list[Path]:
    if not path.is_dir():
        return [path]
    result = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    if not result:
        raise Misuse(f"{what}: the directory has no files")
    return result


def _from_data(text: str, known: Mapping[str, Spec]) -> list[Arrays]:
    """JSON files as for `infer`: one file, or all of a directory in turn."""
    return [inputs.from_json(str(file), known) for file in _files(Path(text), f"--data {text}")]

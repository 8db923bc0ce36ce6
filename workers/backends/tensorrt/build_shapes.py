"""The shapes that a plan is built for: minimum, best and maximum of each input.

Invariant: nothing is guessed. A dimension that neither the arguments nor the configuration fix is an error with its
name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shmserve.workers.batch.specs import matches

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig

Shape = tuple[int, ...]
Ranges = dict[str, tuple[Shape, Shape, Shape]]
FORM = "NAME=MIN:BEST:MAX, each like 8x3x224x224, or NAME=SHAPE for all three"


class BadShapes(Exception):
    """Invalid usage of the command."""


def from_words(words: Sequence[str], inputs: Mapping[str, Shape]) -> Ranges:
    """Parses one profile, `x=1x3:4x3:8x3 mask=1x5:4x5:8x5`. Inputs with only fixed dims may be left out."""
    ranges: Ranges = {}
    for word in words:
        name, equals, text = word.rpartition("=")
        if not equals or not name:
            raise BadShapes(f"--profile: '{word}' is not {FORM}")
        if name not in inputs:
            raise BadShapes(f"--profile: the model has no input '{name}'; its inputs are {', '.join(inputs)}")
        shapes = [_shape(part, word) for part in text.split(":")]
        if len(shapes) not in (1, 3):
            raise BadShapes(f"--profile: '{word}' is not {FORM}")
        low, best, high = shapes * 3 if len(shapes) == 1 else shapes
        dims = inputs[name]
        for shape in (low, best, high):
            if not matches(shape, dims):
                text = "x".join(map(str, shape))
                raise BadShapes(f"--profile: {text} is not a shape of input '{name}', which is {list(dims)}")
        if not all(a <= b <= c for a, b, c in zip(low, best, high, strict=True)):
            raise BadShapes(f"--profile: '{word}' must not get smaller from MIN to BEST to MAX")
        ranges[name] = low, best, high
    missing = [name for name, dims in inputs.items() if -1 in dims and name not in ranges]
    if missing:
        raise BadShapes(f"--profile: inputs with dynamic dims are missing: {_listed(missing, inputs)}")
    return ranges


def from_config(config: ModelConfig, dynamic: Mapping[str, Shape], max_batch: int) -> Ranges:
    """Returns batches up to max_batch_size, optimised for the largest preferred one, with the dims of the
    configuration."""
    max_batch = max_batch or config.max_batch_size
    preferred = config.dynamic_batching.preferred_batch_size if config.dynamic_batching is not None else ()
    best = max((size for size in preferred if size <= max_batch), default=max_batch)
    entries = {entry.name: entry for entry in config.input}
    ranges: Ranges = {}
    for name, dims in dynamic.items():
        entry = entries.get(name)
        tail = dims[1:] if max_batch else dims
        if entry is not None:
            shape = tuple(entry.dims if entry.reshape is None else entry.reshape.shape)
            if len(shape) == len(tail):
                tail = tuple(have if have != -1 else dim for have, dim in zip(tail, shape, strict=True))
        if -1 in tail or (max_batch and dims[0] != -1):
            raise BadShapes(_ask(name, dims))
        if not max_batch:
            ranges[name] = tail, tail, tail
            continue
        ranges[name] = (1, *tail), (best, *tail), (max_batch, *tail)
    return ranges


def with_batch(dynamic: Mapping[str, Shape], max_batch: int) -> Ranges:
    """Returns batches up to `max_batch` rows, for inputs whose other dims are fixed."""
    ranges: Ranges = {}
    for name, dims in dynamic.items():
        if not max_batch or dims[0] != -1 or -1 in dims[1:]:
            raise BadShapes(_ask(name, dims))
        ranges[name] = (1, *dims[1:]), (max_batch, *dims[1:]), (max_batch, *dims[1:])
    return ranges


def _shape(text: str, word: str) -> Shape:
    parts = text.split("x") if text else []
    if not all(part.isdecimal() for part in parts):
        raise BadShapes(f"--profile: '{word}' is not {FORM}")
    return tuple(map(int, parts))


def _listed(names: Sequence[str], inputs: Mapping[str, Shape]) -> str:
    return ", ".join(f"'{name}' {list(inputs[name])}" for name in names)


def _ask(name: str, dims: Shape) -> str:
    return (
        f"input '{name}' is {list(dims)}: say with --max-batch N how large batches get (where only the first dim is "
        f"dynamic), or with --profile {FORM} what it is to be built for"
    )

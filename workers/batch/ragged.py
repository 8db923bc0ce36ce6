"""Ragged batches, whose requests differ in shape: inputs computed from the shapes, and outputs cut back by them.

Invariant: a request counts once, with all its elements including its batch dimension; only the kinds BATCH_ITEM_SHAPE*
count the items of its batch dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.dtypes import elements
from shmserve.errors import InvalidRequest
from shmserve.workers.batch.specs import batch_inputs_of, inputs_of

if TYPE_CHECKING:
    from shmserve.protocol.worker_messages import Work
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.batch.specs import Spec

Array = np.ndarray[Any, np.dtype[Any]]
Shapes = list[tuple[int, ...] | None]
"""The shapes of one input with the batch dimension; None for a request without the input."""


def shapes_in(works: Sequence[Work], spec: Spec) -> Shapes:
    """Returns the shapes of an input in each request, as the backend sees them."""
    name = spec.name
    shapes: Shapes = []
    for work in works:
        shape = next((tensor.shape for tensor in work.inputs if tensor.name == name), None)
        shapes.append(spec.inner(shape) if shape is not None and spec.reshaped else shape)
    return shapes


class BatchInputs:
    """Computes the inputs of `batch_input`. One for each model."""

    def __init__(self, config: ModelConfig) -> None:
        self.specs = batch_inputs_of(config)
        sources = {spec.name: spec for spec in inputs_of(config)}
        self._inputs: list[tuple[str, Spec, Spec]] = []
        specs = iter(self.specs)
        for index, entry in enumerate(config.batch_input):
            source = sources.get(entry.source_input[0]) if len(entry.source_input) == 1 else None
            if source is None:
                raise InvalidRequest(
                    f"batch_input[{index}] of model '{config.name}' needs one source_input that is an input of the "
                    f"model, found {list(entry.source_input)}"
                )
            self._inputs += [(entry.kind, source, next(specs)) for _ in entry.target_name]

    def arrays(self, works: Sequence[Work]) -> list[Array]:
        shapes: dict[str, Shapes] = {}
        arrays = []
        for kind, source, spec in self._inputs:
            source_shapes = shapes.get(source.name)
            if source_shapes is None:
                source_shapes = shapes[source.name] = shapes_in(works, source)
            arrays.append(_values(kind, source_shapes, len(source.shape)).astype(spec.numpy, copy=False))
        return arrays


def _values(kind: str, shapes: Shapes, rank: int) -> Array:
    if kind.startswith("BATCH_ITEM_SHAPE"):
        items = [shape[1:] for shape in shapes if shape is not None for _ in range(shape[0])]
        table = np.array(items, np.int64).reshape(len(items), rank)
        return table if kind == "BATCH_ITEM_SHAPE" else table.ravel()
    counts = [0 if shape is None else elements(shape) for shape in shapes]
    if kind == "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
        return np.zeros(max(counts), np.int64)
    if kind == "BATCH_ELEMENT_COUNT":
        return np.array(counts, np.int64)
    return np.array(list(accumulate(counts, initial=0 if kind.endswith("WITH_ZERO") else None)), np.int64)


def cuts_of(config: ModelConfig) -> dict[int, Spec]:
    """Returns, by index of each output that is cut back, the input whose shapes it is cut to."""
    sources = {spec.name: spec for spec in inputs_of(config)}
    places = {entry.name: index for index, entry in enumerate(config.output)}
    cuts: dict[int, Spec] = {}
    for number, entry in enumerate(config.batch_output):
        source = sources.get(entry.source_input[0]) if len(entry.source_input) == 1 else None
        unknown = [name for name in entry.target_name if name not in places]
        if source is None or unknown:
            raise InvalidRequest(
                f"batch_output[{number}] of model '{config.name}' needs one source_input that is an input of the "
                f"model, found {list(entry.source_input)}, and outputs as target_name, found {list(entry.target_name)}"
            )
        cuts.update({places[name]: source for name in entry.target_name})
    return cuts

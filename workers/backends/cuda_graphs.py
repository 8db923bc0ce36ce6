"""CUDA graphs: which shapes get one, and which graph runs a batch.

Invariant: a graph uses the buffers and shapes of its capture. So it may run a smaller batch, if the configuration
allows that, but no other dims may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.repo.rules.optimization import graph_spec_problem

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig, ModelOptimizationPolicyCudaGraphSpec
    from shmserve.workers.batch.specs import Spec

Shape = tuple[int, ...]


class KnownShapes(Protocol):
    """What an engine knows about the shapes of its inputs, with the batch dimension."""

    def best(self, spec: Spec) -> Shape:
        """Returns the shape for dims that the configuration leaves open. Raises Unsupported if there is none."""

    def refusal(self, spec: Spec, shape: Shape) -> str:
        """Returns why the input cannot have this shape; else an empty string."""


class GraphRequest(Struct, frozen=True):
    """Shapes of all inputs that get a graph. `min_rows`: it runs batches from this many rows on; 0: only its own."""

    shapes: tuple[Shape, ...]
    min_rows: int = 0


class CudaGraph(Struct, frozen=True):
    """A captured graph. `handle`: what the backend launches. `outputs`: the shapes that it writes."""

    handle: Any
    shapes: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    min_rows: int


class CudaGraphs:
    """The graphs of an instance."""

    def __init__(self) -> None:
        self._exact: dict[tuple[Shape, ...], CudaGraph] = {}
        self._padding: dict[tuple[Shape, ...], list[CudaGraph]] = {}
        """By the shapes after the batch dimension, smallest batch first."""

    def add(self, graph: CudaGraph) -> None:
        self._exact[graph.shapes] = graph
        if graph.min_rows:
            same = self._padding.setdefault(_tails(graph.shapes), [])
            same.append(graph)
            same.sort(key=lambda one: one.shapes[0][0])

    def find(self, shapes: tuple[Shape, ...], rows: int) -> CudaGraph | None:
        """Returns the graph of these shapes, else the smallest one that may run a batch of this size."""
        match = self._exact.get(shapes)
        if match is not None or not self._padding or not rows:
            return match
        for graph in self._padding.get(_tails(shapes), ()):
            if graph.min_rows <= rows <= graph.shapes[0][0]:
                return graph
        return None

    def take_all(self) -> list[Any]:
        """Removes and returns all graphs, for the caller to destroy."""
        handles = [graph.handle for graph in self._exact.values()]
        self._exact.clear()
        self._padding.clear()
        return handles


def _tails(shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
    return tuple(shape[1:] for shape in shapes)


def requested_graphs(config: ModelConfig, specs: Sequence[Spec], known: KnownShapes) -> list[GraphRequest]:
    """Returns the graphs of graph_spec; without it, one for one row, for each preferred batch size, and for the largest
    batch."""
    cuda = config.optimization.cuda if config.optimization is not None else None
    if cuda is None or not cuda.graphs:
        return []
    if cuda.graph_spec:
        return [_from_spec(config, specs, known, spec) for spec in cuda.graph_spec]
    largest = config.max_batch_size
    batching = config.dynamic_batching
    preferred = batching.preferred_batch_size if batching is not None else ()
    rows = sorted({1, largest, *(size for size in preferred if 0 < size <= largest)}) if largest else [0]
    best = [known.best(spec) for spec in specs]
    return [GraphRequest(tuple((count, *shape[1:]) if count else shape for shape in best)) for count in rows]


def _from_spec(
    config: ModelConfig,
    specs: Sequence[Spec],
    known: KnownShapes,
    requested: ModelOptimizationPolicyCudaGraphSpec,
) -> GraphRequest:
    rows, largest = requested.batch_size, config.max_batch_size
    _, text = graph_spec_problem(requested, largest, [spec.name for spec in specs])
    if text:
        raise InvalidRequest(f"graph_spec of model '{config.name}': {text}")
    shapes = []
    for spec in specs:
        requested_shape = requested.input.get(spec.name)
        tail = tuple(requested_shape.dim) if requested_shape is not None else known.best(spec)[bool(largest) :]
        shape = (rows, *tail) if largest else tail
        refusal = known.refusal(spec, shape)
        if refusal:
            raise InvalidRequest(
                f"graph_spec of model '{config.name}': shape {list(shape)} of input '{spec.name}' {refusal}"
            )
        shapes.append(shape)
    bound = requested.graph_lower_bound
    return GraphRequest(tuple(shapes), bound.batch_size if bound is not None else 0)

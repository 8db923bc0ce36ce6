"""TensorFlow: `model.savedmodel`, a directory, and `model.graphdef`, a frozen graph.

Invariant: the engine reads an input in place if it is aligned and no operator keeps tensors; results of the engine are
copied once, to where they will be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.errors import InvalidRequest, ModelFailed
from shmserve.repo.config.complete import TensorFacts, with_scalars
from shmserve.workers.backends.base import Backend, Context, StackedModel
from shmserve.workers.backends.model_facts import completed, match, none_missing
from shmserve.workers.backends.parameters import Parameters
from shmserve.workers.backends.tensorflow.engine import config_pb2, engine_text, tf
from shmserve.workers.backends.tensorflow.files import (
    FrozenGraph,
    Program,
    SavedModel,
    declared,
    keeps_tensors,
    listed,
)
from shmserve.workers.backends.tensorflow.sessions import NAME, opened
from shmserve.workers.batch.specs import Spec, model_inputs_of, model_outputs_of

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.batch.gather import GatherGroup
    from shmserve.workers.batch.results import Results

Array = np.ndarray[Any, np.dtype[Any]]
Run = Callable[..., list[Any]]
_FILES = ("model.savedmodel", "model.graphdef")
_RUNS = 64
"""Maximum number of prepared combinations of inputs and outputs."""


class TensorFlow(Backend):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._program: Program | None = None

    def complete(self, config: ModelConfig) -> ModelConfig:
        if config.input and config.output:
            return config
        program = self._read(config)
        if isinstance(program, FrozenGraph):
            raise InvalidRequest(
                f"autofill failed for model '{config.name}': a frozen graph has no signature. Add input and output to "
                f"config.pbtxt; its placeholders are {listed(program.inputs)}, and no operator reads "
                f"{listed(program.outputs)}"
            )
        default = self.context.default_max_batch(NAME)
        inputs = [port.facts(name) for name, port in program.inputs.items() if not port.optional]
        chosen = [entry.name for entry in config.output] or program.outputs
        outputs = [port.facts(name) for name, port in program.outputs.items() if port.usable or name in chosen]
        return completed(config, inputs, outputs, default)

    def fitted(self, config: ModelConfig) -> ModelConfig:
        program = self._read(config)
        inputs = declared(model_inputs_of(config), program.inputs, program.find_input)
        return with_scalars(config, inputs, declared(model_outputs_of(config), program.outputs, program.find_output))

    def load(self, config: ModelConfig) -> TensorFlowModel:
        program = self._read(config)
        inputs, outputs = model_inputs_of(config), model_outputs_of(config)
        _match(config.name, program, inputs, outputs)
        feeds = [port.place for spec in inputs if (port := program.find_input(spec.name)) is not None]
        fetches = [port.place for spec in outputs if (port := program.find_output(spec.name)) is not None]
        self._program = None
        copies = keeps_tensors(program.graph, fetches)
        return TensorFlowModel(opened(self.context, config, program), outputs, feeds, fetches, copies)

    def _read(self, config: ModelConfig) -> Program:
        if self._program is None:
            files = [name for name in _FILES if (self.context.version_folder / name).exists()]
            path = self.context.model_file(config, (files or _FILES)[0], exists=Path.exists)
            for library in self.context.operator_libraries(config):
                _load(config.name, library)
            self._program = SavedModel(path, Parameters(config)) if path.is_dir() else FrozenGraph(path)
        return self._program


class TensorFlowModel(StackedModel):
    """`feeds`, `fetches`: the names of the inputs and outputs in the graph. `copies`: whether the graph keeps tensors
    and must not get the memory of callers."""

    def __init__(
        self, session: Any, outputs: Sequence[Spec], feeds: list[str], fetches: list[str], copies: bool
    ) -> None:
        self._session = session
        self._outputs = outputs
        self._feeds = feeds
        self._fetches = fetches
        self._copies = copies
        self._runs: dict[tuple[tuple[int, ...], tuple[int, ...]], Run] = {}

    def close(self) -> None:
        self._runs.clear()
        self._session.close()

    def execute(self, inputs: GatherGroup, outputs: Results) -> None:
        arrays: list[Array] = []
        fed: list[int] = []
        for index in range(len(self._feeds)):
            array = inputs.array(index)
            if array is not None:
                arrays.append(array.copy() if self._copies else array)
                fed.append(index)
        wanted = [index for index in range(len(self._outputs)) if outputs.needed(index)]
        inputs.computing()
        if not wanted:
            return
        try:
            values = self._run((*fed,), (*wanted,))(*arrays)
        except tf.errors.OpError as error:
            raise ModelFailed(engine_text(error)) from error
        for index, value in zip(wanted, values, strict=True):
            # A tensor without dims is a scalar of Python or numpy.
            computed = value if isinstance(value, np.ndarray) else np.array(value, self._outputs[index].numpy)
            outputs.put(index, computed)

    def _run(self, fed: tuple[int, ...], wanted: tuple[int, ...]) -> Run:
        """Returns a function from these inputs to these outputs.

        The method of the session is not public, but exists in all versions since 1.5; the public ones add 0.1 ms
        (Session.run) or 0.2 ms (a function of the eager runtime) to each batch.
        """
        run = self._runs.get((fed, wanted))
        if run is None:
            if len(self._runs) == _RUNS:
                self._runs.clear()
            options = config_pb2.CallableOptions()
            options.feed.extend([self._feeds[index] for index in fed])
            options.fetch.extend([self._fetches[index] for index in wanted])
            run = self._runs[fed, wanted] = self._session._make_callable_from_options(options)
        return run


def _match(model: str, program: Program, sources: Sequence[Spec], targets: Sequence[Spec]) -> None:
    """Raises unless the tensors of the configuration are those of the model."""
    inputs = declared(sources, program.inputs, program.find_input)
    names = {fact.name for fact in inputs if (port := program.find_input(fact.name)) is not None and port.optional}
    optional = [fact for fact in inputs if fact.name in names]
    required = [fact for fact in inputs if fact.name not in names]
    match(model, "input", sources, required, optional=optional, flat=(-1,))
    for spec in sources:
        if spec.optional and spec.name not in names:
            raise InvalidRequest(
                f"unable to load model '{model}': input '{spec.name}' is optional, and the graph has no value for "
                "it: only a PlaceholderWithDefault can be optional"
            )
    match(model, "output", targets, declared(targets, program.outputs, program.find_output))
    needed = program.needed([spec.name for spec in targets], [spec.name for spec in sources])
    none_missing(model, sources, [TensorFacts(name, "", ()) for name in needed])


def _load(model: str, library: Path) -> None:
    """Loads a library that registers operators."""
    try:
        tf.load_op_library(str(library))
    except (tf.errors.OpError, RuntimeError) as error:
        raise ModelFailed(f"unable to load model '{model}': {library.name}: {error}") from error

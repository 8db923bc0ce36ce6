"""Python models that get a whole batch at once: `execute` gets a dict with an array for each input and returns one with
an array for each output.

Invariant: a batch of one request is a view of the caller's memory, and a larger batch is gathered with one copy. The
model's outputs are copied once, to where they will be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shmserve.errors import InvalidRequest, ModelFailed
from shmserve.workers.backends.base import StackedModel
from shmserve.workers.backends.python import pb_utils
from shmserve.workers.backends.python.model import PythonModel, check_execute
from shmserve.workers.batch.specs import model_inputs_of, model_outputs_of

if TYPE_CHECKING:
    from shmserve.protocol.worker_messages import Work
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.backends.base import Context
    from shmserve.workers.batch.gather import GatherGroup
    from shmserve.workers.batch.results import Results


class StackedPython(PythonModel, StackedModel):
    _running: Sequence[Work] = ()

    def __init__(self, context: Context, config: ModelConfig, kind: Any, arguments: dict[str, str]) -> None:
        if config.decoupled:
            raise InvalidRequest(
                f"model '{config.name}' is decoupled and has the parameter 'stacked': a batch as one array can be "
                "answered once only"
            )
        check_execute(config, kind)
        self._inputs = [spec.name for spec in model_inputs_of(config)]
        self._outputs = {spec.name: index for index, spec in enumerate(model_outputs_of(config))}
        super().__init__(context, config, kind, arguments)

    def execute(self, inputs: GatherGroup, outputs: Results) -> None:
        arrays = {name: array for index, name in enumerate(self._inputs) if (array := inputs.array(index)) is not None}
        for array in arrays.values():
            array.flags.writeable = False
        inputs.computing()
        self._running = inputs.work_items
        try:
            result = self._execute(arrays)
        finally:
            self._running = ()
        if not isinstance(result, Mapping):
            raise ModelFailed(f"expected a dict of arrays by name from execute, it returned {type(result).__name__}")
        for name, array in result.items():
            index = self._outputs.get(name)
            if index is None:
                raise ModelFailed(f"unexpected output '{name}': the outputs are {', '.join(self._outputs)}")
            value = array.as_numpy() if isinstance(array, pb_utils.Tensor) else array
            outputs.put(index, self._as_declared(name, value) if hasattr(value, "dtype") else value)

    def _work_items(self) -> Sequence[Work]:
        return self._running if self.streams.connected else ()

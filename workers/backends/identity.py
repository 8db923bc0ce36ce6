"""A backend whose outputs are its inputs: a reference for other backends and a substitute for models in tests.

Invariant: each output is copied exactly once, from the caller's input to where the output will be read, and not at all
between steps of an ensemble.

Model parameters: `delay_us` or `execute_delay_ms` (the duration of each batch), `creation_delay_sec` (the duration of
loading), `fail` (each batch fails with this text), `triggers` "1" (requests may have the parameters fail, exit, crash,
hang and delay_us, which take effect for the batch).
"""

from __future__ import annotations

import os
import select
import signal
from typing import TYPE_CHECKING

from msgspec import structs

from shmserve.errors import InvalidRequest, ModelFailed
from shmserve.repo.config.schema import BatchOutput
from shmserve.workers.backends.base import Backend, StackedModel
from shmserve.workers.backends.parameters import Parameters
from shmserve.workers.batch.specs import outputs_of

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.batch.gather import GatherGroup
    from shmserve.workers.batch.results import Results


class Identity(Backend):
    def fitted(self, config: ModelConfig) -> ModelConfig:
        """An output that repeats a ragged input gets that input's shapes, also without `batch_output`."""
        cut = {name for entry in config.batch_output for name in entry.target_name}
        ragged = []
        for index, output in enumerate(config.output):
            source = config.input[_source(config, index)]
            if source.allow_ragged_batch and output.name not in cut:
                ragged.append(BatchOutput(target_name=(output.name,), source_input=(source.name,)))
        return structs.replace(config, batch_output=(*config.batch_output, *ragged)) if ragged else config

    def load(self, config: ModelConfig) -> IdentityModel:
        return IdentityModel(config)


class IdentityModel(StackedModel):
    def __init__(self, config: ModelConfig) -> None:
        parameters = Parameters(config)
        self._delay_s = _delay(parameters, "delay_us") / 1e6 + _delay(parameters, "execute_delay_ms") / 1e3
        self._fail = parameters.text("fail")
        self._triggers = parameters.text("triggers") == "1"
        if creation_s := _delay(parameters, "creation_delay_sec"):
            select.select((), (), (), creation_s)
        self._specs = outputs_of(config)
        self._names = [entry.name for entry in config.input]
        self._sources = [_source(config, index) for index in range(len(config.output))]

    def execute(self, inputs: GatherGroup, outputs: Results) -> None:
        inputs.computing()
        if self._triggers:
            self._trigger(inputs)
        if self._delay_s:
            select.select((), (), (), self._delay_s)
        if self._fail:
            raise ModelFailed(self._fail)
        for index, source in enumerate(self._sources):
            if not outputs.needed(index):
                continue
            shape = inputs.shape(source)
            if shape is None:
                self._leave_out(inputs, outputs, index)
            elif outputs.alias(index, self._names[source], shape):
                continue
            elif outputs.direct(index, shape):
                inputs.copy(source, outputs.place(index, shape))
            else:
                array = inputs.array(source)
                assert array is not None
                outputs.put(index, array)

    def _leave_out(self, inputs: GatherGroup, outputs: Results, index: int) -> None:
        """Handles an absent optional input. As in Triton, the output is zeros if its shape is fixed."""
        spec = self._specs[index]
        if spec.fixed and spec.item and not spec.flat:
            outputs.place(index, (inputs.rows, *spec.shape) if spec.batched else spec.shape)[...] = 0
        else:
            outputs.omit(index)

    def _trigger(self, inputs: GatherGroup) -> None:
        for work in inputs.work_items:
            if work.options is None:
                continue
            wanted = work.options.parameters
            delay = wanted.get("delay_us", 0)
            if isinstance(delay, int) and delay > 0:
                select.select((), (), (), delay / 1e6)
            if wanted.get("hang"):
                while True:
                    signal.pause()
            if wanted.get("crash"):
                os.kill(os.getpid(), signal.SIGSEGV)
            if "exit" in wanted:
                os._exit(int(wanted["exit"]))
            if wanted.get("fail"):
                raise ModelFailed(str(wanted["fail"]))


def _delay(parameters: Parameters, key: str) -> float:
    delay = parameters.number(key, 0.0)
    if not 0 <= delay < 1e12:
        raise parameters.wrong(key, "at least 0 and below 1e12")
    return delay


def _source(config: ModelConfig, index: int) -> int:
    """Returns the index of the input that an output repeats: the input of the same name, else at the same index."""
    output = config.output[index]
    names = [entry.name for entry in config.input]
    source = names.index(output.name) if output.name in names else index
    if source >= len(names):
        raise InvalidRequest(
            f"output '{output.name}' has no input to repeat: the model has {len(names)} input(s), and none of that name"
        )
    repeated = config.input[source]
    if repeated.data_type != output.data_type:
        raise InvalidRequest(
            f"output '{output.name}' is {output.data_type} and repeats input '{repeated.name}', which is "
            f"{repeated.data_type}"
        )
    return source

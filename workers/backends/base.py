"""The interface of a backend.

A backend derives from Backend, and the models that it loads from StackedModel or SeparateModel. Both handle arrays and
configurations, and never messages, links or segments.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec import Struct

from shmserve.errors import NotFound
from shmserve.repo.backends import NO_COMPLETION
from shmserve.repo.config.complete import DEFAULT_MAX_BATCH
from shmserve.repo.rules.values import flag_in, whole_in
from shmserve.workers.model_calls.answer import failure_of
from shmserve.workers.process.log import log_traceback

if TYPE_CHECKING:
    from shmserve.protocol.messages import Failure, Value
    from shmserve.protocol.worker_messages import Work
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.batch.gather import GatherGroup
    from shmserve.workers.batch.results import Results
    from shmserve.workers.model_calls.answer import Request, Response, ResponseOutputs
    from shmserve.workers.model_calls.calls import OutgoingCalls
    from shmserve.workers.model_calls.responses import OpenResponses


MAX_BATCH = 1 << 30


class GpuTensor(NamedTuple):
    """A tensor on the GPU of this process, as an input or the place of an output."""

    address: int
    shape: tuple[int, ...]


class Context(Struct, frozen=True):
    """The context of an instance. `folder` is the model's directory, `version_folder` the version's. `threads`: the
    number of threads for the engine if the configuration does not set it; 0: the engine decides. `calls` sends the
    calls of its models to the server; None without a server, and for a backend that does not ask for it."""

    model: str
    version: int
    instance: str
    folder: Path
    version_folder: Path
    settings: dict[str, str]
    threads: int = 0
    calls: OutgoingCalls | None = None

    def setting(self, backend: str, key: str, default: str = "") -> str:
        """Returns a --backend-config value for this backend, or the value for all backends."""
        return self.settings.get(f"{backend},{key}", self.settings.get(f",{key}", default))

    def allows(self, backend: str, key: str, default: bool) -> bool:
        """Returns a --backend-config value that is true or false. Raises InvalidRequest."""
        return flag_in(f"--backend-config {backend},{key}", self.setting(backend, key, str(default)))

    def default_max_batch(self, backend: str, default: int = DEFAULT_MAX_BATCH) -> int:
        """max_batch_size of models of this backend that can batch and do not set it: `default`, unless the operator has
        chosen another one. Raises InvalidRequest."""
        key = "default-max-batch-size"
        return whole_in(f"--backend-config {backend},{key}", self.setting(backend, key, str(default)), MAX_BATCH)

    @property
    def engine_threads(self) -> int:
        """The number of threads for an engine that does not choose it: at most the number of available CPUs."""
        return self.threads or len(os.sched_getaffinity(0))

    def operator_libraries(self, config: ModelConfig) -> list[Path]:
        """The libraries of model_operations.op_library_filename, from the version's directory or the model's, or by
        their absolute paths. Raises NotFound."""
        names = config.model_operations.op_library_filename if config.model_operations is not None else ()
        return [self._library(name) for name in names]

    def _library(self, name: str) -> Path:
        for folder in (self.version_folder, self.folder):
            if (folder / name).is_file():
                return folder / name
        raise NotFound(f"model_operations.op_library_filename: model '{self.model}' has no file '{name}'")

    def model_file(
        self, config: ModelConfig, default: str, name: str | None = None, exists: Callable[[Path], bool] = Path.is_file
    ) -> Path:
        """Returns the path of the model's file: `name`, else the configured one, else `default`. Raises NotFound unless
        it `exists`."""
        name = name or config.default_model_filename or default
        path = self.version_folder / name
        if not exists(path):
            raise NotFound(f"version {self.version} of model '{config.name}' has no file '{name}'")
        return path

    @property
    def auto_complete(self) -> bool:
        return self.settings.get(NO_COMPLETION, "false") != "true"

    def failure_of(self, error: Exception) -> Failure:
        """Returns the error for callers when the model has failed outside `execute`; the log gets the traceback."""
        return failure_of(error, self.instance, str(self.folder), log_traceback)


class Backend(ABC):
    """Loads one instance of one model version. Called in one thread: `complete`, `fitted`, `load`, batches of the
    model, `close` of the model, `close`, in this order."""

    asks = False
    """Whether its models can make calls to the server: then its context has `calls`."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.resources = ExitStack()
        """What the backend holds besides the model."""

    @classmethod
    def chosen(cls, config: ModelConfig) -> type[Backend]:
        """Returns the class for a model of this configuration, for backends with several."""
        return cls

    def complete(self, config: ModelConfig) -> ModelConfig:
        """Returns the configuration, completed from the model file. Called only if auto-completion is enabled."""
        return config

    def fitted(self, config: ModelConfig) -> ModelConfig:
        """Returns the configuration as the engine needs it; callers still see the original."""
        return config

    @abstractmethod
    def load(self, config: ModelConfig) -> BackendModel:
        """Loads the model. An exception is reported as the reason why the model is not served."""

    def close(self) -> None:
        """Releases `resources`. Called once, also after `load` failed."""
        self.resources.close()


class BackendModel:
    """A loaded model, which is complete when it has been constructed."""

    text = False
    """Whether elements of BYTES inputs are str instead of bytes."""
    on_device = False
    """Whether it reads input pieces and writes `near` outputs on the GPU of its process."""
    stored = False
    """Whether it reads the inputs of single requests as they are stored: in parts, and strings encoded."""
    streams: OpenResponses | None = None
    """The response streams of its models, if they can send responses on their own."""
    strict = True
    """Whether outputs must match the configuration."""
    probes = False
    """Whether the model reports its own readiness, through `probe`."""
    slots = 0
    """How many requests the engine answers at once; 0: it does not form batches itself."""

    def probe(self, report: Callable[[bool], None]) -> None:
        """Calls `report` with whether the model is ready, now or later, in any thread."""

    def close(self) -> None:
        """Releases the model. Called once."""


class StackedModel(BackendModel, ABC):
    """Gets one array per input for a whole batch and returns one array per output, as listed by `specs.model_inputs_of`
    and `model_outputs_of`."""

    fresh = False
    """Whether arrays passed to `put` are never written again, so that they can be kept without a copy."""

    @abstractmethod
    def execute(self, inputs: GatherGroup, outputs: Results) -> None:
        """Reads `inputs`, calls `inputs.computing()` when they are ready, and fills in each output that is `needed`.

        Inputs and outputs are identified by their index in these lists. An exception fails the whole batch.
        """


class Computation(Protocol):
    """A batch on the device."""

    def computed(self) -> bool:
        """Whether the model has computed it. The copies of its outputs may not have ended. Does not wait."""

    def finish(self) -> None:
        """Waits for the end of the batch and fills in its outputs. Called once; an exception fails the batch."""


class OverlappingModel(StackedModel):
    """Queues batches on a device, so that the copies of one batch and the computation of another overlap. There are at
    most two batches on the device, and they end in the order in which they began."""

    overlaps = False
    """Whether a second batch may begin before the first has ended."""

    @abstractmethod
    def begin(self, inputs: GatherGroup, outputs: Results) -> Computation:
        """Queues a batch and calls `inputs.computing()`. An exception fails the batch; then nothing of it is left on
        the device."""

    def execute(self, inputs: GatherGroup, outputs: Results) -> None:
        self.begin(inputs, outputs).finish()


class AlikeResults(NamedTuple):
    """What became of requests that are alike: a response for each, in order; or all outputs are filled in, and all
    responses have these parameters."""

    responses: list[Response | None] | None
    parameters: dict[str, Value] | None = None


class ExecuteAlike(Protocol):
    def __call__(
        self, inputs: GatherGroup, outputs: Results, outputs_of: Callable[[Work], ResponseOutputs], /
    ) -> AlikeResults:
        """`outputs_of` opens the outputs of a response to one of the requests."""


class SeparateModel(BackendModel, ABC):
    """Gets the requests of a batch one by one and answers each."""

    takes_slots = False
    """Whether it gets a null request for each empty slot of the sequences in a batch, as StackedModels do."""
    execute_alike: ExecuteAlike | None = None
    """Runs requests together that are alike: without options, with all outputs, and with small inputs that stack. This
    costs less for each of them. None: the model gets them one by one, as all others."""

    @abstractmethod
    def execute(self, requests: list[Request]) -> list[Response | None]:
        """Returns a response per request, in order; None if sent separately. An exception fails the whole batch."""

    def failed(self, requests: list[Request], response: Response) -> list[Response | None]:
        """Returns the responses after `execute` raised: None for requests whose last response was already sent."""
        streams = self.streams
        if streams is None or not streams.decoupled:
            return [response] * len(requests)
        return [response if streams.take_over(request.work.request) else None for request in requests]

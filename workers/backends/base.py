"""Backends: what runs a model. The interface, and the table of those that exist.

A backend derives from StackedBackend or SeparateBackend, is found by the name that configurations use for it, and is
imported only when a model needs it. The rule: a backend knows arrays and configurations; never messages, links or
memory. Others come from the backend directory, or by entry points of the group "shmserve.backends".
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

from shmserve.errors import InvalidRequest, Unsupported
from shmserve.repo.backends import GROUP, in_directory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np

    from shmserve.protocol.messages import Failure, Value, Work
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.batch.gather import Group
    from shmserve.workers.batch.scatter import Results
    from shmserve.workers.model_calls.calls import Calls
    from shmserve.workers.model_calls.responses import Streams

    Array = np.ndarray[Any, np.dtype[Any]]


class Known(NamedTuple):
    """Where a backend is, and the extra of this package that brings its engine ("" for none)."""

    target: str
    extra: str


BACKENDS = {
    "identity": Known("shmserve.workers.backends.identity:Identity", ""),
    "onnxruntime": Known("shmserve.workers.backends.onnx.backend:Onnx", "cpu"),
    "openvino": Known("shmserve.workers.backends.openvino:OpenVino", "openvino"),
    "python": Known("shmserve.workers.backends.python.backend:Python", ""),
    "tensorrt": Known("shmserve.workers.backends.tensorrt.backend:TensorRT", "gpu"),
    "pytorch": Known("shmserve.workers.backends.pytorch.backend:Torch", "torch"),
}


class Context(Struct, frozen=True):
    """What a backend is told of its instance. `folder` is the model's directory, `version_folder` the version's.
    `threads`: how many its engine may use, where the configuration does not say; 0: as it likes."""

    model: str
    version: int
    instance: str
    folder: Path
    version_folder: Path
    settings: dict[str, str]
    threads: int = 0

    def setting(self, backend: str, key: str, default: str = "") -> str:
        """A --backend-config value, also where it was given for all backends."""
        return self.settings.get(f"{backend},{key}", self.settings.get(f",{key}", default))

    @property
    def auto_complete(self) -> bool:
        return self.settings.get("disable-auto-complete-config", "false") != "true"


class Backend:
    """One instance of one model version. `complete`, then `load`, then batches, then `close`: in one thread."""

    text = False
    """Whether it wants elements of BYTES as str, and not as bytes."""
    on_device = False
    """Whether it reads pieces of inputs, and writes outputs that are `near`, on the GPU of its process."""
    streams: Streams | None = None
    """What its models send by themselves, where they can."""
    strict = True
    """Whether its outputs must be as the configuration says."""
    probes = False
    """Whether its model says itself if it is ready: `probe` does so."""
    asks = False
    """Whether its models can ask the server: `calls` and `listen` are set then."""
    calls: Calls | None = None
    """By which they ask, where there is a server."""
    listen: Callable[[Streams], None] | None = None
    """To be called with its streams before the model is loaded, so that it can ask then, too."""

    def __init__(self, context: Context) -> None:
        self.context = context

    @classmethod
    def chosen(cls, config: ModelConfig) -> type[Backend]:
        """The class for a model of this configuration, where there are several."""
        return cls

    def complete(self, config: ModelConfig) -> ModelConfig:
        """The configuration with what the model says of itself added. Only called when that is allowed."""
        return config

    def fitted(self, config: ModelConfig) -> ModelConfig:
        """The configuration as the engine needs it: callers see the same. Called before `load`."""
        return config

    def load(self, config: ModelConfig) -> None:
        """Makes the model ready. What it raises is the reason why the model is not served."""

    def probe(self, tell: Callable[[bool], None]) -> None:
        """Tells whether the model is ready, now or later, in any thread."""

    def close(self) -> None:
        """The model is not needed any more. Called once, also when `load` failed half-way."""


class StackedBackend(Backend):
    """Gets one array per input for a whole batch, and gives one array per output: `specs.model_inputs_of` and
    `model_outputs_of` of the configuration say which."""

    fresh = False
    """Whether arrays that it has `put` are never written again, so that they can be kept without a copy."""

    def execute(self, inputs: Group, outputs: Results) -> None:
        """Reads `inputs`, says `inputs.computing()` when they are ready, and fills in every output that is `needed`.

        Inputs and outputs are known by their index in these lists. What it raises fails the whole batch.
        """
        raise NotImplementedError


class SeparateBackend(Backend):
    """Gets the requests of a batch one by one, and answers each."""

    def execute(self, requests: list[Request]) -> list[Answer | None]:
        """One answer for each request, in their order; None where it comes another way, or later. What it raises fails
        the whole batch."""
        raise NotImplementedError

    def failed(self, requests: list[Request], answer: Answer) -> list[Answer | None]:
        """`execute` has raised: the answer to each request, None for those that have had their last one."""
        return [answer] * len(requests)


class Request(Struct, gc=False):
    """One request: its arrays in the order of the configuration, None where an optional input is not there."""

    work: Work
    arrays: list[Array | None]


class Answer(Struct, gc=False):
    """What became of one request: its outputs by name, or why there are none. `again`: it is to be run once more, and
    this is no answer; of its outputs only those count that are states of its sequence."""

    outputs: list[tuple[str, Any]] = []
    error: Failure | None = None
    parameters: dict[str, Value] | None = None
    again: bool = False


def find(name: str, directory: str = "") -> type[Backend]:
    """The class of a backend, by the directory for others if it is not ours. A missing engine is an error that says how
    to get it."""
    known = BACKENDS.get(name)
    if known is None:
        from shmserve.workers.backends.custom import from_directory  # which needs what is here

        return from_directory(directory, name) or _from_entry_point(name, directory)
    module, _, attribute = known.target.partition(":")
    try:
        found: type[Backend] = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        if not known.extra:
            raise
        raise Unsupported(
            f"backend '{name}' needs a package that is not installed ({error}): pip install 'shmserve[{known.extra}]'"
        ) from error
    return found


def _from_entry_point(name: str, directory: str) -> type[Backend]:
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    points = entry_points(group=GROUP)
    for point in points:
        if point.name == name:
            found = point.load()
            if not (isinstance(found, type) and issubclass(found, (StackedBackend, SeparateBackend))):
                raise InvalidRequest(f"backend '{name}' is not a StackedBackend or SeparateBackend")
            return found
    known = ", ".join(sorted({*BACKENDS, *(point.name for point in points), *in_directory(directory)}))
    what = f"unknown backend '{name}'" if name else "the configuration names no backend"
    raise Unsupported(f"{what}; known are: {known}")

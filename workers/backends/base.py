"""The interface of a backend.

A backend derives from StackedBackend or SeparateBackend. It handles arrays and configurations, and never sees messages,
links or segments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.batch.gather import Group
    from shmserve.workers.batch.scatter import Results
    from shmserve.workers.model_calls.answer import Answer, Request
    from shmserve.workers.model_calls.calls import Calls
    from shmserve.workers.model_calls.responses import Streams


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

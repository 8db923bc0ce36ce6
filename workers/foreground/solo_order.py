"""The arguments of a foreground run, and the model that was found.

Invariant: both can be serialised, because the model may run in another interpreter.
"""

from __future__ import annotations

from msgspec import Struct


class RunOrder(Struct, forbid_unknown_fields=True):
    """The arguments of `shmserve run`, by name."""

    model_dir: str
    file: str | None = None
    input: list[str] = []
    random: bool = False
    batch: int | None = None
    shape: list[str] = []
    seed: int | None = None
    outputs: str | None = None
    out: str | None = None
    repeat: int = 1
    version: int | None = None
    json: bool = False
    pdb: bool = False
    backend_config: list[str] = []
    model_config_name: str = ""
    backend_directory: str = ""


class RunFailed(Exception):
    """The model cannot be loaded or has failed; the text is for the user, and a traceback was already printed."""


class Chosen(Struct):
    """A model and the version to run. `config`: the complete configuration, as in Load; `given`: the content of its
    file alone. `environment`: the model's own interpreter; "": this one. `backends`: the available ones."""

    name: str
    path: str
    version: int
    config: bytes
    given: bytes | None
    warnings: tuple[str, ...]
    backends: tuple[str, ...]
    environment: str


class Errand(Struct):
    """The data passed to the model's interpreter."""

    order: RunOrder
    chosen: Chosen

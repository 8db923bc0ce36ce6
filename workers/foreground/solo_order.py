"""What a run in the foreground is asked for, and the model that was found for it.

The rule: both can be written down, as the interpreter of the model may be another one than ours.
"""

from __future__ import annotations

from msgspec import Struct


class Order(Struct, forbid_unknown_fields=True):
    """What `shmserve run` was asked for, by the names of its arguments."""

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


class Failed(Exception):
    """The model cannot be loaded, or has failed, and the trace was shown if there is one: lines for the user."""


class Chosen(Struct):
    """A model, and the version to run: its configuration, as the worker's orders have it, and what its file says alone.
    `environment`: where its interpreter is; "": it has ours. `backends`: those that there are."""

    name: str
    path: str
    version: int
    config: bytes
    given: bytes | None
    warnings: tuple[str, ...]
    backends: tuple[str, ...]
    environment: str


class Errand(Struct):
    """All that the other interpreter is told."""

    order: Order
    chosen: Chosen

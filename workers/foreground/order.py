"""The order for a foreground run: its arguments, and the model that they name, found and read as in a server.

Invariants: no model code runs here. Arguments and model can be serialised, because the model may run in another
interpreter.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from shmserve.errors import InvalidRequest, NotFound
from shmserve.repo.backends import backend_directory_problem, folder_of, installed
from shmserve.repo.config.schema import encode_config
from shmserve.repo.gpus import discover
from shmserve.terminal.errors import Misuse
from shmserve.workers.process.log import log_message

if TYPE_CHECKING:
    from shmserve.repo.storage.store import ScannedModel


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

    path: str
    version: int
    config: bytes
    given: bytes | None
    warnings: tuple[str, ...]
    backends: tuple[str, ...]
    environment: str


def find(order: RunOrder) -> Chosen:
    from shmserve.repo.compile import environment  # the model's interpreter may lack the packages that it needs

    model, version = _find(order)
    config = model.config
    assert config is not None
    return Chosen(
        str(model.path),
        version,
        encode_config(config),
        None if model.given is None else encode_config(model.given),
        model.warning_texts,
        tuple(installed(order.backend_directory)),
        environment(config, str(model.path), folder_of(config.backend, order.backend_directory)),
    )


def _find(order: RunOrder) -> tuple[ScannedModel, int]:
    """Returns the model in the directory and the version to run: the requested one, or the highest one served."""
    from shmserve.repo.storage.store import scan_model  # the same

    # Symlinks are not resolved: the model has the name of the link.
    path = Path(os.path.abspath(order.model_dir))
    if not path.is_dir():
        raise Misuse(f"{order.model_dir} is not a directory; name that of a model, with its config.pbtxt")
    fault = backend_directory_problem(Path(order.backend_directory)) if order.backend_directory else ""
    if fault:
        raise Misuse(f"--backend-directory {fault}")
    try:
        backends, gpus = installed(order.backend_directory), discover().numbers
        model = scan_model(path, backends=backends, gpus=gpus, config_name=order.model_config_name)
    except InvalidRequest as error:
        raise Misuse(str(error)) from error
    for warning in model.warning_texts:
        log_message(warning, "warning")
    if model.problems or model.config is None:
        raise RunFailed("\n".join([f"model '{model.name}' cannot be loaded:", *model.problem_texts]))
    if order.version is None:
        return model, model.versions[-1]
    if not (path / str(order.version)).is_dir():
        there = ", ".join(map(str, model.versions))
        raise NotFound(f"model '{model.name}' has no version {order.version}; its versions are: {there}")
    if order.version in model.missing:
        raise RunFailed(f"failed to load model '{model.name}' version {order.version}: {model.missing[order.version]}")
    if order.version not in model.versions:
        log_message(
            f"version {order.version} of model '{model.name}' would not be served: its version policy", "warning"
        )
    return model, order.version

"""Finds the model for `shmserve run` and reads its configuration as a server would.

Invariant: no code of the model is run.
"""

from __future__ import annotations

import os
from pathlib import Path

from shmserve.errors import InvalidRequest, NotFound
from shmserve.repo.backends import backend_directory_problem, installed
from shmserve.repo.compile import environment
from shmserve.repo.config.schema import encode_config
from shmserve.repo.gpus import discover
from shmserve.repo.storage.store import ScannedModel, scan_model
from shmserve.terminal.inputs import BadInput
from shmserve.workers.foreground.solo_order import Chosen, RunFailed, RunOrder
from shmserve.workers.process.log import log_message


def find(order: RunOrder) -> Chosen:
    found, version = _find(order)
    config = found.config
    assert config is not None
    return Chosen(
        found.name,
        str(found.path),
        version,
        encode_config(config),
        None if found.given is None else encode_config(found.given),
        found.warning_texts,
        tuple(installed(order.backend_directory)),
        environment(config, str(found.path)),
    )


def _find(order: RunOrder) -> tuple[ScannedModel, int]:
    """Returns the model in the directory and the version to run: the requested one, or the highest one served."""
    # Not resolved: the model's name is the name of the link.
    path = Path(os.path.abspath(order.model_dir))
    if not path.is_dir():
        raise BadInput(f"{order.model_dir} is not a directory; name that of a model, with its config.pbtxt")
    fault = backend_directory_problem(Path(order.backend_directory)) if order.backend_directory else ""
    if fault:
        raise BadInput(f"--backend-directory {fault}")
    try:
        backends, gpus = installed(order.backend_directory), discover().numbers
        found = scan_model(path, backends=backends, gpus=gpus, config_name=order.model_config_name)
    except InvalidRequest as error:
        raise BadInput(str(error)) from error
    for warning in found.warning_texts:
        log_message(warning, "warning")
    if found.problems or found.config is None:
        raise RunFailed("\n".join([f"model '{found.name}' cannot be loaded:", *found.problem_texts]))
    if order.version is None:
        return found, found.versions[-1]
    if not (path / str(order.version)).is_dir():
        there = ", ".join(map(str, found.versions))
        raise NotFound(f"model '{found.name}' has no version {order.version}; its versions are: {there}")
    if order.version in found.missing:
        raise RunFailed(f"failed to load model '{found.name}' version {order.version}: {found.missing[order.version]}")
    if order.version not in found.versions:
        log_message(
            f"version {order.version} of model '{found.name}' would not be served: its version policy", "warning"
        )
    return found, order.version

"""Models of a repository, compiled from config.pbtxt as in a server.

Invariant: no model file is loaded, so the configuration must contain everything, including inputs that a worker would
find in the model file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from shmserve.errors import InvalidRequest, NotFound
from shmserve.repo.backends import BACKENDS
from shmserve.repo.compile import compile_instances, compile_policy, compile_scaling
from shmserve.repo.config.problems import ConfigError
from shmserve.repo.config.schema import ModelConfig
from shmserve.repo.load import CONFIG_FILE, ModelContext, examine, parse
from shmserve.repo.storage.store import find_model, model_names
from shmserve.sim.plan import MS, SimModel
from shmserve.sim.service import Constant, Service

GPUS = tuple(range(64))
"""GPUs that a configuration may name. Their number does not affect the simulation."""


def names(roots: Sequence[Path]) -> list[str]:
    """The names of all models in the repository."""
    for root in roots:
        if not root.is_dir():
            raise InvalidRequest(f"{root} is not a directory")
    return list(model_names(roots))


def models(
    roots: Sequence[Path], wanted: Iterable[str], services: Mapping[str, Service], instances: int = 0
) -> list[SimModel]:
    """These models and those of their steps. `services`: by model name, "" for all others. `instances` > 0 overrides
    the number in the configuration."""
    known = names(roots)
    found: dict[str, SimModel] = {}
    todo = list(wanted)
    while todo:
        name = todo.pop(0)
        if name not in found:
            made = found[name] = _model(roots, name, known, services, instances)
            todo += [step.model for step in made.policy.steps or ()]
    return list(found.values())


def _model(
    roots: Sequence[Path], name: str, known: Sequence[str], services: Mapping[str, Service], instances: int
) -> SimModel:
    if name not in known:
        raise InvalidRequest(f"there is no model '{name}'; there are {', '.join(known) or 'none'}")
    try:
        path = find_model(roots, name)
    except NotFound as error:
        raise InvalidRequest(error.message) from error
    config, version = _read(path)
    policy = compile_policy(config, version)
    if not policy.inputs or not policy.outputs:
        raise InvalidRequest(
            f"the configuration of model '{name}' names no {'outputs' if policy.inputs else 'inputs'}; a server finds "
            f"them in the model file, a simulation needs them in config.pbtxt (`shmserve config {name}` prints one)"
        )
    service = services.get(name) or services.get("") or Constant(MS)
    specs = () if policy.steps is not None else compile_instances(config)
    if instances and specs:
        specs = tuple(replace(specs[0], name=f"{name}_{index}", passive=False) for index in range(instances))
        return SimModel(policy, specs, service)
    return SimModel(policy, specs, service, scaling=compile_scaling(config))


def _read(path: Path) -> tuple[ModelConfig, int]:
    """The completed configuration, for any engine that it names, and the highest version (1 if there is none yet)."""
    try:
        text = (path / CONFIG_FILE).read_bytes()
        versions = sorted(int(entry.name) for entry in path.iterdir() if entry.name.isdecimal() and entry.is_dir())
        files = [entry.name for entry in (path / str(versions[0])).iterdir()] if versions else []
    except OSError as error:
        raise InvalidRequest(f"the configuration of model '{path.name}' cannot be read: {error.strerror}") from error
    try:
        named = parse(text).backend
        context = ModelContext(path.name, BACKENDS | {named} - {""}, files, GPUS)
        config = examine(text, CONFIG_FILE, context).require()
    except ConfigError as error:
        raise InvalidRequest(f"model '{path.name}' could not be served: {error}") from error
    return config, versions[-1] if versions else 1

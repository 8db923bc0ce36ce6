"""The model repositories on disk: which models there are, which of their versions are served, and what is wrong.

The rule of the file: one bad model never stops the others; what is wrong with it is in its own `problems`. Names of
files in a text are relative to the repository.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from shmserve.errors import InvalidRequest
from shmserve.repo.load import CONFIG_BYTES, CONFIG_FILE, load
from shmserve.repo.outline import shown
from shmserve.repo.problems import ConfigError
from shmserve.repo.schema import ModelConfig, ModelVersionPolicy
from shmserve.repo.validate import MODEL_NAME, NAME_RULE

BACKENDS = frozenset({"identity", "onnxruntime", "python"})
"""The backends that workers have."""

_LARGEST_VERSION = 2**63 - 1
_NOT_VERSIONS = frozenset({"configs", "warmup", "initial_state"})


class Found(NamedTuple):
    """A model of a repository. With problems it cannot be served; `config` is then None.

    `versions` are those that the version policy selects, ascending.
    """

    name: str
    path: Path
    config: ModelConfig | None
    versions: tuple[int, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]


class _Versions(NamedTuple):
    numbers: tuple[int, ...]
    warnings: tuple[str, ...]


class _BadModel(Exception):
    """Why a model cannot be served; carried to its Found."""


def scan(roots: Sequence[Path], *, backends: Collection[str] = BACKENDS, gpus: Collection[int] = ()) -> list[Found]:
    """Every model of the repositories, by name. InvalidRequest for a repository that is not a directory."""
    by_name: dict[str, list[Found]] = {}
    for root in dict.fromkeys(root.resolve() for root in roots):
        for path in _models(root):
            found = scan_model(path, backends=backends, gpus=gpus)
            by_name.setdefault(found.name, []).append(found)
    return [_unique(by_name[name]) for name in sorted(by_name)]


def scan_model(path: Path, *, backends: Collection[str] = BACKENDS, gpus: Collection[int] = ()) -> Found:
    """The model in one directory."""
    name = shown(os.fsencode(path.name).decode("utf-8", "backslashreplace"), 128)
    warnings: list[str] = []
    versions = None
    try:
        if not MODEL_NAME.fullmatch(path.name):
            raise _BadModel(f"{name}: a model cannot have this name; expected {NAME_RULE}")
        versions = _version_directories(path)
        warnings += versions.warnings
        data = _read_config(path)
        file = f"{name}/{CONFIG_FILE}" if data is not None else f"{name} (no {CONFIG_FILE})"
        files = _names(path / str(versions.numbers[0])) if versions.numbers else ()
        loaded = load(data or b"", name=path.name, backends=backends, gpus=gpus, files=files, file=file)
        warnings += loaded.warnings
        policy = loaded.config.version_policy or ModelVersionPolicy()
        selected = select_versions(policy, versions.numbers)
        warnings += [f"{name}: {text}" for text in _missing_versions(policy, versions.numbers)]
        if not selected:
            raise _BadModel(_no_version(name, versions.numbers))
    except ConfigError as error:
        problems = [str(problem) for problem in error.problems]
        if versions is not None and not versions.numbers:
            problems.append(_no_version(name, ()))
        return Found(name, path, None, (), tuple(problems), tuple(warnings))
    except _BadModel as error:
        return Found(name, path, None, (), (str(error),), tuple(warnings))
    except OSError as error:
        text = f"{name}: cannot be read: {error.strerror or type(error).__name__}"
        return Found(name, path, None, (), (text,), tuple(warnings))
    return Found(name, path, loaded.config, selected, (), tuple(warnings))


def select_versions(policy: ModelVersionPolicy, numbers: Iterable[int]) -> tuple[int, ...]:
    """Those of the version numbers that the policy serves, ascending."""
    present = sorted(set(numbers))
    if policy.specific is not None:
        wanted = set(policy.specific.versions)
        return tuple(number for number in present if number in wanted)
    if policy.all is not None:
        return tuple(present)
    latest = policy.latest.num_versions if policy.latest is not None else 0
    return tuple(present[-max(latest, 1) :])


def _models(root: Path) -> list[Path]:
    """The directories of a repository; those that start with a dot are not models."""
    try:
        return sorted(entry for entry in root.iterdir() if not entry.name.startswith(".") and entry.is_dir())
    except OSError as error:
        raise InvalidRequest(f"model repository {root}: {error.strerror}; check --model-repository") from error


def _unique(models: list[Found]) -> Found:
    if len(models) == 1:
        return models[0]
    first = models[0]
    text = f"model appears in two or more repositories: '{first.name}' is in {len(models)} of them; keep one"
    return Found(first.name, first.path, None, (), (text,), first.warnings)


def _names(directory: Path) -> tuple[str, ...]:
    return tuple(entry.name for entry in directory.iterdir())


def _version_directories(path: Path) -> _Versions:
    numbers: list[int] = []
    warnings: list[str] = []
    for entry in sorted(path.iterdir()):
        name = entry.name
        if name in _NOT_VERSIONS or name.startswith((".", "__")) or not entry.is_dir():
            continue
        printed = f"{path.name}/{shown(os.fsencode(name).decode('utf-8', 'backslashreplace'))}"
        if not (name.isascii() and name.isdigit()):
            warnings.append(f"{printed}: not a version directory, ignored: its name is not an integer")
        elif len(name) > 1 and name.startswith("0"):
            warnings.append(f"{printed}: not a version directory, ignored: its name has leading zeros")
        elif name == "0":
            warnings.append(f"{printed}: not a version directory, ignored: 0 stands for the default version")
        elif int(name[:20]) > _LARGEST_VERSION:
            warnings.append(f"{printed}: not a version directory, ignored: above {_LARGEST_VERSION}")
        else:
            numbers.append(int(name))
    return _Versions(tuple(sorted(numbers)), tuple(warnings))


def _missing_versions(policy: ModelVersionPolicy, numbers: Collection[int]) -> list[str]:
    wanted = policy.specific.versions if policy.specific is not None else ()
    missing = [number for number in dict.fromkeys(wanted) if number not in numbers]
    return [f"version {number} is in the version policy, but has no directory" for number in missing]


def _no_version(name: str, numbers: Collection[int]) -> str:
    there = f"there are {', '.join(map(str, numbers))}" if numbers else "there is no version directory, such as 1"
    return f"{name}: at least one version must be available under the version policy of model '{name}'; {there}"


def _read_config(path: Path) -> bytes | None:
    """The file's bytes; None when there is none."""
    try:
        # Non-blocking, as a FIFO of that name would wait for a writer.
        descriptor = os.open(path / CONFIG_FILE, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise _BadModel(f"{path.name}/{CONFIG_FILE}: not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(CONFIG_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > CONFIG_BYTES:
        size = max(state.st_size, len(data))
        raise _BadModel(f"{path.name}/{CONFIG_FILE}: {size} bytes, expected at most {CONFIG_BYTES}")
    return data

"""Scans the model repositories: available models, their versions to be served, and their problems.

Invariant: a broken model never affects others; its problems are in its own `problems`. File names in texts are relative
to the repository.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from google.protobuf.message import Message

from shmserve.errors import InvalidRequest, NotFound, Unavailable
from shmserve.repo.backends import BACKENDS, has_library
from shmserve.repo.config.complete import is_ensemble
from shmserve.repo.config.outline import escaped, escaped_name
from shmserve.repo.config.override import OVERRIDE, Override
from shmserve.repo.config.problems import CONFIG_BYTES, Place, Problem, nearest
from shmserve.repo.config.schema import ModelConfig, ModelVersionPolicy
from shmserve.repo.files.safe_paths import MODEL_NAME, NAME_RULE
from shmserve.repo.files.torch_file import torch_kind
from shmserve.repo.load import CONFIG_FILE, ExaminedConfig, ModelContext, examine

_ONE_FILE = frozenset({"python", "pytorch"})
CONFIG_FOLDER = "configs"
"""Subdirectory of a model for alternative configurations."""
OVERRIDE_FILE = "override"
"""`ScannedModel.file` of a configuration given with a load call."""

_TENSORS = ("input", "output")
_LARGEST_VERSION = 2**63 - 1
_NOT_VERSIONS = frozenset({CONFIG_FOLDER, "warmup", "initial_state"})


class ScannedModel(NamedTuple):
    """A model of a repository. A model with problems cannot be served; its `config` is None.

    `versions` are those selected by the version policy whose file exists, ascending; `missing` are the others that it
    selects, and why they cannot be served. `written` is the configuration as written in the file or override, without
    defaults, None if it cannot be parsed. `file` is the configuration's file, "" if there is none. `places` maps
    fields to positions. `present`: all version directories, None if they cannot be listed.
    """

    name: str
    path: Path
    config: ModelConfig | None
    versions: tuple[int, ...]
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    written: ModelConfig | None = None
    file: str = ""
    missing: Mapping[int, str] = MappingProxyType({})
    places: Mapping[str, Place] = MappingProxyType({})
    present: tuple[int, ...] | None = None

    @classmethod
    def failed(cls, name: str, path: Path, reason: str) -> ScannedModel:
        """A model that cannot be served for a reason outside its own files."""
        return cls(name, path, None, (), (Problem("", 0, 0, "", reason),), ())

    @property
    def problem_texts(self) -> tuple[str, ...]:
        return tuple(map(str, self.problems))

    @property
    def warning_texts(self) -> tuple[str, ...]:
        return tuple(map(str, self.warnings))


def scan_model(
    path: Path,
    *,
    backends: Collection[str] = BACKENDS,
    gpus: Collection[int] = (),
    config_name: str = "",
    override: Override | None = None,
    prepared: bool = False,
    versions: Collection[int] = (),
) -> ScannedModel:
    """Scans one model directory. With an override, its configuration files are not read. `prepared`: the directory is
    the result of the model's repository agents; before they have run, files may be missing. `versions`: to be served,
    all of them, in place of those that the version policy selects.
    """
    if config_name:
        check_config_name(config_name)
    return _Scan(path, backends, gpus, prepared, versions).run(config_name, override)


def model_names(roots: Sequence[Path]) -> dict[str, list[Path]]:
    """Model name -> its directories, without looking into them."""
    paths: dict[str, list[Path]] = {}
    for root in dict.fromkeys(root.resolve() for root in roots):
        for path in _models(root):
            paths.setdefault(escaped_name(path.name), []).append(path)
    return {name: paths[name] for name in sorted(paths)}


def resembles_model(folder: Path) -> bool:
    """Whether the directory has anything of a model: a configuration, or a version directory."""
    if (folder / CONFIG_FILE).exists() or (folder / CONFIG_FOLDER).is_dir():
        return True
    return any(entry.name.isdigit() for entry in folder.iterdir())


def find_model(roots: Sequence[Path], name: str) -> Path:
    """The directory of a model. Raises NotFound if there is none, InvalidRequest if there are two or the name is
    empty.
    """
    if not name.strip():
        raise InvalidRequest("Model name cannot be empty. Please enter a valid name to deploy.")
    if "/" in name or name.strip() == "..":
        text = f"model name must not contain path traversal characters; found '{escaped(name)}', expected {NAME_RULE}"
        raise InvalidRequest(text)
    failed = f"failed to load '{escaped(name)}', failed to poll from model repository"
    if not MODEL_NAME.fullmatch(name) or not _is_model(name):
        raise NotFound(f"{failed}: a model cannot have this name; expected {NAME_RULE}")
    paths = [root / name for root in dict.fromkeys(root.resolve() for root in roots) if os.path.isdir(root / name)]
    if len(paths) > 1:
        raise InvalidRequest(f"{failed}: {duplicate_text(name, len(paths))}")
    if not paths:
        try:
            near = nearest(name, (known for known in model_names(roots) if MODEL_NAME.fullmatch(known)))
        except InvalidRequest:  # its text has the repository's path, which not every client may see
            text = f"{failed}: a model repository cannot be read; check --model-repository"
            raise Unavailable(text) from None
        raise NotFound(f"{failed}: no model repository has it" + (f"; did you mean '{near}'?" if near else ""))
    return paths[0]


def select_versions(policy: ModelVersionPolicy, numbers: Iterable[int]) -> tuple[int, ...]:
    """The version numbers that the policy serves, ascending."""
    present = sorted(set(numbers))
    if policy.specific is not None:
        selected = set(policy.specific.versions)
        return tuple(number for number in present if number in selected)
    if policy.all is not None:
        return tuple(present)
    latest = policy.latest.num_versions if policy.latest is not None else 0
    return tuple(present[-max(latest, 1) :])


def check_config_name(name: str) -> str:
    """The name, if valid for a file in `configs`; else raises InvalidRequest."""
    if not MODEL_NAME.fullmatch(name):
        raise InvalidRequest(f"--model-config-name: found '{escaped(name)}', expected {NAME_RULE}")
    return name


# ----------------------------------------------------------------------------------------------------- one model


class _BadModel(Exception):
    """Why a model cannot be served, and the file with the problem."""

    def __init__(self, text: str, file: str = "") -> None:
        super().__init__(text)
        self.file = file


class _Scan:
    """The scan of one model: collects problems and continues where possible."""

    def __init__(
        self, path: Path, backends: Collection[str], gpus: Collection[int], prepared: bool, versions: Collection[int]
    ) -> None:
        self._path = path
        self._prepared = prepared
        self._requested = versions
        self._name = escaped_name(path.name)
        self._backends = backends
        self._gpus = gpus
        self._problems: list[Problem] = []
        self._warnings: list[Problem] = []
        self._missing: dict[int, str] = {}

    def run(self, config_name: str, override: Override | None) -> ScannedModel:
        examined: ExaminedConfig | None = None
        file = ""
        versions: tuple[int, ...] = ()
        present: tuple[int, ...] | None = None
        try:
            if not MODEL_NAME.fullmatch(self._path.name):
                raise _BadModel(f"a model cannot have this name; expected {NAME_RULE}")
            present = numbers = self._version_directories()
            written, file = self._written_config(config_name, override)
            examined = self._examine(written, file, numbers)
            versions = self._select(examined, numbers)
        except _BadModel as error:
            file = error.file
            self._add_problem(str(error), file)
        except OSError as error:
            self._add_problem(f"cannot be read: {error.strerror or type(error).__name__}")
        return ScannedModel(
            name=self._name,
            path=self._path,
            config=examined.config if examined is not None and not self._problems else None,
            versions=versions if not self._problems else (),
            problems=tuple(self._problems),
            warnings=tuple(self._warnings),
            written=examined.written if examined is not None else None,
            file=file,
            missing=self._missing,
            places=examined.places if examined is not None else {},
            present=present,
        )

    def _add_problem(self, text: str, below: str = "") -> None:
        self._problems.append(self._located(text, below))

    def _add_warning(self, text: str, below: str = "") -> None:
        self._warnings.append(self._located(text, below))

    def _located(self, text: str, below: str) -> Problem:
        return Problem(f"{self._name}/{below}" if below else self._name, 0, 0, "", text)

    def _written_config(self, config_name: str, override: Override | None) -> tuple[bytes | Message, str]:
        """The configuration as given, and its file."""
        if override is not None:
            return override.message, OVERRIDE_FILE
        files = [f"{CONFIG_FOLDER}/{config_name}.pbtxt", CONFIG_FILE] if config_name else [CONFIG_FILE]
        for file in files:
            data = _read(self._path, file)
            if data is not None:
                return data, file
        return b"", ""

    def _examine(self, written: bytes | Message, file: str, numbers: Sequence[int]) -> ExaminedConfig:
        listed = (_names_if_readable(self._path / str(number)) for number in numbers)
        files = next((names for names in listed if names), ())
        named = f"{self._name}/{file}" if file else f"{self._name} (no {CONFIG_FILE})"
        context = ModelContext(self._path.name, self._backends, files, self._gpus, self._path, self._prepared)
        examined = examine(written, OVERRIDE if file == OVERRIDE_FILE else named, context)
        self._problems += examined.problems
        self._warnings += examined.warnings
        return examined

    def _select(self, examined: ExaminedConfig, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """The versions to be served. Incomplete versions fail the model only if none is left."""
        if examined.written is None and numbers:
            return ()
        policy = (examined.written and examined.written.version_policy) or ModelVersionPolicy()
        for number in dict.fromkeys(policy.specific.versions if policy.specific is not None else ()):
            if number not in numbers:
                self._add_warning(f"version {number} is in the version policy, but has no directory")
        selected = select_versions(policy, numbers)
        if self._requested:
            selected = tuple(number for number in numbers if number in self._requested)
            for number in sorted(set(self._requested) - set(numbers)):
                self._add_problem("has no directory", str(number))
        elif not selected:
            self._add_problem(_no_version(self._name, policy, numbers))
        if examined.completed is None or not self._has_backend(examined.completed):
            return ()
        if examined.completed.model_repository_agents and not self._prepared:
            return selected
        for number in selected:
            if why := self._missing_part(self._path / str(number), examined.completed):
                self._missing[number] = why
        served = tuple(number for number in selected if number not in self._missing)
        for number, why in self._missing.items():
            if served and not self._requested:
                self._add_warning(f"not served: {why}", str(number))
            else:
                self._add_problem(why, str(number))
        return served

    def _has_backend(self, config: ModelConfig) -> bool:
        return config.backend in {*self._backends, ""} or has_library(config, self._path)

    def _missing_part(self, folder: Path, config: ModelConfig) -> str:
        """What a version lacks; "" if nothing."""
        try:
            why = _missing_file(folder, config)
            if why or config.backend != "pytorch" or all(problem.path not in _TENSORS for problem in self._problems):
                return why
            why = _no_program(folder / config.default_model_filename)
        except OSError as error:
            return f"cannot be read: {error.strerror or type(error).__name__}"
        if why:  # which is also why its tensors are unknown
            self._problems = [problem for problem in self._problems if problem.path not in _TENSORS]
        return why

    def _version_directories(self) -> tuple[int, ...]:
        numbers: list[int] = []
        for entry in sorted(self._path.iterdir()):
            name = entry.name
            if name in _NOT_VERSIONS or name.startswith((".", "__")) or not os.path.isdir(entry):
                continue
            why = ""
            if not (name.isascii() and name.isdigit()):
                why = "its name is not an integer"
            elif len(name) > 1 and name.startswith("0"):
                why = "its name has leading zeros"
            elif name == "0":
                why = "0 means the default version"
            elif int(name[:20]) > _LARGEST_VERSION:
                why = f"above {_LARGEST_VERSION}"
            if why:
                self._add_warning(f"not a version directory, ignored: {why}", escaped_name(name, 60))
            else:
                numbers.append(int(name))
        return tuple(sorted(numbers))


# --------------------------------------------------------------------------------------------------------- files


def _models(root: Path) -> list[Path]:
    try:
        # os.path.isdir, because Path.is_dir raises for a link into an unreadable directory.
        return sorted(entry for entry in root.iterdir() if _is_model(entry.name) and os.path.isdir(entry))
    except OSError as error:
        raise InvalidRequest(f"model repository {root}: {error.strerror}; check --model-repository") from error


def _is_model(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__"


def duplicate_text(name: str, times: int) -> str:
    """Why a model that several repositories have is not served."""
    return f"model appears in two or more repositories: '{name}' is in {times} of them; keep one"


def _names(directory: Path) -> tuple[str, ...]:
    return tuple(sorted(os.listdir(directory)))


def _names_if_readable(directory: Path) -> tuple[str, ...]:
    """The file names of a version, none if it cannot be read: the backend is then derived from another version."""
    try:
        return _names(directory)
    except OSError:
        return ()


def _missing_file(directory: Path, config: ModelConfig) -> str:
    """What the version lacks for its backend; "" if nothing."""
    name = config.default_model_filename
    if is_ensemble(config) or not name:
        return ""
    path = directory / name
    if path.is_dir():
        # A model in its own directory: external weights, or a saved model.
        if config.backend == "onnxruntime" and not (path / "model.onnx").is_file():
            return f"'{escaped(name)}' is a directory, but has no file 'model.onnx'"
        return f"'{escaped(name)}' is a directory, expected a file" if config.backend in _ONE_FILE else ""
    if path.is_file():
        return ""
    if path.is_symlink():
        return f"'{escaped(name)}' is a broken link"
    names = _names(directory)
    if not names:
        return f"has no file '{escaped(name)}': the directory is empty"
    near = nearest(name, (known for known in names if known.isprintable()))
    return f"has no file '{escaped(name)}'" + (f"; did you mean '{near}'?" if near else "")


def _no_program(path: Path) -> str:
    """Why a file of PyTorch cannot be run; "" if it can."""
    try:
        torch_kind(path)
    except InvalidRequest as error:
        return error.message
    return ""


def _no_version(name: str, policy: ModelVersionPolicy, numbers: Collection[int]) -> str:
    """Why the model has no version. Only the policy `specific` selects none of several versions."""
    there = "there is no version directory, such as 1"
    if numbers:
        selected = ", ".join(map(str, policy.specific.versions)) if policy.specific is not None else ""
        there = f"it selects {selected or 'none'}, but the version directories are {', '.join(map(str, numbers))}"
    return f"at least one version must be available under the version policy of model '{name}'; {there}"


def _read(folder: Path, name: str) -> bytes | None:
    """The configuration file's bytes; None if there is none."""
    try:
        # Non-blocking, as opening a FIFO would wait for a writer.
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise _BadModel("not a regular file", name)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(CONFIG_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > CONFIG_BYTES:
        size = max(state.st_size, len(data))
        raise _BadModel(f"{size} bytes, expected at most {CONFIG_BYTES}", name)
    return data

"""Single files served as models, e.g. `shmserve serve model.onnx`: a repository of links to them.

    <folder>/
        resnet/
            1/model.onnx -> /data/resnet.onnx
        classify/
            config.pbtxt               written from the decorator of a function in app.py
            1/model.py -> /data/app.py
            1/imported_modules/texts.py -> /data/texts.py

From there on they are models like any other. Invariant: nothing is written beside a user's file.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shmserve.errors import InvalidRequest
from shmserve.repo.backends import BACKENDS, MODEL, NETWORK, NETWORK_CONFIG
from shmserve.repo.config.complete import ENGINES
from shmserve.repo.files.safe_paths import MODEL_NAME, NAME_RULE
from shmserve.repo.load import CONFIG_FILE
from shmserve.repo.onnx.header import NotOnnx, TooLarge, external_files, is_beside
from shmserve.repo.storage.model_functions import FunctionModel, functions_in

TARGETS: dict[str, str] = {}
for _engine in ENGINES:
    if _engine.backend in BACKENDS:
        TARGETS.setdefault(Path(_engine.file).suffix, _engine.file)  # .py: model.py, not dali.py
"""Suffix of a model file -> its name in a version directory."""
SAVED_MODEL = ".savedmodel"
"""The suffix of models that are directories."""
_CONFIG_SUFFIX = ".pbtxt"
_MODULES = "imported_modules"
_HINTS = {
    ".joblib": "`shmserve init NAME --from {}` makes a model that loads it, with scikit-learn",
    ".pickle": "`shmserve init NAME --from {}` makes a model that loads it, with scikit-learn",
    ".pkl": "`shmserve init NAME --from {}` makes a model that loads it, with scikit-learn",
    ".pth": "`shmserve init NAME --from torch` makes a model.py for a network and its weights",
}
"""Suffix of a file that cannot be served alone -> how to make a model of it."""
_WEIGHTS = {".xml": ".bin", ".pdmodel": ".pdiparams"}
"""Suffix of a model file -> that of the file beside it with the weights."""
_Look = tuple[int, ...]


class ModelFile(NamedTuple):
    """A file to serve. `name` is the model's name, "" if the file does not give its models names: see `models_of`."""

    path: Path
    name: str = ""


class _Content(NamedTuple):
    """A model's files: name in its directory -> target of the link. `config` is the text of its configuration."""

    links: Mapping[str, Path]
    config: str = ""


def model_file(text: str) -> ModelFile:
    """Parses FILE or NAME=FILE. Raises InvalidRequest."""
    name, equals, rest = text.partition("=")
    if not equals or Path(text).exists():
        name, rest = "", text
    path = Path(os.path.abspath(rest))
    if not rest:
        raise InvalidRequest(f"'{text}' names no file")
    if not is_model_path(path):
        raise InvalidRequest(f"{rest}: no such file or directory")
    if path.suffix not in TARGETS and not _is_network(path) and not path.with_suffix(_CONFIG_SUFFIX).is_file():
        hint = _HINTS.get(path.suffix)
        text = f"{rest}: the suffix '{path.suffix}' is not that of a model file; known are {', '.join(TARGETS)}"
        raise InvalidRequest(f"{text}. {hint.format(shlex.quote(rest))}" if hint else text)
    if equals and name and not MODEL_NAME.fullmatch(name):
        raise InvalidRequest(f"{text}: '{name}' cannot be the name of a model; expected {NAME_RULE}")
    return ModelFile(path, name)


def is_model_path(path: Path) -> bool:
    """Whether there is a file, or a directory that is a model itself."""
    return path.is_dir() if path.suffix == SAVED_MODEL else path.is_file() or _is_network(path)


def _is_network(path: Path) -> bool:
    return (path / NETWORK).is_file()


def models_of(file: ModelFile) -> dict[str, FunctionModel | None]:
    """The models of a file: its functions, or None for the file as a whole. Raises InvalidRequest and OSError."""
    if not is_model_path(file.path):
        raise InvalidRequest(f"{file.path.name}: no such file")
    if file.path.suffix == Path(MODEL).suffix:
        functions = functions_in(file.path)
        if file.name and len(functions) > 1:
            names = ", ".join(function.name for function in functions)
            raise InvalidRequest(f"{file.path.name} has the models {names}: it cannot be served as '{file.name}'")
        if functions:
            return {file.name or function.name: function for function in functions}
    return {file.name or _legal_name(file.path): None}


def _legal_name(path: Path) -> str:
    text = path.name if _is_network(path) else path.stem
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", text).strip("_.")[:128]
    if not name:
        raise InvalidRequest(f"{path.name} does not give its model a name: write NAME={path.name}")
    return name


class ModelFiles:
    """The repository of links, in `folder`. Used in one thread at a time, but for `source`."""

    def __init__(self, files: Sequence[ModelFile], folder: Path) -> None:
        self.folder = folder
        self._files = files
        self._models: dict[Path, dict[str, FunctionModel | None]] = {}
        """File -> its models, as last read."""
        self._looks: dict[Path, _Look] = {}
        self._problems: dict[Path, str] = {}
        """File -> why it cannot be read now. Its models stay as they were."""
        self._sources: Mapping[str, Path] = {}
        """Model -> its file. Replaced, never changed."""

    def refresh(self, strict: bool = False) -> None:
        """Follows changes of the files. `strict`: raise InvalidRequest for a problem instead of keeping its text."""
        changed = [file for file in self._files if self._has_changed(file.path)]
        failed = [file for file in self._files if file.path in self._problems and file not in changed]
        for file in changed + failed:
            try:
                models = models_of(file)
                self._check_unique(file, models)
            except (InvalidRequest, OSError) as error:
                text = str(error) if isinstance(error, InvalidRequest) else f"{file.path.name}: {error.strerror}"
                if strict:
                    raise InvalidRequest(text) from error
                self._problems[file.path] = text
                continue
            self._problems.pop(file.path, None)
            for name in self._models.get(file.path, {}).keys() - models.keys():
                shutil.rmtree(self.folder / name)
            self._models[file.path] = models
            for name, function in models.items():
                _write(self.folder / name, _content(file.path, function))
            self._sources = {name: path for path, models in self._models.items() for name in models}

    def names(self) -> Collection[str]:
        """The models, in the order of their files."""
        return self._sources.keys()

    def problem(self, folder: Path) -> str:
        """Why the model in this directory cannot be read; "" if it can, or is not one of these."""
        source = self.source(folder)
        return self._problems.get(source, "") if source is not None else ""

    def unread(self) -> list[str]:
        """The problems of files of which no model is known."""
        return [text for path, text in self._problems.items() if path not in self._models]

    def source(self, folder: Path) -> Path | None:
        """The user's file of the model in this directory."""
        return self._sources.get(folder.name) if folder.parent == self.folder.resolve() else None

    def _has_changed(self, path: Path) -> bool:
        look = tuple(
            _look(place) for place in (path, path / "saved_model.pb", path / NETWORK, path.with_suffix(_CONFIG_SUFFIX))
        )
        before, self._looks[path] = self._looks.get(path), sum(look, ())
        return before != self._looks[path]

    def _check_unique(self, file: ModelFile, models: Mapping[str, FunctionModel | None]) -> None:
        for path, others in self._models.items():
            twice = sorted(models.keys() & others.keys()) if path != file.path else []
            if twice:
                text = f"{path.name} and {file.path.name} both give a model '{twice[0]}'"
                raise InvalidRequest(f"{text}; choose another name for one: NAME={file.path.name}")


def _look(path: Path) -> _Look:
    try:
        state = path.stat()
    except OSError:
        return (0,)
    return state.st_size, state.st_mtime_ns, state.st_ino


def _target(path: Path) -> str:
    """The name in a version directory: `model.SUFFIX` for a backend that is not built in."""
    return TARGETS.get(path.suffix, f"model{path.suffix}")


def _content(path: Path, function: FunctionModel | None) -> _Content:
    if _is_network(path):
        return _Content({f"1/{file.name}": file for file in path.iterdir() if file.is_file()}, NETWORK_CONFIG)
    links = {f"1/{_target(path)}": path}
    if function is not None:  # modules are imported from where they are; the links belong to what a change is seen in
        links |= {f"1/{_MODULES}/{module}": path.parent / module for module in function.modules}
        return _Content(links, function.config)
    links |= {f"1/{name}": path.parent / beside for name, beside in _companions(path)}
    config = path.with_suffix(_CONFIG_SUFFIX)
    if config.is_file():
        links[CONFIG_FILE] = config
    return _Content(links)


def _companions(path: Path) -> Iterator[tuple[str, str]]:
    """Files that belong to the model: name in the version directory, name beside the file."""
    if path.suffix == ".onnx":
        with suppress(NotOnnx, TooLarge, OSError), path.open("rb") as file:  # loading reports what is wrong
            yield from ((name, name) for name in external_files(file) if is_beside(name))
    elif path.suffix in _WEIGHTS:
        weights = path.with_suffix(_WEIGHTS[path.suffix])
        if weights.exists():
            yield Path(TARGETS[path.suffix]).with_suffix(weights.suffix).name, weights.name


def _write(folder: Path, content: _Content) -> None:
    """Makes the directory's content this one. What is right already is left alone."""
    for path in [path for path in folder.rglob("*") if path.is_symlink()]:
        wanted = content.links.get(path.relative_to(folder).as_posix())
        if wanted is None or os.readlink(path) != str(wanted):
            path.unlink()
    for name, target in content.links.items():
        link = folder / name
        link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(target)
    config = folder / CONFIG_FILE
    if content.config:
        config.write_text(content.config)
    elif config.exists() and not config.is_symlink():
        config.unlink()

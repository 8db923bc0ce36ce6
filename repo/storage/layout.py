"""Findings about a repository's files: misplaced, unreadable or invalid ones.

Invariant: no code is executed, and findings of the store's scan are not repeated.
"""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from shmserve.errors import InvalidRequest
from shmserve.repo.backends import BACKENDS, library_of
from shmserve.repo.config.complete import ENGINES, is_ensemble
from shmserve.repo.config.outline import escaped, escaped_name
from shmserve.repo.config.problems import nearest
from shmserve.repo.config.schema import ModelConfig, ModelOutput
from shmserve.repo.config.support import WITH_OPERATORS
from shmserve.repo.files.companions import WARMUP, data_bytes, read_labels
from shmserve.repo.files.elf import read_library
from shmserve.repo.files.gguf import chat_template
from shmserve.repo.files.native_library import library_problem, missing_libraries
from shmserve.repo.files.safe_paths import open_inside
from shmserve.repo.load import CONFIG_FILE
from shmserve.repo.onnx.differences import differences
from shmserve.repo.onnx.header import NotOnnx, TooLarge, read_header
from shmserve.repo.parameters import CHAT_TEMPLATE, FUNCTION
from shmserve.repo.rules.optimization import setting_problems, template_problem
from shmserve.repo.storage.model_functions import CLASS, parse_source, read_source

ERROR, WARNING = "error", "warning"
ENTRIES = 10_000
"""Maximum number of files and directories inspected per model."""
MODEL_DIRECTORY = "a model is a directory: NAME/config.pbtxt and NAME/1/"
"""A hint for repositories with other entries, or without models."""

_POINTER = b"version https://git-lfs.github.com/spec/"
_ENGINE_FILES = frozenset(engine.file for engine in ENGINES)
_SOURCE = "model.py"
_ENTRY_METHODS = ("execute", "stream")
"""A Python model has one of them."""


class LayoutFinding(NamedTuple):
    """One finding. `file` is relative to the repository; `path` is the configuration field, if any; `hint` is a
    remedy.
    """

    severity: str
    file: str
    text: str
    hint: str = ""
    path: str = ""
    line: int = 0
    column: int = 0


# --------------------------------------------------------------------------------------------- a repository


def inspect_root(root: Path) -> list[LayoutFinding]:
    """Findings about entries of the repository that are not directories. Raises OSError if it cannot be read."""
    findings = []
    for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
        if entry.name.startswith(".") or os.path.isdir(entry.path):  # isdir does not raise on cyclic links
            continue
        name = escaped_name(entry.name)
        if _dangles(entry):
            text = f"broken link: {_target(entry.path)}"
            findings.append(LayoutFinding(ERROR, name, text, "fix the link, or remove it"))
        elif not name.upper().startswith(("README", "LICENSE")):
            findings.append(LayoutFinding(WARNING, name, "not a directory, ignored", MODEL_DIRECTORY))
    return findings


def is_model(root: Path) -> bool:
    """Whether the directory is a single model instead of a repository."""
    if (root / CONFIG_FILE).is_file():
        return True
    versions = (entry for entry in root.iterdir() if entry.name.isdigit() and os.path.isdir(entry))
    return any((version / file).exists() for version in versions for file in _ENGINE_FILES)


def repository_of(path: Path) -> Path | None:
    """The repository of a model directory, of its configuration, or of a file in one of its version directories."""
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    if path.is_file() and folder.name.isdigit():
        folder = folder.parent
    try:
        return folder.parent if is_model(folder) else None
    except OSError:
        return None


# -------------------------------------------------------------------------------------------------- a model


def inspect_model(
    folder: Path, config: ModelConfig | None, selected: Sequence[int], directory: str | Path, warnings_only: bool
) -> list[LayoutFinding]:
    """All findings about one model. `config` is the completed configuration, if known; `selected` are the versions to
    be served. `warnings_only`: without checks of the contents of model files that find only errors.
    """
    findings = list(_misplaced(folder, config))
    findings += _walk(folder, selected)
    if config is not None and not is_ensemble(config):
        findings += _without_effect(folder, config, selected)
        findings += (
            LayoutFinding(ERROR if problem.fails else WARNING, "", problem.text, path=problem.path)
            for problem in setting_problems(config)
        )
        for version in selected:
            findings += _model_file(folder, version, config, warnings_only)
            findings += _operator_libraries(folder, version, config)
            findings += _native_library(folder, version, config, directory)
        findings += _labels(folder, config)
        findings += _warmup(folder, config)
    return findings


def _misplaced(folder: Path, config: ModelConfig | None) -> Iterator[LayoutFinding]:
    """Model files in places where they are not read."""
    name = escaped_name(folder.name)
    expected = {*_ENGINE_FILES, (config.default_model_filename if config is not None else "")}
    names = sorted(os.listdir(folder))
    for entry in names:
        here = f"{name}/{escaped_name(entry)}"
        path = folder / entry
        if entry in expected:
            yield LayoutFinding(WARNING, here, "not read here", f"move it into a version directory: {name}/1/{entry}")
        elif entry.isdigit() and entry.isascii() and path.is_file():
            hint = f"a version is a directory that contains the model file: {here}/"
            yield LayoutFinding(WARNING, here, "a file with the name of a version, ignored", hint)
        elif CONFIG_FILE not in names and path.is_file() and nearest(entry, (CONFIG_FILE,)):
            yield LayoutFinding(
                WARNING, here, "not read", f"the configuration is in {name}/{CONFIG_FILE}; rename it if it is one"
            )
        elif entry.isdigit() and (path / CONFIG_FILE).is_file():
            hint = f"it belongs to the model: move it to {name}/{CONFIG_FILE}"
            yield LayoutFinding(
                WARNING, f"{here}/{CONFIG_FILE}", "not read: versions have no configuration of their own", hint
            )


def _without_effect(folder: Path, config: ModelConfig, selected: Sequence[int]) -> Iterator[LayoutFinding]:
    """Valid settings that have no effect, or probably not the intended one."""
    groups = config.instance_group
    if groups and all(group.passive for group in groups):
        hint = "remove `passive` from one of its groups"
        yield LayoutFinding(
            WARNING, "", "all its instances are passive: it cannot process requests", hint, "instance_group"
        )
    accelerators = config.optimization and config.optimization.execution_accelerators
    kinds = {group.kind for group in groups}
    if accelerators and config.backend == "onnxruntime":
        for field, kind, there in (
            ("gpu_execution_accelerator", "KIND_GPU", "no instance of the model runs on a GPU"),
            ("cpu_execution_accelerator", "KIND_CPU", "no instance of the model runs on the CPU"),
        ):
            for index, accelerator in enumerate(getattr(accelerators, field)):
                if kind not in kinds:
                    path = f"optimization.execution_accelerators.{field}[{index}]"
                    text = f'accelerator "{escaped(accelerator.name)}" has no effect: {there}'
                    yield LayoutFinding(WARNING, "", text, f"instance_group [ {{ kind: {kind} }} ] adds one", path)
    if (
        config.backend == "python"
        and not (config.input or config.output)
        and not may_complete_itself(folder, selected, config)
    ):
        text = "the model has no inputs or outputs: its configuration has no `input` or `output`, and there is no "
        hint = f"add them to {CONFIG_FILE}, or add auto_complete_config to the model"
        yield LayoutFinding(WARNING, escaped_name(folder.name), f"{text}auto_complete_config in its {_SOURCE}", hint)


def _walk(folder: Path, selected: Collection[int]) -> Iterator[LayoutFinding]:
    """Broken links, and unreadable files and directories. Follows links to directories only at the top level."""
    needed = {CONFIG_FILE, *map(str, selected)}
    remaining = ENTRIES
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        for entry in sorted(os.scandir(here), key=lambda entry: entry.name):
            if entry.name.startswith(".") or entry.name == "__pycache__":
                continue
            remaining -= 1
            if remaining < 0:
                text = f"has more than {ENTRIES:,} files; the others were not checked"
                yield LayoutFinding(WARNING, escaped_name(folder.name), text)
                return
            below = Path(entry.path).relative_to(folder)
            severity = ERROR if below.parts[0] in needed else WARNING
            name = "/".join(map(escaped_name, (folder.name, *below.parts)))
            if _dangles(entry):
                text = f"broken link: {_target(entry.path)}"
                yield LayoutFinding(severity, name, text, "fix the link, or remove it")
                continue
            is_dir = os.path.isdir(entry.path)
            if not os.access(entry.path, os.R_OK | os.X_OK if is_dir else os.R_OK, effective_ids=True):
                hint = _permit(entry, "rx" if is_dir else "r")
                yield LayoutFinding(severity, name, "cannot be read: Permission denied", hint)
            elif is_dir and (here == folder or not entry.is_symlink()):
                waiting.append(Path(entry.path))


def _permit(entry: os.DirEntry[str], rights: str) -> str:
    return (
        f"as its owner, uid {entry.stat().st_uid}: chmod u+{rights}; for another user that serves it: chmod a+{rights}"
    )


def _dangles(entry: os.DirEntry[str]) -> bool:
    return entry.is_symlink() and not os.path.exists(entry.path)


def _target(path: str) -> str:
    return escaped_name(os.readlink(path), 200)


# ------------------------------------------------------------------------------------------- the model's file


def _model_file(folder: Path, version: int, config: ModelConfig, warnings_only: bool) -> Iterator[LayoutFinding]:
    path = folder / str(version) / config.default_model_filename
    if path.is_dir():
        path /= "model.onnx"
    if not config.default_model_filename or not path.is_file() or not os.access(path, os.R_OK, effective_ids=True):
        return
    name = "/".join(map(escaped_name, path.relative_to(folder.parent).parts))
    with path.open("rb") as file:
        start = file.read(256)
    if not start:
        yield LayoutFinding(ERROR, name, "is empty", "copy the model again")
    elif start.startswith(_POINTER):
        yield LayoutFinding(
            ERROR,
            name,
            "is a Git LFS pointer; the file itself was not downloaded",
            "run `git lfs pull` in its checkout",
        )
    elif config.backend == "onnxruntime" and not warnings_only:
        yield from _onnx(path, name, config)
    elif config.backend == "llamacpp" and not warnings_only:
        yield from _gguf(path, name, config)
    elif config.backend == "python" and (source := read_source(path)) is not None:
        if not warnings_only:
            yield from _source(name, source, FUNCTION.is_set(config))
        if path.stat().st_mode & stat.S_IWOTH:
            hint = "the server runs it: chmod o-w"
            yield LayoutFinding(WARNING, name, "is writable by every user of this machine", hint)


def _gguf(path: Path, name: str, config: ModelConfig) -> Iterator[LayoutFinding]:
    try:
        template = "" if CHAT_TEMPLATE.is_set(config) else chat_template(path)
    except InvalidRequest as error:
        yield LayoutFinding(ERROR, name, error.message)
        return
    if problem := template_problem(template, config.backend):
        hint = f"set the parameter {CHAT_TEMPLATE.name}"
        yield LayoutFinding(ERROR, name, f"its chat template is {problem}", hint)


def _operator_libraries(folder: Path, version: int, config: ModelConfig) -> Iterator[LayoutFinding]:
    """Libraries with operators for the engine, which are in the version's directory or the model's."""
    names = config.model_operations.op_library_filename if config.model_operations is not None else ()
    for index, name in enumerate(names if config.backend in WITH_OPERATORS else ()):
        if not any((place / name).is_file() for place in (folder / str(version), folder)):
            model = escaped_name(folder.name)
            text = f"there is no file '{escaped(name)}' in {model}/{version} or {model}"
            yield LayoutFinding(ERROR, "", text, path=f"model_operations.op_library_filename[{index}]")


def _native_library(folder: Path, version: int, config: ModelConfig, directory: str | Path) -> Iterator[LayoutFinding]:
    """The library that runs the model, if one does and its backend is not built in."""
    path = library_of(config, folder / str(version), directory) if config.backend not in BACKENDS else None
    if path is None:
        return
    own = path.is_relative_to(folder)
    name = f"{escaped_name(folder.name)}/{escaped_name(str(path.relative_to(folder)))}" if own else str(path)
    try:
        library = read_library(path)
    except InvalidRequest:
        yield LayoutFinding(ERROR, name, "is not a shared library")
        return
    if problem := library_problem(library):
        yield LayoutFinding(ERROR, name, problem)
    elif missing := missing_libraries(library, path.parent):
        hint = "install it, or let LD_LIBRARY_PATH of the server name its directory"
        yield LayoutFinding(WARNING, name, f"needs {', '.join(missing)}, which this machine does not have", hint)


def _onnx(path: Path, name: str, config: ModelConfig) -> Iterator[LayoutFinding]:
    """Compares the file's declarations with the configuration."""
    try:
        with path.open("rb") as file:
            header = read_header(file)
    except NotOnnx as error:
        yield LayoutFinding(ERROR, name, str(error), "copy the model again")
        return
    except TooLarge:
        return
    for path_, text, write in differences(config, header):
        yield LayoutFinding(ERROR, "", text, f"write {write}" if write else "", path_)


def _source(name: str, source: bytes, is_function: bool) -> Iterator[LayoutFinding]:
    """Syntax errors, and a missing class or `execute`. The code is parsed, not run. `is_function`: a function or class
    in it is the model.
    """
    try:
        tree = parse_source(source)
    except SyntaxError as error:
        text = f"not Python: {escaped(error.msg, 200)}"
        yield LayoutFinding(ERROR, name, text, line=error.lineno or 0, column=error.offset or 0)
        return
    except ValueError as error:
        yield LayoutFinding(ERROR, name, f"not Python: {escaped(str(error), 200)}")
        return
    if is_function:
        return
    definition: ast.stmt | None = None
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == CLASS:
            definition = node
        elif isinstance(node, ast.ImportFrom) and any(name.name == "*" for name in node.names):
            return
    if definition is None:
        if CLASS.encode() not in source:  # otherwise it may be imported or assigned
            yield LayoutFinding(
                ERROR, name, f"has no class {CLASS}", f"the server needs `class {CLASS}` with `execute`"
            )
    elif (
        isinstance(definition, ast.ClassDef)
        and not definition.bases
        and not definition.decorator_list
        and not definition.keywords
    ):
        if not any(_binds(statement, name) for statement in definition.body for name in _ENTRY_METHODS):
            text = f"class {CLASS} has no execute method"
            yield LayoutFinding(
                ERROR, name, text, "add `def execute(self, requests):`", line=definition.lineno, column=1
            )


def _binds(statement: ast.stmt, name: str) -> bool:
    """Whether a statement in a class body may define a method of this name."""
    for node in ast.walk(statement):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            return True
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.alias) and name in (node.name, node.asname):
            return True
    return False


def may_complete_itself(folder: Path, versions: Sequence[int], config: ModelConfig) -> bool:
    """Whether a Python model may complete its configuration when loaded."""
    if FUNCTION.is_set(config):
        return True
    for version in versions:
        path = folder / str(version) / config.default_model_filename
        if not path.is_file() or not os.access(path, os.R_OK, effective_ids=True):
            return True
        source = read_source(path)
        if source is None or b"auto_complete_config" in source or b"import *" in source:
            return True
    return not versions


# ----------------------------------------------------------------------------------- files that the configuration names


def _labels(folder: Path, config: ModelConfig) -> Iterator[LayoutFinding]:
    for index, output in enumerate(config.output):
        if not output.label_filename:
            continue
        path = f"output[{index}].label_filename"
        try:
            labels = read_labels(folder, output.label_filename)
        except InvalidRequest as error:
            yield LayoutFinding(ERROR, "", str(error), path=path)
            continue
        minimum, maximum = _classes(output)
        there = f"label file '{escaped(output.label_filename)}' has {len(labels)} labels"
        if len(labels) < minimum:
            what = f"at least {minimum}" if maximum is None else str(minimum)
            text = f'{there}, but output "{escaped(output.name)}" has {what} classes'
            yield LayoutFinding(WARNING, "", text, f"classes from {len(labels)} on have no label", path=path)
        elif maximum is not None and len(labels) > maximum:
            text = f'{there}, but output "{escaped(output.name)}" has {maximum} classes'
            yield LayoutFinding(
                WARNING, "", text, "is it the right file? An extra label shifts all labels after it", path=path
            )


def _classes(output: ModelOutput) -> tuple[int, int | None]:
    """The minimum and maximum number of classes, which are the elements of the output per row. The maximum is None if
    it is unlimited."""
    minimum = 1
    for dim in output.dims:
        minimum *= max(dim, 1)
    return minimum, None if -1 in output.dims else minimum


def _warmup(folder: Path, config: ModelConfig) -> Iterator[LayoutFinding]:
    """Data files whose size differs from that of the tensor. Strings are checked when they are read."""
    for index, sample in enumerate(config.model_warmup):
        for key, sample_input in sample.inputs.items():
            size = data_bytes(sample_input.data_type, sample_input.dims)
            if not sample_input.input_data_file or not size:
                continue
            below = f"{WARMUP}/{sample_input.input_data_file}"
            try:
                descriptor = open_inside(folder, below, f"warm-up data '{below}'")
            except InvalidRequest:  # already reported by the scan
                continue
            try:
                there = os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
            if there != size:
                path = f'model_warmup[{index}].inputs["{key}"].input_data_file'
                text = f"warm-up data '{escaped(below)}' has {there} bytes, expected {size}"
                why = f"{sample_input.data_type} and dims {list(sample_input.dims)} of one row"
                yield LayoutFinding(ERROR, "", f"{text}: {why}", path=path)

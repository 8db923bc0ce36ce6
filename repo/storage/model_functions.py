"""Parses Python models, and finds functions with the decorator `@shmserve.model`, whose configurations it writes.

Invariant: the file is parsed, never run. Its workers run it, and complete the configurations from its type hints.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from shmserve.errors import InvalidRequest
from shmserve.functions import ModelOptions
from shmserve.repo.files.safe_paths import MODEL_NAME, NAME_RULE
from shmserve.repo.parameters import FUNCTION, STACKED, STRICT_OUTPUTS

SOURCE_BYTES = 4 * 1024 * 1024
"""Maximum size of a file that is parsed."""
MODULES = 64
"""Maximum number of modules beside a file that are followed."""
CLASS = "TritonPythonModel"
_Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class FunctionModel(NamedTuple):
    """`modules`: the files that the model's file imports from its folder, also indirectly, as paths in the folder."""

    name: str
    config: str
    modules: tuple[str, ...] = ()


def read_source(path: Path) -> bytes | None:
    """Returns the file; None if it has more than SOURCE_BYTES. Raises OSError."""
    with path.open("rb") as file:
        source = file.read(SOURCE_BYTES + 1)
    return source if len(source) <= SOURCE_BYTES else None


def parse_source(source: bytes) -> ast.Module:
    """Raises SyntaxError, and ValueError for what contains NUL or is nested too deeply."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except (RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from error


def functions_in(path: Path) -> list[FunctionModel]:
    """The models of a file, in its order; empty for one with a class TritonPythonModel. Raises InvalidRequest and
    OSError.
    """
    source = read_source(path)
    if source is None:
        raise InvalidRequest(f"{path.name} has more than {SOURCE_BYTES} bytes; is it a Python file?")
    try:
        tree = parse_source(source)
    except SyntaxError as error:
        raise InvalidRequest(f"{path.name}, line {error.lineno}: {error.msg}") from error
    except ValueError as error:
        raise InvalidRequest(f"{path.name} is not Python: {error}") from error
    finder = _Finder(path.name, tree)
    modules = tuple(sorted(_modules(tree, path.parent)))
    models = [model._replace(modules=modules) for model in finder.models()]
    has_class = CLASS in source.decode("utf-8", "replace")
    if models and any(isinstance(node, ast.ClassDef) and node.name == CLASS for node in tree.body):
        raise InvalidRequest(f"{path.name} has both a class {CLASS} and functions with @shmserve.model: keep one form")
    if not models and not has_class:
        text = f"{path.name} has no model: put @shmserve.model above a function or class, or define a class {CLASS}"
        raise InvalidRequest(text)
    return models


def _modules(tree: ast.Module, folder: Path) -> set[str]:
    """The files in the folder that the module imports, also indirectly. At most MODULES are read."""
    names: set[str] = set()
    trees = [tree]
    while trees and len(names) < MODULES:
        for file in sorted(_imported(trees.pop(), folder) - names):
            names.add(file)
            source = read_source(folder / file)
            with suppress(SyntaxError, ValueError):  # the import in the worker reports it
                trees.append(parse_source(source or b""))
    return names


def _imported(tree: ast.Module, folder: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level < 2:
            base = node.module or ""
            names |= {base, *(f"{base}.{alias.name}".strip(".") for alias in node.names)}
    names |= {str(parent) for name in names for parent in PurePosixPath(name.replace(".", "/")).parents}
    files = {f"{name.replace('.', '/')}{end}" for name in names if name.strip(".") for end in (".py", "/__init__.py")}
    return {file for file in files if (folder / file).is_file()}


class _Finder:
    def __init__(self, file: str, tree: ast.Module) -> None:
        self._file = file
        self._tree = tree
        self._modules: set[str] = set()
        """Names of the module shmserve in the file, and of its decorator."""
        self._names: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self._modules |= {name.asname or name.name for name in node.names if name.name == "shmserve"}
            elif isinstance(node, ast.ImportFrom) and node.module == "shmserve":
                self._names |= {name.asname or name.name for name in node.names if name.name == "model"}

    def models(self) -> Iterator[FunctionModel]:
        seen: dict[str, int] = {}
        for node in self._tree.body:
            if isinstance(node, _Definition) and (decorator := self._decorator(node)) is not None:
                options = self._options(decorator)
                name = options.name or node.name
                if not MODEL_NAME.fullmatch(name):
                    raise self._error(decorator, f"'{name}' cannot be the name of a model; expected {NAME_RULE}")
                if name in seen:
                    text = f"model '{name}' is defined twice, first on line {seen[name]}: name one, name=..."
                    raise self._error(decorator, text)
                seen[name] = decorator.lineno
                yield FunctionModel(name, _config(node.name, options))
        for inner in ast.walk(self._tree):
            if isinstance(inner, _Definition) and inner not in self._tree.body and self._decorator(inner) is not None:
                raise self._error(inner, f"'{inner.name}' must be defined at the top level of the file to be a model")

    def _decorator(self, node: Any) -> ast.expr | None:
        for decorator in node.decorator_list:
            target = decorator.func if isinstance(decorator, ast.Call) else decorator
            if isinstance(target, ast.Name) and target.id in self._names:
                return decorator  # type: ignore[no-any-return]
            if isinstance(target, ast.Attribute) and target.attr == "model":
                if isinstance(target.value, ast.Name) and target.value.id in self._modules:
                    return decorator  # type: ignore[no-any-return]
        return None

    def _options(self, decorator: ast.expr) -> ModelOptions:
        if not isinstance(decorator, ast.Call):
            return ModelOptions()
        known = ", ".join(ModelOptions._fields)
        if decorator.args:
            raise self._error(decorator, f"@shmserve.model takes keywords only: {known}")
        options = {}
        for keyword in decorator.keywords:
            if keyword.arg not in ModelOptions._fields:
                raise self._error(decorator, f"@shmserve.model has no option '{keyword.arg or '**'}'; it has {known}")
            try:
                options[keyword.arg] = ast.literal_eval(keyword.value)
            except ValueError:
                text = f"write {keyword.arg}=... as a literal: the server reads it without running the file"
                raise self._error(keyword.value, text) from None
        try:
            return ModelOptions(**options).checked()
        except (TypeError, ValueError) as error:
            raise self._error(decorator, str(error)) from None

    def _error(self, node: Any, text: str) -> InvalidRequest:
        return InvalidRequest(f"{self._file}, line {node.lineno}: {text}")


def _config(function: str, options: ModelOptions) -> str:
    parameters = {FUNCTION.name: function, STRICT_OUTPUTS.name: "true"}
    lines = ['backend: "python"']
    if options.batch:
        parameters[STACKED.name] = "true"
        lines += [f"max_batch_size: {options.max_batch_size}", "dynamic_batching { }"]
    if options.instances > 1:
        lines.append(f"instance_group [ {{ count: {options.instances} }} ]")
    text = "parameters {{ key: {} value: {{ string_value: {} }} }}"
    lines += [text.format(json.dumps(key), json.dumps(value)) for key, value in parameters.items()]
    return "\n".join(lines) + "\n"

"""Loads a configuration from the text of a config.pbtxt: parse, complete, validate. All problems are reported.

Invariant: only `parse` and `ExaminedConfig.require` raise, and only ConfigError, whatever the text. Only protobuf's
text_format decides what a text means. The outline and the lint serve error messages: text_format stops at the first
error, and they report all.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from google.protobuf import text_format
from google.protobuf.message import Message

from shmserve.repo.backends import has_library
from shmserve.repo.config import protos
from shmserve.repo.config.complete import complete
from shmserve.repo.config.lint import lint
from shmserve.repo.config.outline import OutlineError, escaped, outline
from shmserve.repo.config.problems import ConfigError, Place, Problem, Report, decode_text
from shmserve.repo.config.schema import ModelConfig
from shmserve.repo.config.support import NOT_SUPPORTED, TABLE, Status
from shmserve.repo.files.companions import check_files
from shmserve.repo.parameters import misspelt
from shmserve.repo.rules.fields import HostFacts, validate

CONFIG_FILE = "config.pbtxt"


class ModelContext(NamedTuple):
    """What a configuration is checked against: the model's directory, and the backends and GPUs of the server.

    `name` is the name of the model's directory, `files` are the names in its first version directory. `folder` is the
    path of the directory: files that the configuration refers to must be there. None: they are not checked.
    `prepared`: the repository agents of the model, if it has any, have run; before, files may be missing.
    """

    name: str
    backends: Collection[str]
    files: Collection[str] = ()
    gpus: Collection[int] = ()
    folder: Path | None = None
    prepared: bool = False


class ExaminedConfig(NamedTuple):
    """The result of `examine`. `places`: field -> its position in the text.

    `written` is the configuration as written, None if it cannot be parsed. `completed` has all defaults filled in, and
    is None if that failed; it may still be invalid. Use `config`, which is None if there are problems.
    """

    written: ModelConfig | None
    completed: ModelConfig | None
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    places: dict[str, Place]

    @property
    def config(self) -> ModelConfig | None:
        return None if self.problems else self.completed

    def require(self) -> ModelConfig:
        """The valid configuration. Raises ConfigError with all problems."""
        if self.config is None:
            raise ConfigError(self.problems)
        return self.config


def parse(data: str | bytes, file: str = CONFIG_FILE) -> ModelConfig:
    """Parses the text without filling in defaults. Only the syntax and the schema are checked."""
    report = Report(file)
    message = _message(data, report)
    config = _config(message, report)
    report.raise_problems()
    assert config is not None
    return config


def examine(written: str | bytes | Message, file: str, context: ModelContext) -> ExaminedConfig:
    """Loads a configuration, from text or an already parsed message, and returns problems instead of raising them."""
    report = Report(file)
    message = written if isinstance(written, Message) else _message(written, report)
    config = _config(message, report)
    completed = _checked(message, config, context, report) if message is not None and config is not None else None
    return ExaminedConfig(config, completed, report.problems, tuple(report.warnings), report.places)


def _checked(message: Message, written: ModelConfig, context: ModelContext, report: Report) -> ModelConfig:
    """Completes the configuration and checks it. Problems are added to the report."""
    config = complete(written, context.name, context.files, context.backends, context.gpus)
    _unsupported(message, "", config.backend, report)
    if written.name and written.name != context.name:
        text = f'unexpected directory name "{context.name}" for model "{escaped(written.name)}": the two must be equal'
        report.problem("name", text)
    for path, earlier in report.repeated.items():
        if path.startswith("ensemble_scheduling."):
            report.problem(path, f"mapped twice, first on line {earlier}")
        else:
            report.warn(path, f"given twice, first on line {earlier}; the last one is used")
    for path, text in misspelt(config):
        report.warn(path, text)
    backends = context.backends
    if context.folder is not None and config.backend not in backends and has_library(config, context.folder):
        backends = {*backends, config.backend}
    validate(config, HostFacts(backends, context.gpus), report.problem)
    if context.folder is not None and (context.prepared or not written.model_repository_agents):
        check_files(config, context.folder, report.problem)
    return config


def _message(data: str | bytes, report: Report) -> Message | None:
    """Parses the text. None: it cannot be parsed, and the problems are in the report."""
    text = decode_text(data, report)
    if text is None:
        return None
    syntax: OutlineError | None = None
    try:
        lint(outline(text), report)
    except OutlineError as error:
        syntax = error
    if report.problems or (syntax is not None and syntax.final):
        _syntax_problem(syntax, report)
        return None
    message = protos.new_config()
    try:
        text_format.Parse(text, message, descriptor_pool=protos.POOL)
    except text_format.ParseError as error:
        if syntax is not None:
            _syntax_problem(syntax, report)
        else:
            place = (error.GetLine() or 0, error.GetColumn() or 0)
            report.problem("", escaped(str(error).split(" : ")[-1], 300), place)
        return None
    except (ValueError, OverflowError) as error:
        report.problem("", f"cannot be read: {escaped(str(error), 300)}", (0, 0))
        return None
    return message


def _syntax_problem(error: OutlineError | None, report: Report) -> None:
    if error is not None:
        report.problem(protos.path_of(error.trail), error.text, (error.token.line, error.token.column))


def _config(message: Message | None, report: Report) -> ModelConfig | None:
    """Returns the configuration; None if there is no message, or a problem is in the report."""
    if message is None or report.problems:
        return None
    try:
        return protos.to_config(message)
    except msgspec.ValidationError as error:
        report.problem("", escaped(str(error), 300), (0, 0))
        return None


def _unsupported(message: Message, path: str, backend: str, report: Report) -> None:
    """Reports fields of the message that are refused or have no effect, recursively, but not inside such a field."""
    owner = protos.local_name(message.DESCRIPTOR)
    written: list[tuple[protos.Field, Any]] = list(message.ListFields())
    for field, value in written:
        inner = f"{path}.{field.name}" if path else field.name
        support = TABLE[f"{owner}.{field.name}"]
        if backend in support.only:
            continue
        if support.status is Status.REFUSED:
            report.problem(inner, f"{NOT_SUPPORTED}{support.note}")
        elif support.status is Status.NO_EFFECT:
            report.warn(inner, f"has no effect: {support.note}")
        elif protos.is_map(field):
            if field.message_type.fields_by_name["value"].message_type is not None:
                for key in value:
                    name = f'"{key}"' if isinstance(key, str) else key
                    _unsupported(value[key], f"{inner}[{name}]", backend, report)
        elif field.message_type is not None:
            for index, item in enumerate(value) if protos.is_repeated(field) else ((None, value),):
                _unsupported(item, inner if index is None else f"{inner}[{index}]", backend, report)

"""From the text of a config.pbtxt to a configuration: parsed, completed, checked, with every problem in one error.

The rule of the file: nothing but ConfigError comes out, whatever the text is. protobuf's text_format decides what a
text means; the outline and the lint only say better, and all at once, what is wrong with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from google.protobuf import text_format
from google.protobuf.message import Message

from shmserve.repo.config import protos
from shmserve.repo.config.complete import complete
from shmserve.repo.config.lint import lint
from shmserve.repo.config.outline import OutlineError, outline, shown
from shmserve.repo.config.problems import ConfigError, Place, Problem, Report, decode_text
from shmserve.repo.config.schema import ModelConfig
from shmserve.repo.config.support import NOT_SUPPORTED, TABLE, Status
from shmserve.repo.files.companions import look_for_files
from shmserve.repo.rules.fields import Host, validate

CONFIG_FILE = "config.pbtxt"


class Setting(NamedTuple):
    """Where a configuration stands, and what the server has.

    `name` is the model's directory, `files` are the names in its first version directory. Files that the configuration
    names are looked for in `folder`, if that is given.
    """

    name: str
    backends: Collection[str]
    files: Collection[str] = ()
    gpus: Collection[int] = ()
    folder: Path | None = None


class Examined(NamedTuple):
    """What is known of a configuration, `places` being where its fields stand.

    `given` is what the text says, None if it cannot be read, and `completed` has every default filled in. `config` is
    that too, but None with problems.
    """

    given: ModelConfig | None
    completed: ModelConfig | None
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    places: dict[str, Place]

    @property
    def config(self) -> ModelConfig | None:
        return None if self.problems else self.completed


class Loaded(NamedTuple):
    """A configuration that can be served, and what was accepted in it without effect."""

    config: ModelConfig
    warnings: tuple[str, ...]


def parse(data: str | bytes, file: str = CONFIG_FILE) -> ModelConfig:
    """What the text says, with no default filled in and no rule checked but those of the schema."""
    report = Report(file)
    message = _message(data, report)
    report.raise_problems()
    assert message is not None
    return _config(message, report)


def load(
    data: str | bytes,
    *,
    name: str,
    backends: Collection[str],
    files: Collection[str] = (),
    gpus: Collection[int] = (),
    file: str = CONFIG_FILE,
) -> Loaded:
    """The completed configuration of the model in directory `name`.

    `files` are the names in its first version directory, `backends` and `gpus` what the server has.
    """
    found = examine(data, file, Setting(name, backends, files, gpus))
    if found.config is None:
        raise ConfigError(found.problems)
    return Loaded(found.config, tuple(str(warning) for warning in found.warnings))


def examine(given: str | bytes | Message, file: str, setting: Setting) -> Examined:
    """Everything that is to be known of a configuration: text, or a message that was read before."""
    report = Report(file)
    message = given if isinstance(given, Message) else _message(given, report)
    said = completed = None
    if message is not None and not report.problems:
        with contextlib.suppress(ConfigError):
            # What it raises is in the report.
            said = _config(message, report)
            completed = _checked(message, said, setting, report)
    return Examined(said, completed, report.problems, tuple(report.warnings), report.places)


def _checked(message: Message, given: ModelConfig, setting: Setting, report: Report) -> ModelConfig:
    """The completed configuration; all that is wrong with it is in the report."""
    config = complete(given, setting.name, setting.files, setting.backends, setting.gpus)
    _unsupported(message, "", config.backend, report)
    if given.name and given.name != setting.name:
        text = f'unexpected directory name "{setting.name}" for model "{shown(given.name)}": the two must be equal'
        report.problem("name", text)
    for path, earlier in report.repeated.items():
        if path.startswith("ensemble_scheduling."):
            report.problem(path, f"mapped twice, first in line {earlier}")
        else:
            report.warn(path, f"given twice, first in line {earlier}; the last one counts")
    validate(config, Host(setting.backends, setting.gpus), report.problem)
    if setting.folder is not None:
        look_for_files(config, setting.folder, report.problem)
    return config


def _message(data: str | bytes, report: Report) -> Message | None:
    """The parsed message, or None and problems in the report."""
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
            report.problem("", shown(str(error).split(" : ")[-1], 300), place)
        return None
    except (ValueError, OverflowError) as error:
        report.problem("", f"cannot be read: {shown(str(error), 300)}", (0, 0))
        return None
    return message


def _syntax_problem(error: OutlineError | None, report: Report) -> None:
    if error is not None:
        report.problem(protos.path_of(error.trail), error.text, (error.token.line, error.token.column))


def _config(message: Message, report: Report) -> ModelConfig:
    try:
        return protos.to_config(message)
    except msgspec.ValidationError as error:
        report.problem("", shown(str(error), 300), (0, 0))
        raise ConfigError(report.problems) from error


def _unsupported(message: Message, path: str, backend: str, report: Report) -> None:
    """Reports each field that was given and is refused, or has no effect. Below those, nothing is said."""
    owner = protos.local_name(message.DESCRIPTOR)
    given: list[tuple[protos.Field, Any]] = list(message.ListFields())
    for field, value in given:
        inner = f"{path}.{field.name}" if path else field.name
        support = TABLE[f"{owner}.{field.name}"]
        if support.only and support.only == backend:
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

"""From the text of a config.pbtxt to a configuration: parsed, completed, checked, with every problem in one error.

The rule of the file: nothing but ConfigError comes out, whatever the text is. protobuf's text_format decides what a
text means; the outline and the lint only say better, and all at once, what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec
from google.protobuf import text_format
from google.protobuf.message import Message

from shmserve.repo import protos
from shmserve.repo.complete import complete
from shmserve.repo.lint import lint
from shmserve.repo.outline import OutlineError, outline, shown
from shmserve.repo.problems import ConfigError, Report
from shmserve.repo.schema import ModelConfig
from shmserve.repo.support import TABLE, Status
from shmserve.repo.validate import Host, validate

CONFIG_FILE = "config.pbtxt"
CONFIG_BYTES = 1024 * 1024
"""The largest config.pbtxt."""


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
    report = Report(file)
    message = _message(data, report)
    report.raise_problems()
    assert message is not None
    _unsupported(message, "", report)
    given = _config(message, report)
    if given.name and given.name != name:
        report.problem(
            "name", f'unexpected directory name "{name}" for model "{shown(given.name)}": the two must be equal'
        )
    config = complete(given, name, files, backends, gpus)
    validate(config, Host(backends, gpus), report.problem)
    report.raise_problems()
    return Loaded(config, tuple(str(warning) for warning in report.warnings))


def verify(config: ModelConfig, *, backends: Collection[str], gpus: Collection[int] = ()) -> ModelConfig:
    """A configuration that a model has filled in, with the defaults of that; ConfigError with all its problems."""
    config = complete(config, config.name, (), backends, gpus)
    report = Report(f"{config.name}, as completed by the model")
    validate(config, Host(backends, gpus), report.problem)
    report.raise_problems()
    return config


def _message(data: str | bytes, report: Report) -> Message | None:
    """The parsed message, or None and problems in the report."""
    text = _decode(data, report)
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
        report.problem("", error.text, (error.token.line, error.token.column))


def _decode(data: str | bytes, report: Report) -> str | None:
    if len(data) > CONFIG_BYTES:
        report.problem("", f"{len(data)} bytes, expected at most {CONFIG_BYTES}")
        return None
    try:
        if isinstance(data, str):
            data.encode()
            return data
        return data.decode("utf-8-sig")
    except UnicodeError as error:
        position = error.start if isinstance(error, (UnicodeDecodeError, UnicodeEncodeError)) else 0
        before = data[:position]
        line = 1 + (before.count("\n") if isinstance(before, str) else before.count(b"\n"))
        report.problem("", "not UTF-8 text", (line, 1))
        return None


def _config(message: Message, report: Report) -> ModelConfig:
    try:
        return protos.to_config(message)
    except msgspec.ValidationError as error:
        report.problem("", shown(str(error), 300), (0, 0))
        raise ConfigError(report.problems) from error


def _unsupported(message: Message, path: str, report: Report) -> None:
    """Reports each field that was given and is refused, or has no effect. Below those, nothing is said."""
    owner = protos.local_name(message.DESCRIPTOR)
    given: list[tuple[protos.Field, Any]] = list(message.ListFields())
    for field, value in given:
        inner = f"{path}.{field.name}" if path else field.name
        support = TABLE[f"{owner}.{field.name}"]
        if support.status is Status.REFUSED:
            report.problem(inner, f"not supported: {support.note}")
        elif support.status is Status.NO_EFFECT:
            report.warn(inner, f"has no effect: {support.note}")
        elif protos.is_map(field):
            if field.message_type.fields_by_name["value"].message_type is not None:
                for key in value:
                    _unsupported(value[key], f'{inner}["{key}"]', report)
        elif field.message_type is not None:
            for index, item in enumerate(value) if protos.is_repeated(field) else ((None, value),):
                _unsupported(item, inner if index is None else f"{inner}[{index}]", report)

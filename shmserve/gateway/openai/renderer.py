"""The process that renders chat templates. It writes READY to its standard output, then reads requests from its
standard input, one after another, and writes a prompt or an error for each.

Templates run in jinja's sandbox, compiled as Hugging Face does. A template that loops or takes much memory costs only
this process, which the gateway ends after a time limit (`templates`).
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO

import msgspec

from shmserve.errors import InvalidRequest, ServeError, Unsupported
from shmserve.extras import install_command
from shmserve.system.process import PDEATHSIG, prctl

TEXT_CHARACTERS = 8 << 20
MEMORY_BYTES = 1 << 30
"""Address space of this process."""
READY = b"+"
SIZE_BYTES = 4
"""Length of the number before each request and each reply: its size in bytes."""


class TemplateError(Exception):
    """Raised by a template that refuses the messages."""


class RenderRequest(msgspec.Struct, array_like=True):
    """`values`: the variables of the template, as JSON."""

    template: str
    values: bytes


class RenderReply(msgspec.Struct, array_like=True):
    """The prompt; or, with a `code`, the text of an error."""

    text: str
    code: str = ""


def main() -> None:
    prctl(PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway still answers requests in flight
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with suppress(Unsupported):  # each request gets this error
        _environment()
    _serve(sys.stdin.buffer, sys.stdout.buffer)


def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    replies.write(READY)
    replies.flush()
    decode, encode = msgspec.msgpack.Decoder(RenderRequest).decode, msgspec.msgpack.Encoder().encode
    while size := requests.read(SIZE_BYTES):
        request = decode(requests.read(int.from_bytes(size, "big")))
        try:
            reply = RenderReply(render(request.template, msgspec.json.decode(request.values)))
        except ServeError as error:
            reply = RenderReply(str(error), error.code)
        data = encode(reply)
        replies.write(len(data).to_bytes(SIZE_BYTES, "big") + data)
        replies.flush()


def render(template: str, values: dict[str, Any]) -> str:
    """Raises the errors that the client receives."""
    compiled = _compiled(template)
    pieces, characters = [], 0
    try:
        for piece in compiled.generate(_with_objects(values)):
            characters += len(piece)
            if characters > TEXT_CHARACTERS:
                raise TemplateError(f"its text has more than {TEXT_CHARACTERS} characters")
            pieces.append(piece)
    except Exception as error:  # raised by the template: it may be any
        text = str(error) or type(error).__name__
        raise InvalidRequest(f"the chat template of the model refuses the messages: {text}"[:1000]) from None
    return "".join(pieces)


@lru_cache
def _compiled(template: str) -> Any:
    environment = _environment()
    try:
        return environment.from_string(template)
    except Exception as error:  # raised by the template: it may be any
        raise Unsupported(f"the chat template of the model is invalid: {error}"[:1000]) from None


@lru_cache
def _environment() -> Any:
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise Unsupported(
            f"the chat template of the model needs the package jinja2: {install_command('server')}"
        ) from None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """Replaces jinja's own filter, which escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _refuse(text: str) -> None:
    raise TemplateError(text)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _with_objects(values: dict[str, Any]) -> dict[str, Any]:
    """The variables with the arguments of tool calls as objects, as templates expect."""
    for message in values.get("messages", ()):
        calls = message.get("tool_calls")
        for call in calls if type(calls) is list else ():
            function = call.get("function") if type(call) is dict else None
            if type(function) is dict and type(function.get("arguments")) is str:
                function["arguments"] = _decoded(function["arguments"])
    return values


def _decoded(text: str) -> Any:
    """The value, if the text is valid JSON."""
    try:
        return msgspec.json.decode(text.encode(errors="replace"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return text


if __name__ == "__main__":
    main()

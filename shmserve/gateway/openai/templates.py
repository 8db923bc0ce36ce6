"""Renders the chat template of a model that has one in its configuration but no input for messages.

Templates run in jinja's sandbox, in slices on the event loop (limits/turns.py). They are compiled to coroutines, which
can be suspended at each iteration of a loop, call of a macro and item of a filter. All renderings of one model for one
address share a turn. Invariant: the size of the messages, the size of the rendered text, the time for one template and,
per client, the size of waiting messages are bounded. A single operation is not interrupted; the size of the messages
bounds it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterable
from contextlib import aclosing, suppress
from datetime import datetime
from inspect import isawaitable
from typing import Any

import msgspec

from shmserve.errors import InvalidRequest, Unavailable, Unsupported
from shmserve.extras import install_command
from shmserve.gateway.kserve.json_scan import commas_of
from shmserve.gateway.limits.body_budget import Budget
from shmserve.gateway.limits.bounded_cache import BoundedCache
from shmserve.gateway.limits.caller_shares import ShareExceeded
from shmserve.gateway.limits.turns import SLICE_BYTES, SlicedWork
from shmserve.gateway.openai.bodies import VALUES
from shmserve.gateway.openai.errors import BadParameter

INPUT_BYTES = 4 << 20
TEXT_CHARACTERS = 8 << 20
SECONDS = 5.0
"""Maximum time for all slices of one template."""
SLICE_SECONDS = 0.002
WAITING_BYTES = 32 << 20
"""Maximum size of the messages, in JSON, of all templates being rendered. Each connection and each address has a share
of it."""
_CACHED_TEMPLATES = 64
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Model parameters that a template may use."""
_LAZY_FILTERS = ("map", "reject", "rejectattr", "select", "selectattr")
"""Filters that become asynchronous generators in coroutines. Other filters and operators cannot use these."""


class TemplateError(Exception):
    """Raised by a template that refuses the messages."""


class _Cancelled(BaseException):
    """Ends a template whose client has disconnected."""


class ChatTemplates:
    """Renders templates within the limits of clients."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._renderer = TemplateRenderer()

    def render(self, address: str, template: str, values: dict[str, Any], size: int) -> SlicedWork[str]:
        """Raises the errors that the client receives. `address`: the client's. `size`: size of the messages in JSON."""
        if size > INPUT_BYTES:
            raise BadParameter(
                "messages", f"the messages have {size} bytes of JSON; the limit for a chat template is {INPUT_BYTES}"
            )
        budget = self._budget
        account = budget.account(address)  # one account per request: a connection has one request at a time
        try:
            account.take(size)
        except Unavailable:
            raise ShareExceeded(
                f"{budget.held} bytes of messages wait for their chat templates; {size} more would exceed the share of "
                f"this client (--connection-share, --address-share) of {budget.limit}; retry later"
            ) from None
        try:
            return (yield from self._renderer.render(template, (yield from with_objects(values))))
        finally:
            account.used()


class TemplateRenderer:
    """Compiles templates, as Hugging Face does, and renders them."""

    def __init__(self) -> None:
        self._slice = _Slice()
        self._environment: Any = None
        self._compiled: BoundedCache[str, Any] = BoundedCache(_CACHED_TEMPLATES)

    def render(self, template: str, values: dict[str, Any]) -> SlicedWork[str]:
        """Raises the errors that the client receives."""
        seconds, text = 0.0, _text(self._compile(template), values)
        try:
            while True:
                began = self._slice.begin()
                text.send(None)
                seconds += time.monotonic() - began
                if seconds > SECONDS:
                    text.throw(TemplateError(f"it takes more than {SECONDS:g} seconds"))
                yield
        except StopIteration as end:
            found: str = end.value
            return found
        except GeneratorExit:
            with suppress(_Cancelled):  # `close` would leave the generators of the template suspended
                text.throw(_Cancelled)
            raise
        except Exception as error:  # raised by the template: it may be any
            raise InvalidRequest(f"the chat template of the model refuses the messages: {error}"[:1000]) from None

    def _compile(self, template: str) -> Any:
        compiled = self._compiled.get(template)
        if compiled is None:
            if self._environment is None:
                self._environment = _environment(self._slice)
            try:
                compiled = _compiled(self._environment, template)
            except Exception as error:  # raised by the template: it may be any
                raise Unsupported(f"the chat template of the model is invalid: {error}"[:1000]) from None
            self._compiled.put(template, compiled)
        return compiled


# ------------------------------------------------------------------------------------ slices


class _Slice:
    """The current slice. Only one template runs at a time."""

    def __init__(self) -> None:
        self._until = 0.0

    def begin(self) -> float:
        """Returns the current time."""
        now = time.monotonic()
        self._until = now + SLICE_SECONDS
        return now

    def pause(self) -> _Pause | None:
        """The awaitable for a template to await. None: its slice is not over."""
        return None if time.monotonic() < self._until else _Pause()


class _Pause:
    """Suspends the coroutine that awaits it."""

    def __await__(self) -> Generator[None, None, None]:
        yield


async def _text(compiled: Any, values: dict[str, Any]) -> str:
    pieces, characters = [], 0
    async with aclosing(compiled.generate_async(values)) as made:
        async for piece in made:
            characters += len(piece)
            if characters > TEXT_CHARACTERS:
                raise TemplateError(f"it makes more than {TEXT_CHARACTERS} characters")
            pieces.append(piece)
    return "".join(pieces)


def _compiled(environment: Any, template: str) -> Any:
    """The compiled template. It awaits `pause` at the start of each loop iteration and macro call, and for each item
    that a loop's condition may leave out."""
    from jinja2 import Template, nodes

    tree = environment.parse(template)
    for node in list(tree.find_all((nodes.For, nodes.Macro))):
        call = nodes.Call(nodes.EnvironmentAttribute("pause"), [], [], None, None)
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(nodes.Not(call), node.test, lineno=node.lineno)  # awaiting it returns None
        else:
            node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
    return Template.from_code(environment, environment.compile(tree), environment.make_globals(None))


def _environment(current: _Slice) -> Any:
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # not at the top: few gateways render templates
    except ImportError:
        raise Unsupported(
            f"the chat template of the model needs the package jinja2: {install_command('server')}"
        ) from None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], enable_async=True
    )
    environment.pause = current.pause
    environment.filters |= {name: _iterator(environment.filters[name], current) for name in _LAZY_FILTERS}
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
    return environment


def _iterator(lazy: Any, current: _Slice) -> Any:
    """The filter, with an iterator as its result."""
    from jinja2 import pass_context

    async def filtered(context: Any, value: Any, *arguments: Any, **keywords: Any) -> Any:
        items = lazy(context, _Items(value, current) if value else value, *arguments, **keywords)
        if isawaitable(items):
            items = await items
        return iter([item async for item in items])

    return pass_context(filtered)


class _Items:
    """Iterates over the input of a filter, and may pause at each item."""

    def __init__(self, items: Iterable[Any], current: _Slice) -> None:
        self._items = iter(items)
        self._slice = current

    def __aiter__(self) -> _Items:
        return self

    async def __anext__(self) -> Any:
        for item in self._items:
            if (pause := self._slice.pause()) is not None:
                await pause
            return item
        raise StopAsyncIteration


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """Replaces jinja's own filter, which escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _refuse(text: str) -> None:
    raise TemplateError(text)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def template_values(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, arguments: dict[str, Any],
    parameters: dict[str, str],
) -> dict[str, Any]:  # fmt: skip
    """The variables of a template. `arguments`: those that the client sets. `parameters`: those of the model's
    configuration. The parts of a message are joined to one text, as templates expect."""
    special = {name: parameters[name] for name in _SPECIAL if name in parameters}
    return {
        **special,
        "add_generation_prompt": True,
        **arguments,
        "messages": [_message(number, message) for number, message in enumerate(messages)],
        "tools": tools,
    }


def _message(number: int, message: dict[str, Any]) -> dict[str, Any]:
    if type(message.get("content")) is not list:
        return message
    return {**message, "content": "\n".join([_part(number, part) for part in message["content"]])}


def _part(number: int, part: Any) -> str:
    if type(part) is dict and part.get("type") == "text" and type(part.get("text")) is str:
        text: str = part["text"]
        return text
    raise BadParameter(f"messages[{number}].content", f"'messages[{number}].content' has a part that is not a text")


def with_objects(values: dict[str, Any]) -> SlicedWork[dict[str, Any]]:
    """The variables with the arguments of tool calls as objects, as templates expect. Invariant: the values in them are
    counted before they are decoded, as they are in the JSON of a request."""
    messages, count = [], 0
    for message in values.get("messages", ()):
        calls = message.get("tool_calls")
        if type(calls) is list:
            changed = []
            for call in calls:
                text = _arguments_of(call)
                if text is not None:
                    count += 1 + (text.count(b",") if len(text) <= SLICE_BYTES else (yield from commas_of(text)))
                    if count > VALUES:
                        raise BadParameter(
                            "messages", f"the arguments of tool calls have {count} values; the limit is {VALUES}"
                        )
                    call = _with_object(call, text)
                changed.append(call)
            message = {**message, "tool_calls": changed}
        messages.append(message)
    return {**values, "messages": messages}


def _arguments_of(call: Any) -> bytes | None:
    function = call.get("function") if type(call) is dict else None
    if type(function) is not dict or type(function.get("arguments")) is not str:
        return None
    text: str = function["arguments"]
    return text.encode(errors="replace")


def _with_object(call: dict[str, Any], text: bytes) -> dict[str, Any]:
    """The call with its arguments decoded, if they are valid JSON."""
    try:
        return {**call, "function": {**call["function"], "arguments": msgspec.json.decode(text)}}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return call

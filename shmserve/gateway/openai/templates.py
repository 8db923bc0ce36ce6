"""Renders the chat template of a model that has one in its configuration, and no input for messages.

Templates run in jinja's sandbox, in a thread, so that they do not block the event loop. Invariant: the messages, the
text made of them, the time for one template and the messages that wait are bounded, the last for each client.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable
from datetime import datetime
from queue import SimpleQueue
from typing import Any

from msgspec import Struct

from shmserve.errors import InvalidRequest, ServeError, Unavailable, Unsupported
from shmserve.extras import install_command
from shmserve.gateway.limits.body_budget import Budget, BudgetAccount
from shmserve.gateway.limits.bounded_cache import BoundedCache
from shmserve.gateway.limits.caller_shares import ShareExceeded
from shmserve.gateway.openai.errors import BadParameter

INPUT_BYTES = 4 << 20
TEXT_CHARACTERS = 8 << 20
SECONDS = 5.0
WAITING_BYTES = 32 << 20
"""Of the messages in JSON, of all templates that are waiting or being rendered. A connection, and an address, has a
share of it."""
_CACHED_TEMPLATES = 64
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Parameters of a configuration that a template may use."""
log = logging.getLogger("shmserve.gateway")


class TemplateError(Exception):
    """Raised by a template that refuses the messages."""


class Rendering(Struct):
    """A template that waits or is rendered. `cancelled`: its client has disconnected, and neither `then` nor `failed`
    is called."""

    loop: asyncio.AbstractEventLoop
    template: str
    values: dict[str, Any]
    account: BudgetAccount
    then: Callable[[str], None]
    failed: Callable[[ServeError], None]
    cancelled: bool = False


class TemplateThread:
    """Renders one template at a time. The thread starts with the first one."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._waiting: SimpleQueue[Rendering | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._renderer = TemplateRenderer()

    def render(
        self, address: str, template: str, values: dict[str, Any], size: int, then: Callable[[str], None],
        failed: Callable[[ServeError], None],
    ) -> Rendering:  # fmt: skip
        """Calls `then` or `failed` in the event loop. `address`: of the client. `size`: bytes of the messages in
        JSON."""
        if size > INPUT_BYTES:
            raise BadParameter(
                "messages", f"the messages have {size} bytes of JSON; the limit for a chat template is {INPUT_BYTES}"
            )
        budget = self._budget
        account = budget.account(address)  # of its own: a connection has one request at a time
        try:
            account.take(size)
        except Unavailable:
            raise ShareExceeded(
                f"{budget.held} bytes of messages wait for their chat templates; {size} more would exceed the share of "
                f"this client (--connection-share, --address-share) of {budget.limit}; retry later"
            ) from None
        if self._thread is None:
            # A daemon: the gateway does not wait for a template that does not end.
            self._thread = threading.Thread(target=self._run, name="chat-templates", daemon=True)
            self._thread.start()
        made = Rendering(asyncio.get_running_loop(), template, values, account, then, failed)
        self._waiting.put(made)
        return made

    def close(self) -> None:
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (rendering := self._waiting.get()) is not None:
            try:
                text = "" if rendering.cancelled else self._renderer.render(rendering.template, rendering.values)
            except ServeError as error:
                self._call(rendering, rendering.failed, error.with_traceback(None))
            else:
                self._call(rendering, rendering.then, text)

    def _call(self, rendering: Rendering, function: Callable[[Any], None], value: Any) -> None:
        try:
            rendering.loop.call_soon_threadsafe(self._end, rendering, function, value)
        except RuntimeError:
            log.info("a chat template was rendered after the gateway had stopped")

    def _end(self, rendering: Rendering, function: Callable[[Any], None], value: Any) -> None:
        rendering.account.used()
        if not rendering.cancelled:
            function(value)


class TemplateRenderer:
    """Compiles templates, as Hugging Face does it, and renders them."""

    def __init__(self) -> None:
        self._environment: Any = None
        self._compiled: BoundedCache[str, Any] = BoundedCache(_CACHED_TEMPLATES)

    def render(self, template: str, values: dict[str, Any]) -> str:
        """Raises errors for the client."""
        compiled = self._compile(template)
        pieces, characters, until = [], 0, time.monotonic() + SECONDS
        try:
            for piece in compiled.generate(values):
                characters += len(piece)
                if characters > TEXT_CHARACTERS or time.monotonic() > until:
                    raise TemplateError(f"more than {TEXT_CHARACTERS} characters, or {SECONDS:g} seconds")
                pieces.append(piece)
        except Exception as error:  # of the template: any
            raise InvalidRequest(f"the chat template of the model refuses the messages: {error}"[:1000]) from None
        return "".join(pieces)

    def _compile(self, template: str) -> Any:
        compiled = self._compiled.get(template)
        if compiled is None:
            if self._environment is None:
                self._environment = _environment()
            try:
                compiled = self._environment.from_string(template)
            except Exception as error:  # of the template: any
                raise Unsupported(f"the chat template of the model is invalid: {error}"[:1000]) from None
            self._compiled.put(template, compiled)
        return compiled


def _environment() -> Any:
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # not at the top: few gateways render templates
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
    """Not jinja's own filter, which escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _refuse(text: str) -> None:
    raise TemplateError(text)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def template_values(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, arguments: dict[str, Any],
    parameters: dict[str, str],
) -> dict[str, Any]:  # fmt: skip
    """The variables of a template. `arguments`: those that the client sets. `parameters`: of the configuration."""
    special = {name: parameters[name] for name in _SPECIAL if name in parameters}
    return {
        **special,
        "add_generation_prompt": True,
        **arguments,
        "messages": [_message(number, message) for number, message in enumerate(messages)],
        "tools": tools,
    }


def _message(number: int, message: dict[str, Any]) -> dict[str, Any]:
    """With its parts as one text, and with the arguments of tool calls as objects: templates expect both."""
    changed = dict(message)
    if type(message.get("content")) is list:
        changed["content"] = "\n".join([_part(number, part) for part in message["content"]])
    calls = message.get("tool_calls")
    if type(calls) is list:
        changed["tool_calls"] = [_call_with_object(call) for call in calls]
    return changed


def _part(number: int, part: Any) -> str:
    if type(part) is dict and part.get("type") == "text" and type(part.get("text")) is str:
        text: str = part["text"]
        return text
    raise BadParameter(f"messages[{number}].content", f"'messages[{number}].content' has a part that is not a text")


def _call_with_object(call: Any) -> Any:
    function = call.get("function") if type(call) is dict else None
    if type(function) is not dict or type(function.get("arguments")) is not str:
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (ValueError, RecursionError):
        return call

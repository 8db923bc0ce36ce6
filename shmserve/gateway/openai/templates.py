"""Renders the chat template of a model that has one in its configuration but no input for messages.

Templates never run in the gateway: each is rendered by a process of its own (`renderer`), one at a time. A caller has
one of them, and its other chats wait for it; callers take turns. Invariant: a template that loops delays only the chats
of its own caller. It is stopped after SECONDS, or after FAIR_SECONDS if other callers wait and no process is left.
"""

from __future__ import annotations

import asyncio
from asyncio import subprocess
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from shmserve.errors import InvalidRequest, ServeError, Unavailable, from_wire
from shmserve.gateway.limits.body_budget import Budget, BudgetAccount
from shmserve.gateway.limits.caller_shares import ShareExceeded
from shmserve.gateway.openai.errors import BadParameter
from shmserve.gateway.openai.images import PART
from shmserve.gateway.openai.renderer import READY, SIZE_BYTES, RenderReply, RenderRequest
from shmserve.gateway.upstream.exchange import Exchange
from shmserve.gateway.upstream.requests import serve_error
from shmserve.paths import python

INPUT_BYTES = 4 << 20
SECONDS = 5.0
"""Maximum time for one template."""
FAIR_SECONDS = 1.0
PROCESSES = 8
KEPT_PROCESSES = 2
"""Number of idle processes that are kept for the next chats: one takes 0.1 s to start."""
WAITING_BYTES = 32 << 20
"""Maximum size of the messages, in JSON, of all templates being rendered. Each connection and each address has a share
of it."""
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Model parameters that a template may use."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RenderReply).decode


class _Renderer:
    """A process that renders templates."""

    def __init__(self, process: subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._requests = process.stdin
        self._replies = process.stdout

    @classmethod
    async def start(cls) -> _Renderer:
        command = [*python(), "-m", "shmserve.gateway.openai.renderer"]
        process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        renderer = cls(process)
        await renderer._replies.readexactly(len(READY))
        return renderer

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def render(self, request: bytes) -> RenderReply:
        """Raises EOFError or ConnectionError if the process has ended."""
        self._requests.write(len(request).to_bytes(SIZE_BYTES, "big") + request)
        await self._requests.drain()
        size = await self._replies.readexactly(SIZE_BYTES)
        return _decode(await self._replies.readexactly(int.from_bytes(size, "big")))

    def kill(self) -> None:
        if self.is_alive:
            self._process.kill()

    async def end(self) -> None:
        self.kill()
        await self._process.wait()


class _Rendering:
    """A chat whose prompt is rendered. The exchange gets errors, and `then` the prompt, unless its client has
    disconnected."""

    def __init__(
        self, exchange: Exchange, caller: object, request: bytes, account: BudgetAccount, then: Callable[[str], None]
    ) -> None:
        self.caller = caller
        self.began = 0.0
        """When the renderer got the template; 0: it is still being started."""
        self._exchange: Exchange | None = exchange
        self._request = request
        self._account = account
        self._then = then
        self._renderer: _Renderer | None = None
        self._why = "its process has ended, as it does if it needs too much memory"

    def disconnected(self) -> None:
        """The template is not stopped: to start another process would cost more than most templates."""
        self._exchange = None

    def stop(self) -> None:
        """Called when the gateway stops. The time limit ends the template soon enough."""

    async def render(self, renderer: _Renderer) -> RenderReply:
        loop = asyncio.get_running_loop()
        self._renderer, self.began = renderer, loop.time()
        limit = loop.call_later(SECONDS, self.end, f"it takes more than {SECONDS:g} seconds")
        try:
            return await renderer.render(self._request)
        except (EOFError, ConnectionError):
            raise InvalidRequest(f"the chat template of the model refuses the messages: {self._why}") from None
        finally:
            limit.cancel()
            self._renderer, self.began = None, 0.0

    def end(self, why: str) -> bool:
        """False if it is not being rendered: its process is starting or ending."""
        if self._renderer is None:
            return False
        self._why = why
        self._renderer.kill()
        return True

    @property
    def is_wanted(self) -> bool:
        return self._exchange is not None

    def settle(self, reply: RenderReply) -> None:
        if reply.code:
            raise from_wire(reply.code, reply.text)
        self.release()
        if self._exchange is not None:
            self._then(reply.text)

    def fail(self, error: ServeError) -> None:
        if self._exchange is not None:
            self._exchange.fail(error)

    def release(self) -> None:
        self._account.used()


class ChatTemplates:
    """Renders templates within the limits of callers."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._waiting: dict[object, deque[_Rendering]] = {}
        """By caller, in the order of their turns."""
        self._running: dict[object, _Rendering] = {}
        """By caller, oldest first."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: list[_Renderer] = []
        self._eviction: asyncio.TimerHandle | None = None

    def render(self, exchange: Exchange, template: str, values: bytes, then: Callable[[str], None]) -> None:
        """Raises the errors that the client receives. `values`: the variables as JSON."""
        size, budget = len(values), self._budget
        if size > INPUT_BYTES:
            raise BadParameter(
                "messages", f"the messages have {size} bytes of JSON; the limit for a chat template is {INPUT_BYTES}"
            )
        account = budget.account(exchange.address)  # one account per request: a connection has one request at a time
        try:
            account.take(size)
        except Unavailable:
            raise ShareExceeded(
                f"{budget.held} bytes of messages wait for their chat templates; {size} more would exceed the share of "
                f"this client (--limit caller_share) of {budget.limit}; retry later"
            ) from None
        caller = exchange.payer().caller
        rendering = _Rendering(exchange, caller, _encode(RenderRequest(template, values)), account, then)
        exchange.watch(rendering)
        self._waiting.setdefault(caller, deque()).append(rendering)
        self._start()

    def _start(self) -> None:
        for caller in [caller for caller in self._waiting if caller not in self._running]:
            if len(self._running) >= PROCESSES:
                self._make_room()
                return
            queue = self._waiting.pop(caller)
            rendering = self._running[caller] = queue.popleft()
            if queue:
                self._waiting[caller] = queue  # behind the others
            task = asyncio.get_running_loop().create_task(self._run(rendering))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, rendering: _Rendering) -> None:
        renderer: _Renderer | None = None
        try:
            if rendering.is_wanted:
                renderer = self._kept() or await _Renderer.start()
                reply = await rendering.render(renderer)
                if len(self._idle) < KEPT_PROCESSES:
                    self._idle.append(renderer)
                    renderer = None
                rendering.settle(reply)
        except (OSError, EOFError) as error:
            rendering.fail(Unavailable(f"cannot start a process for chat templates: {error}; retry later"))
        except Exception as error:
            rendering.fail(serve_error(error))
        finally:
            rendering.release()
            if renderer is not None:
                await renderer.end()
            del self._running[rendering.caller]
        self._start()

    def _kept(self) -> _Renderer | None:
        while self._idle:
            renderer = self._idle.pop()
            if renderer.is_alive:
                return renderer
        return None

    def _make_room(self) -> None:
        """Called when a caller waits and no process is left: ends the template that has run longest, once it is
        fair."""
        if self._eviction is None:
            oldest = next(iter(self._running.values()))
            loop = asyncio.get_running_loop()
            self._eviction = loop.call_at((oldest.began or loop.time()) + FAIR_SECONDS, self._evict, oldest)

    def _evict(self, oldest: _Rendering) -> None:
        self._eviction = None
        why = f"it takes more than {FAIR_SECONDS:g} seconds while other callers wait"
        if self._running.get(oldest.caller) is not oldest or not oldest.end(why):
            self._start()

    async def close(self) -> None:
        """Ends the processes, which otherwise end with the gateway."""
        self._waiting.clear()
        for rendering in self._running.values():
            rendering.end("the gateway stops")
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._eviction is not None:
            self._eviction.cancel()
        for renderer in self._idle:
            await renderer.end()


def template_values(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    arguments: dict[str, Any],
    parameters: dict[str, str],
) -> dict[str, Any]:
    """The variables of a template. `arguments`: those that the client sets. `parameters`: those of the model's
    configuration. The parts of a message are joined to one text, as templates expect, unless there are images among
    them."""
    special = {name: parameters[name] for name in _SPECIAL if name in parameters}
    return {
        **special,
        "add_generation_prompt": True,
        **arguments,
        "messages": [_message(number, message) for number, message in enumerate(messages)],
        "tools": tools,
    }


def continued_prompt(text: str, last: dict[str, Any]) -> str:
    """The prompt without what the template has put behind the content of the last message."""
    content = _message(0, last).get("content") or ""
    if type(content) is list:
        raise BadParameter("continue_final_message", "the last message has images; only a text can be continued")
    at = text.rfind(content.strip())
    if at < 0:
        raise BadParameter(
            "continue_final_message", "the template does not show the content of the last message as it is"
        )
    return text[: at + len(content.strip())]


def _message(number: int, message: dict[str, Any]) -> dict[str, Any]:
    parts = message.get("content")
    if type(parts) is not list:
        return message
    texts = [_part(number, part) for part in parts if part != PART]
    return message if len(texts) < len(parts) else {**message, "content": "\n".join(texts)}


def _part(number: int, part: Any) -> str:
    if type(part) is dict and part.get("type") == "text" and type(part.get("text")) is str:
        text: str = part["text"]
        return text
    raise BadParameter(f"messages[{number}].content", f"'messages[{number}].content' has a part that is not a text")

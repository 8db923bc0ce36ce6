"""Completions: one request to the model for each prompt, whose responses are one response, or one stream of events.

Invariant: when the client disconnects, or one of the requests fails, the others are cancelled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from shmserve.errors import ServeError, Unavailable
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.kserve.plans import RequestPlan
from shmserve.gateway.limits.caller_shares import Payer
from shmserve.gateway.limits.turns import SlicedWork
from shmserve.gateway.openai import errors
from shmserve.gateway.openai.formats import DONE, Choice, ResponseFormat
from shmserve.gateway.openai.texts import Delta, PartReader, Usage
from shmserve.gateway.upstream.documents import Route
from shmserve.gateway.upstream.requests import Charge, PendingStream, RequestSender, serve_error, withdraw
from shmserve.session import WINDOW

AT_ONCE = 32
"""Prompts of one request that are at the model at the same time."""
JSON = b"application/json"


class OpenAiHead(Protocol):
    """The fields of a request's head that matter here."""

    @property
    def route(self) -> Route: ...

    @property
    def token(self) -> str: ...

    @property
    def forwarded(self) -> dict[str, str] | None: ...

    @property
    def old(self) -> bool: ...


class _Watcher(Protocol):
    def disconnected(self) -> None: ...

    def stop(self) -> None: ...


class OpenAiConnection(Protocol):
    @property
    def writable(self) -> bool: ...

    def payer(self, token: str) -> Payer: ...

    def wait_for(self, ticket: Charge, resume: Callable[[], None] | None = None) -> None: ...

    def watch(self, viewer: _Watcher, resume: Callable[[], None] | None = None) -> None: ...

    def begin_events(self, status: int = 200, more: bytes = b"", first: bytes = b"") -> None: ...

    def send_event(self, data: bytes) -> None: ...

    def end_events(self, last: bytes = b"") -> None: ...

    def work(self, work: SlicedWork[Any], then: Callable[[Any], None]) -> None: ...

    def fail(self, error: ServeError, request_id: str = "") -> None: ...

    def answer(
        self, status: int, parts: list[Buffer], kind: bytes = JSON, json_length: int | None = None, more: bytes = b""
    ) -> None: ...


class _Stream(PendingStream):
    """The request for one prompt. `first`: index of its first choice."""

    __slots__ = ("_generation", "first", "reader")

    def __init__(self, generation: Generation, first: int, reader: PartReader) -> None:
        super().__init__()
        self._generation = generation
        self.first = first
        self.reader = reader

    def on_part(self) -> None:
        self._generation.on_part(self)


class Generation:
    """One request of a client."""

    def __init__(
        self, connection: OpenAiConnection, head: OpenAiHead, sender: RequestSender, model: str,
        response: ResponseFormat, as_events: bool, shows_usage: bool,
    ) -> None:  # fmt: skip
        self._connection = connection
        self._head = head
        self._sender = sender
        self._model = model
        self._response = response
        self._as_events = as_events
        self._shows_usage = shows_usage
        self._count = self._apart = 1
        self._choices: list[Choice] = []
        self._waiting: deque[tuple[int, RequestPlan]] = deque()
        """Requests that were not sent yet: the index of the first choice, and the plan."""
        self._streams: dict[_Stream, None] = {}
        self._usages: list[Usage] = []
        self._begun = False
        """The stream of events has begun."""
        self._over = False

    def begin(self, plans: list[RequestPlan], before: list[str], count: int, apart: int = 1) -> None:
        """`plans`: of the prompts, each `apart` times. `before`: the text that the choices begin with, and `count`: the
        number of choices, of each plan."""
        self._count = count
        self._apart = apart
        self._choices = [Choice(text) for text in before for _ in range(count)]
        self._waiting.extend((index * count, plan) for index, plan in enumerate(plans))
        self._connection.watch(self, self._resume)
        try:
            self._send_waiting()
        except BaseException:
            self.disconnected()
            raise

    def _send_waiting(self) -> None:
        while self._waiting and len(self._streams) < AT_ONCE:
            first, plan = self._waiting[0]
            stream = _Stream(self, first, PartReader(self._model, self._count))
            pieces = [spec.data or b"" for spec in plan.inputs]
            payer = self._connection.payer(self._head.token)
            try:
                self._sender.infer(
                    payer, stream, self._model, "", plan, pieces, plan.options.id, self._head.forwarded, WINDOW
                )
            except Unavailable:
                if not self._streams:
                    raise
                return  # until one of the others has ended
            self._waiting.popleft()
            self._streams[stream] = None

    # ------------------------------------------------------------------------------------ responses of the model

    def on_part(self, stream: _Stream) -> None:
        if self._over:
            return
        events: list[bytes] = []
        try:
            self._take(stream, events)
        except Exception as error:
            self._send(events)
            self._fail(serve_error(error))

    def _resume(self) -> None:
        """The client reads again."""
        for stream in list(self._streams):
            self.on_part(stream)

    def _take(self, stream: _Stream, events: list[bytes]) -> None:
        """Takes the parts that have arrived; those of a stream of events as far as the client reads them. `events`:
        gets what is not sent yet, in case of an exception."""
        connection, link = self._connection, self._sender.link
        while stream.parts and (not self._as_events or connection.writable):
            part: Any = link.session.next_part(stream)
            deltas = stream.reader.deltas(part)
            for index, delta in enumerate(deltas, stream.first):
                if self._as_events:
                    events.append(self._response.chunk(index, self._choices[index], delta))
                else:
                    self._response.add(self._choices[index], delta)
        if link.session.outbox.messages:
            link.send_soon()
        if stream.parts or not stream.ended:
            self._send(events)
        elif stream.error is not None:
            raise stream.error
        else:
            self._ended(stream, events)

    def _ended(self, stream: _Stream, events: list[bytes]) -> None:
        """`events`: the last ones of this stream, not sent yet."""
        del self._streams[stream]
        self._usages.append(stream.reader.usage)
        self._send_waiting()
        if self._as_events:
            events += self._reasons(stream.first)
        if self._streams or self._waiting:
            self._send(events)
            return
        self._over = True
        usage = _total(self._usages, self._apart)
        if not self._as_events:
            self._connection.answer(200, [self._response.whole(self._choices, usage)])
            return
        if self._shows_usage:
            events.append(self._response.usage_chunk(usage))
        self._begin_events()
        self._connection.end_events(b"".join([*events, DONE]))
        events.clear()

    def _reasons(self, first: int) -> list[bytes]:
        """Events for the choices of which the model has not said why they end: clients expect a reason."""
        found = [(index, self._choices[index]) for index in range(first, first + self._count)]
        return [
            self._response.chunk(index, choice, Delta("", "stop")) for index, choice in found if choice.finish is None
        ]

    def _send(self, events: list[bytes]) -> None:
        data = events[0] if len(events) == 1 else b"".join(events)
        events.clear()
        if data and self._begun:
            self._connection.send_event(data)
        elif data:
            self._begin_events(data)

    def _begin_events(self, first: bytes = b"") -> None:
        if not self._begun:
            self._begun = True
            self._connection.begin_events(first=first)

    # ------------------------------------------------------------------------------------ end

    def _fail(self, error: ServeError) -> None:
        self.disconnected()
        if not self._begun:
            self._connection.fail(error)
            return
        _, body = errors.response(error)
        self._connection.end_events(b"data: %b\n\n" % body)

    def disconnected(self) -> None:
        """Cancels what is still at the model."""
        self._over = True
        self._waiting.clear()
        streams, self._streams = self._streams, {}
        for stream in streams:
            if not stream.ended:
                withdraw(self._sender.link, stream)
            stream.parts.clear()

    def stop(self) -> None:
        """The gateway ends: requests in flight are finished."""


def _total(usages: list[Usage], apart: int) -> Usage:
    """`apart`: how many times each prompt was sent; it counts once."""
    prompts = [usage.prompt for usage in usages if usage.prompt is not None]
    completions = [usage.completion for usage in usages if usage.completion is not None]
    if len(prompts) < len(usages) or len(completions) < len(usages):
        return Usage()
    return Usage(sum(prompts) // apart, sum(completions))

"""Completions: one request to the model per prompt. The model's responses become one response, or one stream of
events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from shmserve.errors import ServeError
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.kserve.plans import RequestPlan
from shmserve.gateway.limits.turns import SLICE_BYTES, SlicedWork
from shmserve.gateway.openai import errors
from shmserve.gateway.openai.fan_out import FanOut, Planned
from shmserve.gateway.openai.formats import Choice, CompletionFormat, Echo
from shmserve.gateway.openai.texts import Delta, PartReader, TokenUsage
from shmserve.gateway.upstream.exchange import Exchange
from shmserve.gateway.upstream.requests import PendingStream, RequestSender, serve_error
from shmserve.session import WINDOW

AT_ONCE = 32
"""Maximum number of prompts of one request that are in flight at the model."""
_END = object()


class ResponseFormat(Protocol):
    """A response that is sent as a whole. `kind`: its content type."""

    @property
    def kind(self) -> bytes: ...

    def add(self, choice: Choice, delta: Delta) -> int:
        """Adds a part. Returns the number of bytes that this makes."""

    def whole(self, choices: list[Choice], usage: TokenUsage) -> list[Buffer]:
        """The body, in pieces."""


class StreamFormat(ResponseFormat, Protocol):
    """A response that is sent as a whole or as a stream of events. `id` is also that of its requests to the model.
    `top`: number of alternatives to each token; None: no log probabilities. `shows_usage`: the stream ends with the
    number of tokens. `shows_stop`: the response says which text of `stop` has ended it."""

    @property
    def id(self) -> str: ...

    @property
    def top(self) -> int | None: ...

    @property
    def shows_usage(self) -> bool: ...

    @property
    def shows_stop(self) -> bool: ...

    def chunk(self, index: int, choice: Choice, delta: Delta) -> bytes:
        """The events for a part; empty if there is nothing to send to the client."""

    def end(self, choices: list[Choice], usage: TokenUsage) -> bytes:
        """The last events."""

    def error(self, body: bytes) -> bytes:
        """The event that ends a stream, from the body of an error."""


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
    """One request of a client. `events`: None for a response that is sent as a whole. `echoes`: for each request to the
    model, the text that its choices begin with. `count`: number of choices of such a request. `apart`: how many times
    each prompt is sent."""

    def __init__(
        self,
        exchange: Exchange,
        sender: RequestSender,
        model: str,
        response: ResponseFormat,
        events: StreamFormat | None,
        echoes: list[Echo | None],
        count: int = 1,
        apart: int = 1,
    ) -> None:
        self._exchange = exchange
        self._link = sender.link
        self._requests: FanOut[_Stream] = FanOut(exchange, sender, model, AT_ONCE, self._cannot_continue, WINDOW)
        self._model = model
        self._response = response
        self._events = events
        self._count = count
        self._apart = apart
        self._choices = [Choice(echo) for echo in echoes for _ in range(count)]
        self._usages: list[TokenUsage] = []
        self._echo = events if any(echoes) and isinstance(events, CompletionFormat) else None
        """The format of a stream whose choices begin with their prompts."""
        self._begun = False
        """The stream of events has begun."""
        self._working = False
        """A part is being taken in slices."""
        self._waiting: dict[_Stream, None] = {}
        """The streams with parts that have arrived meanwhile."""
        self._uncounted = 0
        """Bytes of the response that are not counted by `hold` yet."""

    def begin(self, plans: Iterator[RequestPlan | None]) -> None:
        """`plans`: those of the requests to the model, in order. For None, see `Planned`."""
        self._requests.begin(self._streams(plans), self._resume)

    def _streams(self, plans: Iterator[RequestPlan | None]) -> Planned[_Stream]:
        first = 0
        for plan in plans:
            if plan is None:
                yield None
            else:
                reader = PartReader(self._model, self._count)
                for choice in self._choices[first : first + self._count]:
                    choice.usage = reader.usage
                yield _Stream(self, first, reader), plan
                first += self._count

    # ------------------------------------------------------------------------------------ responses of the model

    def on_part(self, stream: _Stream) -> None:
        if self._requests.cancelled:
            return
        if self._working:
            self._waiting[stream] = None
            return
        work = self._taken(stream)
        if next(work, _END) is not _END:  # large: the rest is done in further slices
            self._working = True
            self._exchange.work(self._in_slices(work), _nothing, self._exchange.fail)

    def _resume(self) -> None:
        """Called when the client reads again."""
        for stream in list(self._requests.in_flight):
            self.on_part(stream)

    def _in_slices(self, work: Iterator[None]) -> SlicedWork[None]:
        """The rest of `work`, then the parts that arrive meanwhile, of which only one at a time is taken."""
        yield
        yield from work
        while self._waiting and not self._requests.cancelled:
            stream = next(iter(self._waiting))
            del self._waiting[stream]
            yield from self._taken(stream)
        self._working = False

    def _taken(self, stream: _Stream) -> Iterator[None]:
        """Takes the parts that have arrived. Yields between slices of large ones."""
        events: list[bytes] = []
        try:
            yield from self._take(stream, events)
        except Exception as error:
            if not self._requests.cancelled:
                self._send(events)
                self._fail(stream, serve_error(error))

    def _take(self, stream: _Stream, events: list[bytes]) -> Iterator[None]:
        """Takes the parts of a stream of events as far as the client reads them. `events`: receives the events that are
        not sent yet, in case of an exception."""
        exchange, link, response = self._exchange, self._link, self._events
        if self._echo is not None and (stream.parts or (stream.ended and stream.error is None)):
            yield from self._echoes(stream, self._echo)
            if self._requests.cancelled or not self._choices[stream.first + self._count - 1].begun:
                return  # the client does not read
        while stream.parts and (response is None or exchange.writable):
            part: Any = link.session.next_part(stream)
            for added in stream.reader.deltas(part):
                if added is None:
                    self._send(events)
                    yield
                    if self._requests.cancelled:  # meanwhile
                        return
                    continue
                choice = stream.first + added[0]
                if response is None:
                    self._add(self._choices[choice], added[1])
                else:
                    events.append(response.chunk(choice, self._choices[choice], added[1]))
        if link.session.outbox.messages:
            link.send_soon()
        if stream.parts or not stream.ended:
            self._send(events)
        elif stream.error is not None:
            raise stream.error
        else:
            self._ended(stream, events)

    def _add(self, choice: Choice, delta: Delta) -> None:
        self._uncounted += self._response.add(choice, delta)
        if self._uncounted > SLICE_BYTES:
            self._exchange.hold(self._uncounted)
            self._uncounted = 0

    def _echoes(self, stream: _Stream, response: CompletionFormat) -> Iterator[None]:
        """Sends the prompt as the first event of each choice, as far as the client reads them."""
        for index in range(stream.first, stream.first + self._count):
            choice = self._choices[index]
            if choice.echo is None or choice.begun:
                continue
            if self._requests.cancelled or not self._exchange.writable:
                return
            choice.begun = True
            self._send([response.echo_chunk(index, choice.echo)])
            if len(choice.echo.text) > SLICE_BYTES:
                yield

    def _ended(self, stream: _Stream, events: list[bytes]) -> None:
        """`events`: the last ones of this stream, not sent yet."""
        self._usages.append(stream.reader.usage)
        self._requests.ended(stream)
        if self._requests.cancelled:
            return
        response = self._events
        if response is not None:
            events += self._reasons(stream.first, response)
        if not self._requests.done:
            self._send(events)
            return
        usage = _total(self._usages, self._apart)
        if response is None:
            for choice in self._choices:
                if choice.finish is None:
                    self._add(choice, Delta("", "stop"))
            self._exchange.answer(200, self._response.whole(self._choices, usage), self._response.kind)
            return
        events.append(response.end(self._choices, usage))
        self._begin_events()
        self._exchange.end_events(b"".join(events))
        events.clear()

    def _reasons(self, first: int, response: StreamFormat) -> list[bytes]:
        """Events for the choices whose finish reason the model has not given: clients expect one."""
        choices = [(index, self._choices[index]) for index in range(first, first + self._count)]
        return [response.chunk(index, choice, Delta("", "stop")) for index, choice in choices if choice.finish is None]

    def _send(self, events: list[bytes]) -> None:
        data = events[0] if len(events) == 1 else b"".join(events)
        events.clear()
        if data and self._begun:
            self._exchange.send_event(data)
        elif data:
            self._begin_events(data)

    def _begin_events(self, first: bytes = b"") -> None:
        if not self._begun:
            self._begun = True
            self._exchange.begin_events(first=first)

    def _fail(self, stream: _Stream, error: ServeError) -> None:
        if stream.ended:
            self._requests.failed(stream)
        else:
            self._requests.cancel()
        self._cannot_continue(error)

    def _cannot_continue(self, error: ServeError) -> None:
        if not self._begun or self._events is None:
            self._exchange.fail(error)
            return
        _, body = errors.response(error)
        self._exchange.end_events(self._events.error(body))


def _total(usages: list[TokenUsage], apart: int) -> TokenUsage:
    """`apart`: how many times each prompt was sent; it counts once."""
    prompts = [usage.prompt for usage in usages if usage.prompt is not None]
    completions = [usage.completion for usage in usages if usage.completion is not None]
    if len(prompts) < len(usages) or len(completions) < len(usages):
        return TokenUsage(context=usages[0].context)
    cached = [usage.cached for usage in usages if usage.cached is not None]
    return TokenUsage(
        sum(prompts) // apart, sum(completions), usages[0].context, sum(cached) // apart if cached else None
    )


def _nothing(_: None) -> None: ...

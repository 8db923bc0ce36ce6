"""The model requests that one client request becomes.

Invariant: when the client disconnects, or one of the requests fails, the others are cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from shmserve.errors import ServeError, Unavailable
from shmserve.gateway.kserve.plans import RequestPlan
from shmserve.gateway.limits.turns import SlicedWork
from shmserve.gateway.upstream.exchange import Exchange, model_request
from shmserve.gateway.upstream.requests import Charge, PendingStream, RequestSender, withdraw

_Ticket = TypeVar("_Ticket", bound=Charge)

Planned = Iterator[tuple[_Ticket, RequestPlan] | None]
"""Requests in order, each made when it is to be sent. None: much was made, so other clients get a turn before the next
request, of which there is one."""


class FanOut(Generic[_Ticket]):
    """Sends the requests in order, at most `at_once` at a time. `failed` is called, once the others are cancelled, if a
    request cannot be sent later. `window`: stream window of each request; 0: it has a single reply."""

    def __init__(
        self,
        exchange: Exchange,
        sender: RequestSender,
        model: str,
        at_once: int,
        failed: Callable[[ServeError], None],
        window: int = 0,
    ) -> None:
        self._exchange = exchange
        self._failed = failed
        self._sender = sender
        self._model = model
        self._at_once = at_once
        self._window = window
        self._requests: Planned[_Ticket] = iter(())
        self._next: tuple[_Ticket, RequestPlan] | None = None
        self._all_sent = False
        self._paused = False
        """Other clients have a turn."""
        self.in_flight: dict[_Ticket, None] = {}
        self.cancelled = False

    def begin(self, requests: Planned[_Ticket], resume: Callable[[], None] | None = None) -> None:
        """`resume` is called when the client reads again."""
        self._requests = requests
        self._exchange.watch(self, resume)
        try:
            self._send()
        except BaseException:
            self.cancel()
            raise

    @property
    def done(self) -> bool:
        """Whether all have succeeded."""
        return self._all_sent and not (self.in_flight or self.cancelled)

    def ended(self, ticket: _Ticket) -> None:
        """Called when a request has succeeded: sends the next one."""
        del self.in_flight[ticket]
        self._send()

    def failed(self, ticket: _Ticket) -> None:
        """Called when a request has failed: cancels the others."""
        self.in_flight.pop(ticket, None)
        self.cancel()

    def _send(self) -> None:
        while not self._paused and self._find_next() and len(self.in_flight) < self._at_once:
            assert self._next is not None
            ticket, plan = self._next
            pieces = [b"" if spec.data is None else spec.data for spec in plan.inputs]
            try:
                self._sender.infer(ticket, model_request(self._exchange, self._model, "", plan, pieces), self._window)
            except ServeError as error:
                if self.cancelled:
                    return
                if self.in_flight and isinstance(error, Unavailable):
                    return  # until another request has ended
                raise
            if self.cancelled:  # another request has failed in the meantime, because the link was lost
                withdraw(self._sender.link, ticket)
                return
            self.in_flight[ticket] = None
            self._next = None

    def _find_next(self) -> bool:
        """Whether a request is to be sent now. Pauses if others get a turn first."""
        if self._next is None and not self._all_sent:
            try:
                self._next = next(self._requests)
            except StopIteration:
                self._all_sent = True
                return False
            if self._next is None:
                self._paused = True
                self._exchange.work(_one_turn(), self._go_on, self._give_up)
        return self._next is not None

    def _go_on(self, _: None) -> None:
        self._paused = False
        if not self.cancelled:
            self._send()

    def _give_up(self, error: ServeError) -> None:
        """A request could not be made or sent after a pause."""
        if not self.cancelled:
            self.cancel()
            self._failed(error)

    def cancel(self) -> None:
        self.cancelled = True
        self._next = None
        self._requests = iter(())
        self._all_sent = True
        in_flight, self.in_flight = self.in_flight, {}
        for ticket in in_flight:
            withdraw(self._sender.link, ticket)
            if isinstance(ticket, PendingStream):
                ticket.parts.clear()

    def disconnected(self) -> None:
        self.cancel()

    def stop(self) -> None:
        """Called when the gateway stops: requests in flight are finished."""


def _one_turn() -> SlicedWork[None]:
    yield

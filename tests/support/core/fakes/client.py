"""A client that records which replies it expects, and asserts the broker's obligations."""

from __future__ import annotations

from collections import Counter
from typing import Any

from shmserve.protocol import messages
from tests.support.core.fakes.lease import FakeLease
from tests.support.core.fakes.tensors import one_input, references, replies_of


class FakeClient:
    def __init__(self, peer: int, name: str, plane: str, outputs: str) -> None:
        self.peer, self.name, self.plane, self.outputs = peer, name, plane, outputs
        self.open: set[int] = set()
        self.held_inputs: set[int] = set()
        self.answers: dict[int, Any] = {}
        self.windows: dict[int, int] = {}
        """For streamed requests: how many more responses the client has allowed."""
        self.parts: dict[int, list[messages.Part]] = {}
        self.order: list[int] = []
        self.mapped: set[int] = set()
        self.own: dict[int, int] = {}
        self.withdrawn: set[int] = set()
        self.holds: Counter[messages.Handle] = Counter()
        self.errors: list[messages.Fail] = []
        self.leases: dict[int, FakeLease] = {}
        self.takes_leases = False
        self.offers: dict[int, messages.Lease] = {}
        """Leases that it was offered and did not get yet."""
        self.lent: list[messages.Lease] = []
        """All leases that the client received."""
        self.leased: dict[int, messages.Infer] = {}
        """Lease -> the last request sent over it."""
        self.unsent: list[messages.Infer] = []
        """Requests whose lease has ended without an answer: to be sent to the broker."""
        self.welcomed = self.ended = False

    def sends(self, request: int, window: int = 0) -> None:
        """Called before an Infer that is expected to get its own answer."""
        if window:
            self.windows[request] = window
        assert request not in self.open
        assert request not in self.answers, "the tests number requests on and on"
        self.open.add(request)

    def infer(
        self, number: int, model: str = "m", rows: int = 1, timeout_us: int = 0, options: messages.Options | None = None
    ) -> tuple[int, messages.Infer]:
        """The event of a request with an input `x` of one element per row."""
        self.sends(number, options.window if options is not None else 0)
        return self.peer, messages.Infer(number, model, 0, (one_input(rows),), None, timeout_us, options)

    def receive(self, message: Any) -> None:
        for one in replies_of(message):
            self._receive(one)

    def _receive(self, message: Any) -> None:
        if isinstance(message, messages.Part):
            self._part(message)
            self._take(message)
        elif isinstance(message, messages.Reply):
            assert message.request not in self.parts, f"{self.name} has had parts, and got {message}"
            self.windows.pop(message.request, None)
            self._answered(message.request, message)
            self._take(message)
            if isinstance(message, messages.ReplyHeld):
                self.held_inputs.add(message.request)
        elif isinstance(message, (messages.Fail, messages.FailHeld)):
            if message.request == 0:
                assert isinstance(message, messages.Fail)
                self.errors.append(message)
                return
            self._answered(message.request, message)
            if isinstance(message, messages.FailHeld):
                self.held_inputs.add(message.request)
        elif isinstance(message, messages.Released):
            assert message.request in self.held_inputs, f"{self.name} got Released {message.request} without need"
            self.held_inputs.remove(message.request)
        elif isinstance(message, messages.Map):
            assert message.segment not in self.mapped
            self.mapped.add(message.segment)
        elif isinstance(message, messages.Unmap):
            assert message.segment in self.mapped
            assert not [handle for handle in self.holds if handle.segment == message.segment]
            self.mapped.discard(message.segment)
        elif isinstance(message, messages.Welcome):
            self.welcomed = True
        elif isinstance(message, messages.Goodbye):
            self.ended = True
        elif isinstance(message, messages.Lease):
            assert message.offer, "a lease without a socket"
            self.offers[message.lease] = message
        elif isinstance(message, messages.LeaseEnd):
            self._lease_ended(message)
        else:
            assert isinstance(message, (messages.Reclaim, messages.Answer, messages.Pong)), message

    # ------------------------------------------------------------------------------------ its leases

    def lends(self, message: messages.Lease, lease: FakeLease) -> None:
        assert not any(known.model == lease.model for known in self.leases.values()), "a second lease of one model"
        self.offers.pop(message.lease, None)
        self.leases[message.lease] = lease
        self.lent.append(message)

    def send_leased(self, lease: FakeLease, request: messages.Infer) -> None:
        assert not self.open, "only the only request in flight goes over a lease"
        self.sends(request.request)
        self.leased[lease.number] = request
        lease.send(request)

    def read_leases(self) -> None:
        for lease in self.leases.values():
            for answer in lease.take_answers():
                self._answered(answer.request, answer)

    def _lease_ended(self, message: messages.LeaseEnd) -> None:
        self.offers.pop(message.lease, None)
        lease = self.leases.pop(message.lease, None)
        if lease is None:  # its socket pair could not be created
            return
        lease.client_open = False
        for answer in lease.take_answers():
            self._answered(answer.request, answer)
        request = self.leased.pop(message.lease, None)
        if request is None or request.request not in self.open:
            return
        if message.error is None:
            self.unsent.append(request)
        else:
            self._answered(request.request, messages.Fail(request.request, message.error.code, message.error.text))

    def leave(self) -> None:
        """Called when the client's process has ended."""
        self.ended = True
        for lease in self.leases.values():
            lease.client_open = False

    def _take(self, message: messages.Reply | messages.Part) -> None:
        for handle in references(message.outputs):
            if handle.segment in self.own:
                assert handle.offset + handle.size <= self.own[handle.segment]
            elif self.outputs != "frames":
                assert handle.segment in self.mapped, f"{self.name} was never told of {handle.segment}"
                self.holds[handle] += 1

    def _part(self, message: messages.Part) -> None:
        request = message.request
        assert request in self.open, f"{self.name} got {message} for {request}: never asked, or answered before"
        assert request in self.windows, f"{self.name} has not asked for parts, and got {message}"
        if message.outputs or not message.last:
            self.windows[request] -= 1
            assert self.windows[request] >= 0, f"{self.name} has no room for {message}"
        self.parts.setdefault(request, []).append(message)
        if message.last:
            self._answered(request, message)

    def _answered(self, request: int, message: Any) -> None:
        assert request in self.open, f"{self.name} got {message} for {request}: never asked, or answered before"
        self.open.remove(request)
        self.answers[request] = message
        self.order.append(request)

    def give_back(self, handle: messages.Handle) -> None:
        self.holds[handle] -= 1
        if not self.holds[handle]:
            del self.holds[handle]

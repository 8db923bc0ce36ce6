"""Prepares unanswered requests for a new connection.

Invariant: a resent request has the same bytes; only its segment ids change. Inputs that lay in memory of the old
server's workers are copied into the client's arena.

A restarted server may still be loading models, so nothing is resent until it reports that it has loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from shmserve.errors import InvalidRequest, ServeError
from shmserve.protocol.messages import Handle, Infer, Tensor
from shmserve.session.memory import SessionMemory
from shmserve.session.outbox import SessionOutbox
from shmserve.session.staging import restage
from shmserve.session.ticket import KeptInputs, Ticket

LOADED = "loaded"


class Resume(Ticket):
    """Asks whether the server has loaded its models. `go` is called on any answer, and also if the server rejects the
    question as unknown: such a server itself refuses requests that it cannot serve.
    """

    __slots__ = ("_go",)

    def __init__(self, go: Callable[[], None]) -> None:
        self._go = go

    def settle(self, answer: Any) -> None:
        self._go()

    def fail(self, error: ServeError) -> None:
        if isinstance(error, InvalidRequest):  # otherwise the connection has ended again, and all tickets with it
            self._go()


def renew(
    tickets: dict[int, Ticket], numbers: dict[int, int], memory: SessionMemory
) -> tuple[list[int], list[tuple[Ticket, ServeError]]]:
    """Prepares all requests for the new connection. Returns their numbers, in order, and the tickets of those that
    cannot be sent again, with the errors."""
    again: list[int] = []
    failed: list[tuple[Ticket, ServeError]] = []
    for number in sorted(tickets):
        ticket = tickets[number]
        if not isinstance(ticket.message, Infer):
            continue
        try:
            ticket.message = _renewed(ticket.message, ticket.kept, numbers, memory)
        except ServeError as error:
            failed.append((ticket, error))
            continue
        if not memory.announcements.device_memory:
            restage(ticket, memory)
        again.append(number)
    return again, failed


def send_again(numbers: list[int], tickets: dict[int, Ticket], outbox: SessionOutbox) -> list[Ticket]:
    """Queues the requests again. Returns the tickets abandoned in the meantime, whose requests the server has not
    seen."""
    over = []
    for ticket in [tickets[number] for number in numbers if number in tickets]:
        if ticket.message is None:
            over.append(ticket)
        else:
            if ticket.kept is not None and ticket.kept.frames:
                outbox.expect_frames()
            outbox.queue(ticket.message)
    return over


def _renewed(message: Infer, kept: KeptInputs | None, numbers: dict[int, int], memory: SessionMemory) -> Infer:
    """The request with the new ids of the client's own segments."""
    kept = kept or KeptInputs()
    tensors = []
    for index, tensor in enumerate(message.inputs):
        data = tensor.data
        if isinstance(data, tuple):
            array = kept.received.pop(index, None)
            if array is not None:
                data = (memory.copy_in(array, kept),)
            else:
                data = tuple([_renumbered(handle, numbers) for handle in data])
        tensors.append(Tensor(tensor.name, tensor.dtype, tensor.shape, data))
    outputs = message.outputs
    if outputs is not None:
        outputs = tuple(
            [
                wanted if wanted.place is None else replace(wanted, place=_renumbered(wanted.place, numbers))
                for wanted in outputs
            ]
        )
    return Infer(
        message.request,
        message.model,
        message.version,
        tuple(tensors),
        outputs,
        message.timeout_us,
        message.options,
        message.payer,
    )


def _renumbered(handle: Handle, numbers: dict[int, int]) -> Handle:
    return Handle(numbers.get(handle.segment, handle.segment), handle.offset, handle.size)

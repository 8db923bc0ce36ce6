"""Requests over leases: which requests a session sends over a lease, and what happens to them when it ends."""

from __future__ import annotations

import fcntl
import os
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.errors import DeadlineExceeded, ModelFailed, ProtocolError
from shmserve.protocol import codec
from shmserve.protocol.messages import (
    PROTOCOL,
    Ask,
    Cancel,
    Failure,
    Handle,
    Hello,
    Infer,
    Lease,
    LeaseEnd,
    Map,
    Reply,
    Return,
    Tensor,
    Welcome,
)
from shmserve.session import Packet, Session, leases
from tests.support.cases import cases
from tests.support.clients.sessions import RecordingTicket, decode, decoded, feed

ROW = {"x": np.ones((1, 3), np.float32)}
LEASE = Lease(5, "m", 2, 4, True)


class Sockets:
    offers = True

    def __init__(self) -> None:
        self.arrived: dict[int, deque[bytes]] = {}

    def open_lease(self, lease: int, fd: int) -> None:
        os.close(fd)
        self.arrived[lease] = deque()

    def close_lease(self, lease: int) -> list[bytes]:
        return list(self.arrived.pop(lease, ()))


class Client:
    def __init__(self, memory: str = "memfd") -> None:
        self.sockets = Sockets()
        self.session = Session(memory, lease_sockets=self.sockets)
        (hello,) = decode(self.session.hello(7, "test").data)
        assert hello == Hello(PROTOCOL, 7, "test", memory, True, False, True)
        self.welcome()

    def welcome(self) -> None:
        feed(self.session, Welcome(PROTOCOL, 1, "server", {"client_requests": 10}))

    def lend(self, lease: Lease = LEASE) -> None:
        self.session.receive(codec.encode([lease]), [os.open(os.devnull, os.O_RDONLY)])

    def ask(self, inputs: Any = None, **options: Any) -> tuple[RecordingTicket, list[Packet]]:
        ticket = RecordingTicket()
        self.session.infer(ticket, "m", ROW if inputs is None else inputs, 100.0, **options)
        return ticket, self.session.take()


@pytest.fixture
def without() -> Iterator[Client]:
    made = Client()
    yield made
    made.session.close()


@pytest.fixture
def client(without: Client) -> Client:
    without.lend()
    return without


@pytest.mark.parametrize(
    ("is_default", "version", "leased"), [(True, None, True), (True, 2, True), (False, None, False), (False, 2, True)]
)
def test_a_lone_request_takes_the_lease(without: Client, is_default: bool, version: int | None, leased: bool) -> None:
    """A lease of a version that is not the default is for requests that name the version."""
    client = without
    client.lend(Lease(5, "m", 2, 4, is_default))
    ticket, (packet,) = client.ask(version=version)
    assert packet.lease == (5 if leased else 0)
    (infer,) = decode(packet.data)
    assert infer == Infer(1, "m", version or 0, infer.inputs)
    assert feed(client.session, Reply(1, 2, infer.inputs)) == 1
    assert ticket.answer["x"].tolist() == ROW["x"].tolist()


@cases(
    {"outputs": ["y"]},
    {"priority": 1},
    {"payer": "other"},
    {"request_id": "a"},
    {"version": 3},
    {"inputs": {"x": np.ones((5, 3), np.float32)}},
    {"inputs": {"x": np.ones((1, 4096), np.float32)}},
    {"inputs": {"x": np.ones((), np.float32)}},
    {"inputs": {}},
    ids=["outputs", "priority", "payer", "id", "version", "rows", "shared memory", "scalar", "no inputs"],
)
def test_other_requests_pass_through_the_broker(options: dict[str, Any], client: Client) -> None:
    _, packets = client.ask(**options)
    assert {packet.lease for packet in packets} == {0}
    assert type(decoded(packets)[-1]) is Infer


LARGE = {"x": np.arange(4096, dtype=np.float32).reshape(1, 4096)}


def ask_large(client: Client) -> tuple[RecordingTicket, Handle, int]:
    """Sends a request with an input in shared memory. Returns its handle, and the lease."""
    ticket, packets = client.ask(LARGE)
    ((tensor,),) = (message.inputs for message in decoded(packets) if type(message) is Infer)
    assert isinstance(tensor.data, tuple)
    return ticket, tensor.data[0], packets[-1].lease


def test_inputs_are_kept_until_the_answer_or_the_end_of_the_lease(client: Client) -> None:
    """The first request announces their segment to the server, and therefore passes through the broker."""
    memory = client.session.memory
    _, handle, lease = ask_large(client)
    assert (lease, handle.size, memory.is_own(handle)) == (0, 16384, True)
    feed(client.session, Reply(1, 2, ()))
    ticket, _, lease = ask_large(client)
    assert lease == 5
    assert client.session.cancel(ticket)
    client.session.take()
    assert memory.used > 0, "the worker may still read it"
    feed(client.session, Reply(2, 2, ()))
    assert memory.used == 0
    ticket, before, lease = ask_large(client)
    assert lease == 5
    feed(client.session, LeaseEnd(5))
    (again,) = [message for message in decoded(client.session.take()) if type(message) is Infer]
    assert again.inputs[0].data == (before,)
    assert memory.used > 0
    feed(client.session, Reply(3, 2, ()))
    assert (ticket.ends, memory.used) == (1, 0)


def test_returns_and_named_memory_pass_through_the_broker(client: Client) -> None:
    client.session.memory.announcements.unmaps.append(9)
    _, (returns, leased) = client.ask()
    assert (returns.lease, leased.lease) == (0, 5)
    assert Infer not in map(type, decode(returns.data))
    assert Return not in map(type, decode(leased.data))
    named = Client("posix")
    named.lend()
    for number in range(1, 4):
        assert ask_large(named)[2] == 0
        feed(named.session, Reply(number, 2, ()))
    named.session.close()


def test_requests_with_received_outputs_pass_through_the_broker(client: Client) -> None:
    ask_large(client)
    descriptor, size = os.memfd_create("output", os.MFD_ALLOW_SEALING), 16384
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    output = Tensor("y", "FP32", (1, 4096), (Handle(1 << 40, 0, size),))
    ticket, _ = client.ask()
    packet = codec.encode([Map(1 << 40, size), Reply(1, 2, ()), Reply(2, 2, (output,))])
    client.session.receive(packet, [descriptor])
    _, packets = client.ask({"x": ticket.answer["y"]})
    assert [packet.lease for packet in packets] == [0]
    feed(client.session, Reply(3, 2, ()))


def test_requests_larger_than_a_packet_pass_through_the_broker(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "PACKET_BYTES", 10)
    assert [packet.lease for packet in client.ask()[1]] == [0]


def test_requests_beside_others_pass_through_the_broker(client: Client) -> None:
    _, (first,) = client.ask()
    _, (second,) = client.ask()
    assert (first.lease, second.lease) == (5, 0)
    feed(client.session, Reply(1, 2, ()), Reply(2, 2, ()))
    tickets = [RecordingTicket(), RecordingTicket()]
    for ticket in tickets:
        client.session.infer(ticket, "m", ROW, 100.0)
    (both,) = client.session.take()
    assert (both.lease, len(decode(both.data))) == (0, 2)


@pytest.mark.parametrize("sent", [False, True], ids=["with the request", "before the request"])
@pytest.mark.parametrize(("what", "lease"), [("activity", 5), ("load", 0)])
def test_questions_do_not_share_the_lease_but_operations_do(client: Client, what: str, lease: int, sent: bool) -> None:
    """A request after an operation depends on its outcome, which only the broker knows."""
    client.session.ask(RecordingTicket(), what, 100.0)
    before = client.session.take() if sent else []
    _, packets = client.ask()
    found = {type(message): packet.lease for packet in [*before, *packets] for message in decode(packet.data)}
    assert found == {Ask: 0, Infer: lease}
    assert client.ask()[1][-1].lease == 0, "beside another request"


def test_a_request_that_the_lease_left_unanswered_is_sent_again(client: Client) -> None:
    ticket, _ = client.ask()
    assert feed(client.session, LeaseEnd(5)) == 0
    (packet,) = client.session.take()
    assert (packet.lease, len(decode(packet.data)), ticket.ends) == (0, 1, 0)
    assert feed(client.session, Reply(1, 2, ())) == 1
    assert ticket.ends == 1
    assert [packet.lease for packet in client.ask()[1]] == [0]


@pytest.mark.parametrize("answered", [True, False])
def test_an_answer_takes_precedence_over_the_error_of_the_lease(client: Client, answered: bool) -> None:
    ticket, _ = client.ask()
    if answered:
        client.sockets.arrived[5].append(codec.encode([Reply(1, 2, ())]))
    assert feed(client.session, LeaseEnd(5, Failure("MODEL_FAILED", "it ended"))) == 1
    assert (ticket.ends, str(ticket.error)) == (1, "None" if answered else "it ended")
    assert answered or isinstance(ticket.error, ModelFailed)
    assert not client.session.take()
    assert [packet.lease for packet in client.ask()[1]] == [0]


def test_the_next_lease_of_a_model_may_overtake_the_end_of_the_last_one(client: Client) -> None:
    ticket, _ = client.ask(timeout=1.0)
    client.lend(Lease(6, "m", 2, 4, True))
    feed(client.session, LeaseEnd(5))
    (packet,) = client.session.take()
    assert packet.lease == 0, "a request that may have ended a worker is not sent to one directly"
    assert client.session.deadline() == 101.0, "the client itself enforces it"
    client.session.tick(101.0)
    assert isinstance(ticket.error, DeadlineExceeded)
    feed(client.session, Reply(1, 2, ()))
    client.session.take()
    assert client.ask()[1][0].lease == 6


def test_a_cancelled_request_ends_with_its_lease(client: Client) -> None:
    ticket, _ = client.ask()
    assert client.session.cancel(ticket)
    assert [type(message) for message in decoded(client.session.take())] == [Cancel]
    assert [packet.lease for packet in client.ask()[1]] == [0]
    feed(client.session, LeaseEnd(5))
    assert list(client.session.tickets) == [2]
    assert (ticket.ends, decoded(client.session.take())) == (0, [])


def test_a_lost_connection_ends_all_leases(client: Client) -> None:
    ticket, _ = client.ask()
    client.session.disconnected()
    assert ticket.ends == 0
    client.sockets.arrived.clear()
    client.welcome()
    question = decoded(client.session.take())[-1]
    assert question.what == "loaded"
    assert [packet.lease for packet in client.ask()[1]] == [0]


def test_a_lease_without_a_descriptor_is_a_protocol_error(without: Client) -> None:
    with pytest.raises(ProtocolError, match="lease 5 without a descriptor"):
        feed(without.session, LEASE)


# ------------------------------------------------------------------------------------ several requests in flight

SEVERAL = Lease(5, "m", 2, 4, True, batch=8)


def offered(client: Client) -> Client:
    feed(client.session, replace(SEVERAL, offer=True))
    return client


def numbers(packets: list[Packet]) -> list[tuple[int, list[int]]]:
    """The lease of each packet, and the numbers of its requests."""
    found = [(packet.lease, [one.request for one in decode(packet.data) if type(one) is Infer]) for packet in packets]
    return [(lease, requests) for lease, requests in found if requests]


def answer(client: Client, *requests: int) -> bool:
    """The worker answers a packet. Returns whether the link sends the next one at once."""
    waiting = client.session.lease_answered()
    feed(client.session, *(Reply(number, 2, ()) for number in requests))
    return waiting


def test_requests_wait_for_a_lease_that_was_offered(without: Client) -> None:
    client = without
    assert numbers(client.ask()[1]) == [(0, [1])]
    offered(client)
    assert [numbers(client.ask()[1]) for _ in range(2)] == [[], []]
    assert numbers(client.ask(outputs=["y"])[1]) == [(0, [4])], "only the broker can answer it"
    feed(client.session, Reply(1, 2, ()))
    assert numbers(client.session.take()) == []
    client.lend(SEVERAL)
    assert client.session.urgent
    assert numbers(client.session.take()) == [(5, [2, 3])]
    assert numbers(client.ask()[1]) == numbers(client.ask()[1]) == [], "one packet at a time"
    assert answer(client, 2, 3)
    assert numbers(client.session.take()) == [(5, [5, 6])]
    assert not answer(client, 5, 6)
    assert numbers(client.ask()[1]) == [(5, [7])]
    assert numbers(client.ask({})[1]) == [(0, [8])], "it has no rows"


def test_a_packet_is_one_batch(without: Client) -> None:
    """Of up to `batch` rows, with inputs of the same shape, and not larger than a packet."""
    client = offered(without)
    for rows, length in ((2, 3), (2, 3), (2, 3), (2, 3), (2, 3), (1, 3), (1, 4), *([(1, 900)] * 60)):
        client.ask({"x": np.ones((rows, length), np.float32)})
    client.lend(replace(SEVERAL, batch=8))
    for chosen in ([1, 2, 3, 4], [5], [6], [7], list(range(8, 16))):
        assert numbers(client.session.take()) == [(5, chosen)]
        answer(client, *chosen)
    feed(client.session, LeaseEnd(5))
    client.session.take()
    offered(client)
    for _ in range(60):
        client.ask({"x": np.ones((1, 1000), np.float32)})
    client.lend(replace(SEVERAL, batch=100))
    ((lease, chosen),) = numbers(client.session.take())
    assert (lease, len(chosen)) == (5, 30), "60 do not fit"


def test_requests_pass_through_the_broker_once_a_lease_has_ended(without: Client) -> None:
    client = offered(without)
    client.lend(SEVERAL)
    tickets = [client.ask()[0] for _ in range(4)]
    assert client.session.cancel(tickets[3])
    client.sockets.arrived[5].append(codec.encode([Reply(1, 2, ())]))
    feed(client.session, LeaseEnd(5))
    assert tickets[0].ends == 1
    assert numbers(client.session.take()) == [(0, [2, 3])]
    assert list(client.session.tickets) == [2, 3], "nobody waits for the last one, and its inputs are free"


def test_an_offer_that_ends_lets_requests_pass(without: Client) -> None:
    client = offered(without)
    client.ask()
    client.ask()
    feed(client.session, LeaseEnd(5))
    assert client.session.urgent
    assert numbers(client.session.take()) == [(0, [1, 2])]


def test_the_error_of_a_lease_is_that_of_all_requests_of_its_packet(without: Client) -> None:
    client = offered(without)
    sent = [client.ask()[0] for _ in range(2)]
    client.lend(SEVERAL)
    client.session.take()
    waiting, _ = client.ask()
    assert feed(client.session, LeaseEnd(5, Failure("MODEL_FAILED", "it ended"))) == 2
    assert [str(ticket.error) for ticket in sent] == ["it ended"] * 2
    assert waiting.error is None
    assert numbers(client.session.take()) == [(0, [3])]


def test_requests_beside_an_operation_pass_through_the_broker(without: Client) -> None:
    client = offered(without)
    client.ask()
    client.lend(SEVERAL)
    client.session.ask(RecordingTicket(), "load", 100.0)
    assert numbers(client.ask()[1]) == [(0, [1, 3])]


def test_only_one_lease_has_requests_in_flight(without: Client) -> None:
    """While the worker of one does not answer, it does not delay requests to other models."""
    client = offered(without)
    client.lend(SEVERAL)
    client.lend(Lease(6, "n", 1, 4, True, batch=8))
    assert numbers(client.ask()[1]) == [(5, [1])]
    client.session.infer(RecordingTicket(), "n", ROW, 100.0)
    assert numbers(client.session.take()) == [(0, [2])]

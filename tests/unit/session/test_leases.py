"""Requests over leases: which requests a session sends over a lease, and what happens to them when it ends."""

from __future__ import annotations

import fcntl
import os
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

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
    def __init__(self) -> None:
        self.arrived: dict[int, deque[bytes]] = {}

    def open_lease(self, lease: int, fd: int) -> None:
        os.close(fd)
        self.arrived[lease] = deque()

    def close_lease(self, lease: int) -> list[bytes]:
        return list(self.arrived.pop(lease))


class Client:
    def __init__(self, memory: str = "memfd") -> None:
        self.sockets = Sockets()
        self.session = Session(memory, lease_sockets=self.sockets)
        (hello,) = decode(self.session.hello(7, "test").data)
        assert hello == Hello(PROTOCOL, 7, "test", memory, True)
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
    ids=["outputs", "priority", "payer", "id", "version", "rows", "shared memory", "scalar"],
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


def test_inputs_in_shared_memory_go_over_the_lease_once_the_server_knows_the_segment(client: Client) -> None:
    for number, lease in ((1, 0), (2, 5), (3, 5)):
        _, handle, found = ask_large(client)
        assert (found, handle.size) == (lease, 16384)
        assert client.session.memory.is_own(handle)
        feed(client.session, Reply(number, 2, ()))
        assert client.session.memory.used == 0


def test_inputs_are_kept_until_the_answer_or_the_end_of_the_lease(client: Client) -> None:
    memory = client.session.memory
    ask_large(client)
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

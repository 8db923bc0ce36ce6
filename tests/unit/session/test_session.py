"""Requests in a session: encoding, deadlines, answers, and repetition after a lost connection."""

from __future__ import annotations

import os
import tracemalloc
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

from shmserve.errors import ConnectionLost, DeadlineExceeded, Internal, InvalidRequest, ProtocolError, Unavailable
from shmserve.protocol import codec
from shmserve.protocol.messages import (
    PACKET_BYTES,
    TENSORS,
    Answer,
    Cancel,
    Fail,
    FailHeld,
    Goodbye,
    Handle,
    Infer,
    Map,
    Pong,
    Released,
    Reply,
    Tensor,
    Unmap,
    Welcome,
)
from shmserve.session import Result, Session
from shmserve.shm.extents import memfd
from tests.support.clients.sessions import (
    RecordingTicket,
    ask,
    confirm_loaded,
    connect,
    connected,
    decode,
    decoded,
    feed,
    sent,
)

shapes = of_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)  # within INLINE_BYTES
numbers = st.sampled_from(["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", ">i4", ">f8"])


@given(st.lists(of_numpy.arrays(numbers, shapes), max_size=5), st.booleans())
def test_arrays_of_any_layout_round_trip(arrays: list[np.ndarray[Any, Any]], turned: bool) -> None:
    inputs = {f"x{number}": array.T if turned else array for number, array in enumerate(arrays)}
    session = connected()
    ticket, packets = ask(session, inputs)
    (infer,) = decoded(packets)
    assert infer == Infer(1, "m", 0, infer.inputs)
    assert feed(session, Reply(1, 5, infer.inputs)) == 1
    assert ticket.answer.version == 5
    assert list(ticket.answer) == list(inputs)
    for name, array in inputs.items():
        found = ticket.answer[name]
        assert found.shape == array.shape
        assert found.dtype == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(found, array)


@given(st.lists(st.integers(0, 60_000), max_size=8))
def test_inline_data_is_limited_and_segments_are_announced_first(sizes: list[int]) -> None:
    session = connected()
    _, packets = ask(session, {f"x{number}": np.zeros(size, np.uint8) for number, size in enumerate(sizes)})
    assert all(len(packet.data) <= PACKET_BYTES for packet in packets)
    messages = decoded(packets)
    inline = sum(len(tensor.data) for tensor in messages[-1].inputs if isinstance(tensor.data, bytes))
    assert inline <= 48 * 1024
    handles = [tensor.data[0] for tensor in messages[-1].inputs if isinstance(tensor.data, tuple)]
    mapped = {message.segment for message in messages if isinstance(message, Map)}
    assert {handle.segment for handle in handles} <= mapped, "segments are announced before the first handle"
    spans = sorted((handle.segment, handle.offset, handle.offset + handle.size) for handle in handles)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(spans)), "no two overlap"
    session.close()


def test_many_requests_share_a_packet_until_it_is_full() -> None:
    session = connected()
    x = np.zeros(1000, np.float32)
    for _ in range(100):
        session.infer(RecordingTicket(), "m", {"x": x}, 0.0)
    packets = session.take()
    assert [message.request for message in decoded(packets)] == list(range(1, 101))
    assert len(packets) == 4
    assert session.take() == []


def test_the_number_of_inputs_is_limited() -> None:
    session = connected()
    ask(session, {f"x{number}": np.ones(1) for number in range(TENSORS)})
    with pytest.raises(InvalidRequest, match=f"the request has {TENSORS + 1} inputs; the limit is {TENSORS}"):
        ask(session, {f"x{number}": np.ones(1) for number in range(TENSORS + 1)})


def test_a_segment_is_announced_once_with_its_descriptor_before_its_first_use() -> None:
    limits: list[dict[str, int]] = []
    session = connect(Session(on_limits=limits.append))
    assert session.connected
    assert limits == [{"client_requests": 10}]
    _, packets = ask(session, {"x": np.zeros(10_000)})
    (announced,), (infer,) = decode(packets[0].data), decode(packets[1].data)
    assert announced.name is None
    assert len(packets[0].descriptors) == 1
    memfd.verify(packets[0].descriptors[0], announced.size)
    assert infer.inputs[0].data[0].segment == announced.segment == (1 << 32) + 1
    _, packets = ask(session, {"x": np.zeros(10_000)})
    assert len(packets) == 1, "announced once"
    session.close()


def test_an_answer_settles_once_however_many_messages_it_has() -> None:
    session = connected()
    ticket, _ = ask(session, {"x": 1})
    reply = Reply(1, 1, (Tensor("y", "FP32", (1,), bytes(4)),), {"k": 1})
    assert feed(session, reply, reply) == 1
    assert ticket.ends == 1
    assert isinstance(ticket.answer, Result)
    assert ticket.answer.parameters == {"k": 1}
    assert feed(session, Fail(1, "INTERNAL", "late"), FailHeld(1, "INTERNAL", "late"), Released(1)) == 0
    assert ticket.ends == 1
    session = connected()
    first, second, broken = RecordingTicket(), RecordingTicket(), RecordingTicket()
    for ticket in (first, second, broken):
        session.ask(ticket, "models", 0.0)
    assert feed(session, Answer(1, b'[{"a":', True), Answer(2, b"[2", True)) == 0
    assert feed(session, Answer(2, b"]"), Answer(1, b"1}]"), Answer(3, b"{")) == 3
    assert first.answer == [{"a": 1}]
    assert second.answer == [2]
    assert isinstance(broken.error, Internal)


def test_unknown_error_codes_and_malformed_answers() -> None:
    session = connected()
    strange, unreadable, mistyped = RecordingTicket(), RecordingTicket(), RecordingTicket()
    for ticket in (strange, unreadable, mistyped):
        session.infer(ticket, "m", {}, 0.0)
    feed(session, Fail(1, "NEW_CODE", "new"))
    assert strange.error is not None
    assert strange.error.code == "UNKNOWN"
    session.receive(codec.encode([[33, 2, "one", []], Reply(3, 1, (Tensor("y", "FP99", (1,), bytes(5000)[:4]),))]))
    assert isinstance(unreadable.error, Internal)
    assert "Reply: version" in str(unreadable.error)
    assert isinstance(mistyped.error, Internal)
    with pytest.raises(ProtocolError):
        session.receive(b"\xc1")
    with pytest.raises(ProtocolError):
        session.receive(codec.encode([["no tag"]]))


def test_packets_and_outputs_that_cannot_be_used_fail_their_requests() -> None:
    session = connected()
    ticket, _ = ask(session, {"x": 1})
    assert feed(session, Fail(0, "PROTOCOL", "not a packet")) == 1
    assert isinstance(ticket.error, Internal)
    ticket, _ = ask(session, {"x": 1})
    assert feed(session, Fail(0, "INVALID_ARG", "a handle was returned twice")) == 0
    assert ticket.ends == 0
    for dtype in ("FP32", "unknown"):
        session = connected()
        ticket, _ = ask(session, {})
        assert session.receive(codec.encode([[33, 1, 1, [["y", dtype, [2000], [[5, 0, 8000]]]]]])) == 1
        assert ticket.error is not None
        assert ticket.error.code == "HANDLE_LOST"
        assert session.has_returns, "the handle is returned although it could not be mapped"
        session.close()


def test_requests_fail_at_their_own_deadlines_which_answers_drop() -> None:
    session = connected()
    tickets = [RecordingTicket() for _ in range(3)]
    for ticket, timeout in zip(tickets, (3.0, 1.0, 2.0), strict=True):
        session.infer(ticket, "m", {}, 100.0, timeout=timeout)
    never = [RecordingTicket() for _ in range(2)]
    session.infer(never[0], "m", {}, 100.0, timeout=float("inf"))
    session.ask(never[1], "ready", 100.0, timeout=float("inf"))
    session.take()
    assert session.deadline() == pytest.approx(101.1)
    session.tick(101.0)
    assert [ticket.ends for ticket in tickets] == [0, 0, 0]
    session.tick(101.11)
    assert [ticket.ends for ticket in tickets] == [0, 1, 0]
    assert isinstance(tickets[1].error, DeadlineExceeded)
    assert sent(session) == [Cancel(2)]
    feed(session, Reply(3, 1, ()))
    assert session.deadline() == pytest.approx(103.1)
    session.tick(200.0)
    assert [ticket.ends for ticket in tickets] == [1, 1, 1]
    assert session.deadline() is None
    assert [ticket.ends for ticket in never] == [0, 0]
    session = connected()
    tracemalloc.start()
    try:
        for number in range(3000):
            session.infer(RecordingTicket(), "m", {}, 100.0, timeout=1000.0)
            session.take()
            feed(session, Reply(number + 1, 1, ()))
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 60_000, "20 bytes for each"


def test_inputs_are_kept_until_the_answer_and_unused_memory_is_withdrawn() -> None:
    session = connected()
    ticket, _ = ask(session, {"x": np.zeros(10_000)})
    used = session.memory.used
    assert used
    assert session.cancel(ticket)
    assert not session.cancel(ticket)
    assert session.memory.used == used, "a worker may read it"
    feed(session, Fail(1, "CANCELLED", "as you asked"))
    assert (session.memory.used, session.tickets) == (0, {})
    assert ticket.ends == 0
    session.close()
    session = connected()
    array = session.memory.empty((1 << 18,), np.dtype("f4"))
    (announced,) = sent(session)
    del array
    assert [session.memory.trim() for _ in range(3)] == [False, True, False]
    assert sent(session) == [Unmap(announced.segment)]
    session.close()


def test_requests_are_repeated_to_a_server_without_the_loaded_query() -> None:
    """The connection is lost again before the answer; a request cancelled in the meantime is not repeated."""
    session = connected(owner=1)
    kept, _ = ask(session, {"x": np.arange(3)})
    gone, _ = ask(session, {"x": np.arange(3)})
    for owner in (2, 3):
        session.disconnected()
        (loaded,) = sent(connect(session, owner))
        assert loaded.what == "loaded"
    session.cancel(gone)
    session.take()
    feed(session, Fail(loaded.request, "INVALID_ARG", "unknown query 'loaded'"))
    (infer,) = sent(session)
    assert infer.request == 1
    feed(session, Reply(1, 1, ()))
    assert (kept.ends, gone.ends) == (1, 0)
    assert not session.tickets
    session.close()


def test_unanswered_requests_are_repeated_on_a_new_connection() -> None:
    session = connected(owner=1)
    inputs = {"x": np.arange(10_000.0), "small": np.arange(3)}
    answered, _ = ask(session, inputs)
    open_one, _ = ask(session, inputs)
    step, _ = ask(session, inputs, sequence=9)
    gone, _ = ask(session, inputs)
    question = RecordingTicket()
    session.ask(question, "models", 0.0)
    feed(session, Reply(1, 1, ()))
    session.cancel(gone)
    session.disconnected()
    assert isinstance(step.error, ConnectionLost)
    assert "in the middle of sequence 9; start it again" in str(step.error)
    assert not session.connected
    later, _ = ask(session, inputs)
    mapped, models, loaded = sent(connect(session, 2))
    assert mapped.segment >> 32 == 2
    assert (models.request, models.what) == (5, "models")
    assert (loaded.request, loaded.what) == (7, "loaded")
    feed(session, Answer(7, b'{"loaded": true}'))
    assert session.urgent
    messages = sent(session)
    assert [message.request for message in messages] == [2, 6]
    for infer in messages:
        assert infer.inputs[0].data[0].segment == mapped.segment
    feed(session, Reply(2, 1, ()), Reply(6, 1, ()), Answer(5, b"[]"))
    assert (answered.ends, open_one.ends, step.ends, gone.ends, later.ends, question.ends) == (1, 1, 1, 0, 1, 1)
    assert session.memory.used == 0
    session.close()


def test_a_request_fails_if_there_is_no_memory_to_repeat_it() -> None:
    """It passes on an output that it received, which is copied for a new connection."""
    session = connect(Session(memory_bytes=4096))
    first, _ = ask(session, {})
    extent, output = memfd.create(8192), Tensor("y", "FP32", (2048,), (Handle(1 << 40, 0, 8192),))
    session.receive(codec.encode([Map(1 << 40, 8192), Reply(1, 1, (output,))]), [os.dup(extent.fd)])
    ticket, _ = ask(session, {"x": first.answer["y"]})
    other, _ = ask(session, {})
    session.disconnected()
    confirm_loaded(connect(session, 2))
    assert isinstance(ticket.error, Unavailable)
    assert [message.request for message in sent(session)] == [3]
    assert list(session.tickets.values()) == [other]
    session.close()
    extent.close()


def test_messages_that_end_the_connection() -> None:
    session = Session()
    session.hello(1, "test")
    with pytest.raises(ProtocolError, match="speaks protocol 99, this client 1"):
        feed(session, Welcome(99, 1, "server"))
    with pytest.raises(ProtocolError, match="only 99 here"):
        feed(session, Goodbye("PROTOCOL", "only 99 here"))
    assert str(session.goodbye) == "only 99 here"
    session = connected()
    with pytest.raises(ConnectionLost, match="must be Hello"):
        feed(session, Goodbye("CONNECTION_LOST", "the first message of a connection must be Hello"))
    assert session.goodbye is None, "ZeroMQ has reconnected by itself: the client also reconnects, and does not give up"
    session = connected()
    with pytest.raises(ProtocolError, match="without a descriptor"):
        feed(session, Map(77, 4096))
    feed(session, Unmap(78), Pong(1))


def test_a_sequence_that_begins_before_the_first_connection_is_sent_with_it() -> None:
    session = Session()
    ask(session, {"x": np.arange(3)}, sequence=9, sequence_start=True)
    connect(session)
    _, packets = ask(session, {"x": np.arange(3)}, sequence=9)
    assert [message.request for message in decoded(packets)] == [1, 2]
    feed(session, Reply(1, 1, ()), Reply(2, 1, ()))
    session.close()


def test_requests_that_wait_for_a_loading_server_are_not_overtaken() -> None:
    session = connected(owner=1)
    session.disconnected()
    ask(session, {"x": np.arange(3)}, sequence=9, sequence_start=True)
    (loaded,) = sent(connect(session, 2))
    _, packets = ask(session, {"x": np.arange(3)}, sequence=9)
    assert not decoded(packets)
    _, packets = ask(session, {"x": np.arange(3)})
    assert [message.request for message in decoded(packets)] == [4], "a request without a sequence is sent at once"
    feed(session, Answer(loaded.request, b'{"loaded": true}'))
    assert [message.request for message in sent(session)] == [1, 3]
    _, packets = ask(session, {"x": np.arange(3)}, sequence=9)
    assert [message.request for message in decoded(packets)] == [5]
    feed(session, *[Reply(number, 1, ()) for number in (1, 3, 4, 5)])
    session.close()

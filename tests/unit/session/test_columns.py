"""Requests of one form in one message, and their answers in one message."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shmserve.errors import InvalidRequest, ProtocolError
from shmserve.protocol import codec
from shmserve.protocol.messages import (
    CHUNK_BYTES,
    Cancel,
    Columns,
    Fail,
    FailBatch,
    Handle,
    Infer,
    InferBatch,
    Options,
    Reply,
    ReplyBatch,
    Return,
    Tensor,
    TensorForm,
    Wanted,
)
from shmserve.protocol.worker_messages import rows_of
from shmserve.session import Session, columns
from shmserve.session.columns import in_batches, reply_of
from tests.support.clients.sessions import RecordingTicket, confirm_loaded, connect, decode, feed, sent

BATCH = 64


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MIN_REQUESTS", 2)


def tensor(name: str, rows: int, width: int, fill: int = 0) -> Tensor:
    return Tensor(name, "INT8", (rows, width), bytes([fill]) * (rows * width))


def plain(model: str, version: int, timeout_us: int, inputs: int, rows: int, width: int) -> Infer:
    tensors = tuple(tensor(f"x{index}", rows, width) for index in range(inputs))
    return Infer(1, model, version, tensors, None, timeout_us)


X = tensor("x", 2, 1)
SINGLE = {
    "strings": Infer(1, "m", 0, (Tensor("x", "BYTES", (1,), b"\1\0\0\0a"),)),
    "an unknown data type": Infer(1, "m", 0, (Tensor("x", "FP99", (1,), b"\1"),)),
    "handles": Infer(1, "m", 0, (Tensor("x", "INT8", (1,), (Handle(1 << 32, 0, 1),)),)),
    "a handle after bytes": Infer(1, "m", 0, (X, Tensor("y", "INT8", (2,), (Handle(1 << 32, 0, 2),)))),
    "a frame": Infer(1, "m", 0, (Tensor("x", "INT8", (1,), 0),)),
    "options": Infer(1, "m", 0, (X,), None, 0, Options(priority=1)),
    "outputs": Infer(1, "m", 0, (X,), (Wanted("y"),)),
    "a scalar": Infer(1, "m", 0, (Tensor("x", "INT8", (), b"\1"),)),
    "a scalar after a row": Infer(1, "m", 0, (X, Tensor("y", "INT8", (), b"\1"))),
    "inputs of different length": Infer(1, "m", 0, (X, tensor("y", 1, 1))),
    "no inputs": Infer(1, "m", 0, ()),
    "a negative axis 0": Infer(1, "m", 0, (Tensor("x", "INT8", (-1, 2), b"\1\1"),)),
    "an axis 0 above 63 bits": Infer(1, "m", 0, (Tensor("x", "INT8", (1 << 63, 0), b""),)),
}
plains = st.builds(
    plain,
    model=st.sampled_from("mn"),
    version=st.sampled_from([0, 3]),
    timeout_us=st.sampled_from([0, 5]),
    inputs=st.integers(1, 3),
    rows=st.integers(0, 2),
    width=st.sampled_from([0, 1, 2, 2000]),
)
kinds = st.one_of(plains, plains, st.sampled_from(list(SINGLE.values())), st.just(Cancel(1)))
streams = st.lists(st.tuples(kinds, st.integers(1, 40)), max_size=8)


def numbered(stream: list[tuple[Any, int]]) -> list[Any]:
    messages: list[Any] = []
    for message, count in stream:
        for _ in range(count):
            number = len(messages) + 1
            messages.append(replace(message, request=number))
            if message not in SINGLE.values() and isinstance(message, Infer):
                messages[-1].inputs = tuple(
                    replace(one, data=bytes([number % 256]) * len(one.data))  # type: ignore[arg-type]
                    for one in message.inputs
                )
    return messages


def expanded(messages: list[Any]) -> list[Any]:
    found: list[Any] = []
    for message in messages:
        if isinstance(message, InferBatch):
            found += [
                Infer(row.request, message.model, message.version, row.outputs, None, message.timeout_us)
                for row in rows_of(message.columns)
            ]
        else:
            found.append(message)
    return found


@given(streams, st.integers(1, BATCH))
def test_batches_expand_to_the_original_messages_in_order(stream: list[tuple[Any, int]], most: int) -> None:
    messages = numbered(stream)
    batched = in_batches(list(messages), most)
    assert expanded(batched) == messages
    assert [decode(codec.encode([message])) for message in batched] == [[message] for message in batched]


@given(streams, st.integers(1, BATCH))
def test_batches_are_as_large_as_the_limits_allow_and_no_larger(stream: list[tuple[Any, int]], most: int) -> None:
    batched = in_batches(numbered(stream), most)
    for message in batched:
        if isinstance(message, InferBatch):
            assert message.columns.regular
            assert 2 <= len(message.columns.requests) <= most
            assert sum(len(blob) for data in message.columns.data for blob in data) <= CHUNK_BYTES
    for one, other in pairwise(batched):
        requests = expanded([one])
        if is_plain(requests[0]) and form_of(requests[0]) == form_of(expanded([other])[0]):
            size = 1 + sum(len(tensor.data) for tensor in requests[0].inputs)
            assert len(requests) == most or (len(requests) + 1) * size > CHUNK_BYTES, "two messages where one suffices"


def is_plain(message: Any) -> bool:
    return isinstance(message, Infer) and all(
        replace(single, request=message.request) != message for single in SINGLE.values()
    )


def form_of(message: Any) -> Any:
    if not is_plain(message):
        return None
    forms = [(one.name, one.dtype, one.shape) for one in message.inputs]
    return message.model, message.version, message.timeout_us, forms


@pytest.mark.parametrize("message", SINGLE.values(), ids=SINGLE)
def test_other_requests_are_not_joined(message: Infer) -> None:
    assert in_batches([message] * 3, BATCH) == [message] * 3


ROW = np.arange(3, dtype=np.float32).reshape(1, 3)
FORMS = (TensorForm("y", "FP32", (3,)), TensorForm("z", "INT16", ()))


def batching() -> Session:
    return connect(Session(), batch_requests=BATCH)


def submit(session: Session, count: int, **options: Any) -> list[RecordingTicket]:
    tickets = [RecordingTicket() for _ in range(count)]
    for number, ticket in enumerate(tickets, 1):
        session.infer(ticket, "m", {"x": ROW + number}, 100.0, **options)
    return tickets


def answers(*numbers: int, version: int = 5) -> ReplyBatch:
    """The answer to request n has n rows."""
    data = tuple((np.full((number, 3), number, "<f4").tobytes(), bytes(2 * number)) for number in numbers)
    return ReplyBatch(version, Columns(FORMS, numbers, numbers, data))


def assert_answered(ticket: RecordingTicket, number: int) -> None:
    assert (ticket.ends, ticket.error) == (1, None)
    assert (ticket.answer.version, ticket.answer.parameters, list(ticket.answer)) == (5, {}, ["y", "z"])
    assert ticket.answer["y"].tolist() == [[float(number)] * 3] * number
    assert (ticket.answer["y"].dtype, ticket.answer["z"].tolist()) == (np.float32, [0] * number)
    assert not any(array.flags.writeable for array in ticket.answer.values())


def test_each_ticket_gets_its_own_share_or_the_common_error() -> None:
    session = batching()
    tickets = submit(session, 4)
    (message,) = sent(session)
    assert isinstance(message, InferBatch)
    assert feed(session, answers(3, 1), answers(2)) == 3
    for number in (1, 2, 3):
        assert_answered(tickets[number - 1], number)
    assert tickets[3].ends == 0
    assert list(session.tickets) == [4]
    session = batching()
    tickets = submit(session, 3)
    sent(session)
    assert feed(session, FailBatch((1, 3), "NOT_FOUND", "no such model")) == 2
    assert [str(ticket.error) for ticket in tickets] == ["no such model", "None", "no such model"]
    assert [ticket.ends for ticket in tickets] == [1, 0, 1]
    assert list(session.tickets) == [2]


def test_shapes_follow_the_rows_of_each_request() -> None:
    session, rows = batching(), (2, 0, 1, 3)
    tickets = submit(session, len(rows))
    data = tuple((bytes(12 * count), bytes(2 * count), b"\1\0\0\0a" * count) for count in rows)
    forms = (*FORMS, TensorForm("s", "BYTES", ()))
    feed(session, ReplyBatch(1, Columns(forms, tuple(range(1, len(rows) + 1)), rows, data)))
    for ticket, count in zip(tickets, rows, strict=True):
        assert [array.shape for array in ticket.answer.values()] == [(count, 3), (count,), (count,)]
        assert ticket.answer["s"].tolist() == [b"a"] * count


@pytest.mark.parametrize(("dtype", "blob"), [("FP99", bytes(4)), ("FP32", bytes(3)), ("BYTES", b"\7")])
def test_an_unreadable_output_in_columns_fails_only_its_own_request(dtype: str, blob: bytes) -> None:
    session = batching()
    good, bad = submit(session, 2)
    feed(session, ReplyBatch(1, Columns((TensorForm("y", dtype, ()),), (2,), (1,), ((blob,),))), answers(1))
    assert_answered(good, 1)
    assert bad.answer is None
    assert f"output 'y' ({dtype} [1]) cannot be read" in str(bad.error)


def test_cancelled_and_unknown_requests_are_skipped() -> None:
    session = batching()
    tickets = submit(session, 3)
    sent(session)
    assert session.cancel(tickets[1])
    assert sent(session) == [Cancel(2)]
    assert feed(session, answers(99, 1, 2, 3)) == 3
    assert_answered(tickets[0], 1)
    assert_answered(tickets[2], 3)
    assert tickets[1].ends == 0
    assert session.tickets == {}
    assert feed(session, answers(1, 2, 3)) == 0
    assert [ticket.ends for ticket in tickets] == [1, 0, 1]


def test_a_request_with_kept_inputs_is_answered_and_its_inputs_are_released() -> None:
    session = batching()
    small, large = RecordingTicket(), RecordingTicket()
    session.infer(small, "m", {"x": np.array([[1, 2, 3]], ">f4")}, 100.0)  # in a byte order that must be converted
    session.infer(large, "m", {"x": np.zeros((1, 5000), np.float32)}, 100.0)
    assert None not in (small.kept, large.kept)
    session.take()
    assert session.memory.used
    assert feed(session, answers(1, 2)) == 2
    assert_answered(small, 1)
    assert_answered(large, 2)
    assert [ticket.kept for ticket in (small, large)] == [None, None]
    assert session.memory.used == 0


def test_irregular_columns_end_the_connection_and_settle_nothing() -> None:
    """tests/unit/core/intake/test_columns.py has what is irregular."""
    session = batching()
    tickets = submit(session, 2)
    with pytest.raises(ProtocolError, match="irregular ReplyBatch"):
        feed(session, ReplyBatch(1, Columns(FORMS, (1, 2), (1, 1), ((bytes(12), bytes(2)), (bytes(12),)))))
    assert [ticket.ends for ticket in tickets] == [0, 0]


def test_the_server_sets_the_size_of_an_infer_batch() -> None:
    session = connect(Session(), batch_requests=3)
    submit(session, 7)
    messages = sent(session)
    assert [type(message) for message in messages] == [InferBatch, InferBatch, Infer]
    assert [message.request for message in expanded(messages)] == list(range(1, 8))


def test_a_request_that_cannot_be_encoded_fails_only_itself() -> None:
    session = batching()
    tickets = submit(session, 2)
    bad = [RecordingTicket() for _ in range(3)]
    for ticket in bad:
        session.infer(ticket, "m", {"\ud800": ROW}, 100.0)
    tickets += submit(session, 2)
    assert [message.request for message in expanded(sent(session))] == [1, 2, 6, 7]
    assert [type(ticket.error) for ticket in bad] == [InvalidRequest] * 3
    assert [ticket.ends for ticket in tickets] == [0] * 4
    assert sorted(session.tickets) == [1, 2, 6, 7]


@pytest.mark.parametrize(("most", "kinds"), [(BATCH, [InferBatch]), (0, [Infer, Infer])], ids=["with", "without"])
def test_requests_are_resent_as_the_new_server_can_read_them(most: int, kinds: list[type]) -> None:
    session = batching()
    tickets = submit(session, 3)
    before = expanded(sent(session))
    feed(session, answers(2))
    session.disconnected()
    connect(session, owner=2, batch_requests=most)
    confirm_loaded(session)
    again = sent(session)
    assert [type(message) for message in again] == kinds
    assert expanded(again) == [before[0], before[2]]
    feed(session, answers(3, 1))
    for number, ticket in enumerate(tickets, 1):
        assert_answered(ticket, number)


def test_returns_and_cancellations_keep_their_place_among_requests() -> None:
    session = batching()
    first = submit(session, 2)
    session.cancel(first[0])
    submit(session, 2)
    session.memory.drops.dropped(Handle(1 << 32, 0, 4))
    messages = sent(session)
    assert [type(message) for message in messages] == [Return, InferBatch, Cancel, InferBatch]
    assert [message.columns.requests for message in messages if isinstance(message, InferBatch)] == [(1, 2), (3, 4)]


def test_single_answers_and_replies_instead_of_rows() -> None:
    session = batching()
    tickets = submit(session, 2)
    reply = answers(2).columns
    assert feed(session, Reply(2, 5, reply.tensors(0)), answers(1)) == 2
    assert_answered(tickets[0], 1)
    assert_answered(tickets[1], 2)
    refused, answered = submit(session, 2)
    assert feed(session, Fail(3, "INVALID_ARG", "no"), answers(4)) == 2
    assert isinstance(refused.error, InvalidRequest)
    assert_answered(answered, 4)
    session = connect(Session(row_reply=reply_of), batch_requests=BATCH)
    settled: list[Any] = []

    class Kept(RecordingTicket):
        def settle(self, answer: Any) -> None:
            settled.append(answer)

    session.infer(Kept(), "m", {"x": ROW}, 100.0)
    feed(session, answers(1))
    assert settled == [Reply(1, 5, answers(1).columns.tensors(0))]

"""Columns: what is accepted, what is refused as a whole, and what the broker sends and keeps for them."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import pytest
from msgspec.structs import replace

from shmserve.core.effects import Send, Traced
from shmserve.core.limits import Limits
from shmserve.core.owners.trace import Sample
from shmserve.core.policy import BatchPolicy, ModelPolicy, TensorSpec
from shmserve.core.service.validation import _FORMS, Checker
from shmserve.errors import InvalidRequest
from shmserve.protocol import codec
from shmserve.protocol.messages import (
    BATCH_REQUESTS,
    DIMS,
    INLINE_BYTES,
    NAME_LENGTH,
    PACKET_BYTES,
    PACKET_MESSAGES,
    TENSORS,
    ClientMessage,
    Columns,
    Fail,
    FailBatch,
    Infer,
    InferBatch,
    Ping,
    Pong,
    Reclaim,
    Reply,
    ReplyBatch,
    Tensor,
    TensorForm,
)
from shmserve.protocol.worker_messages import Done, Execute, WorkerOrder
from tests.support.cases import cases
from tests.support.core.fakes.client import FakeClient
from tests.support.core.policies import plain
from tests.support.core.world import Recorded, World

X = TensorSpec("x", "FP32", (-1,))
Y = (TensorSpec("y", "FP32", (-1,)),)
FORM = TensorForm("x", "FP32", (1,))


def columns(count: int, first: int = 1, rows: int = 1, forms: tuple[TensorForm, ...] = (FORM,)) -> Columns:
    numbers = tuple(range(first, first + count))
    return Columns(forms, numbers, (rows,) * count, ((bytes(4 * rows),) * len(forms),) * count)


def serving(max_batch: int = 8, **limits: Any) -> tuple[Recorded, FakeClient]:
    world = Recorded(Limits(**limits))
    world.deploy(ModelPolicy("m", 1, max_batch, (X,), Y, BatchPolicy()), large="y" if limits else "")
    return world, world.connect("c")


def sent(world: Recorded, client: FakeClient, *kinds: type) -> list[Any]:
    """The messages of these kinds to the client, in order."""
    messages = [effect.message for effect in world.of(Send) if effect.peer == client.peer]
    return [message for message in messages if isinstance(message, kinds)]


def send(world: World, client: FakeClient, *batches: Columns, model: str = "m") -> None:
    for batch in batches:
        for number in batch.requests:
            client.sends(number)
    world.turn([(client.peer, InferBatch(model, 0, batch)) for batch in batches])


IRREGULAR = {
    "nothing": Columns((FORM,), (), (), ()),
    "rows too short": Columns((FORM,), (1, 2), (1,), ((bytes(4),), (bytes(4),))),
    "rows too long": Columns((FORM,), (1,), (1, 1), ((bytes(4),),)),
    "data too short": Columns((FORM,), (1, 2), (1, 1), ((bytes(4),),)),
    "data too long": Columns((FORM,), (1,), (1,), ((bytes(4),), (bytes(4),))),
    "too few tensors": Columns((FORM, FORM), (1, 2), (1, 1), ((bytes(4), bytes(4)), (bytes(4),))),
    "too many tensors": Columns((FORM,), (1, 2), (1, 1), ((bytes(4),), (bytes(4), bytes(4)))),
}


@pytest.mark.parametrize("name", IRREGULAR)
def test_an_irregular_batch_is_refused_as_a_whole(name: str) -> None:
    """It is unknown which numbers belong to requests, so the error has no number, and no request is admitted."""
    assert not IRREGULAR[name].regular
    world, client = serving()
    world.turn([(client.peer, InferBatch("m", 0, IRREGULAR[name])), (client.peer, Ping(7))])
    error, pong = sent(world, client, Fail, Pong)
    assert (error.request, error.code) == (0, "PROTOCOL")
    assert f"from 1 to {BATCH_REQUESTS}" in error.text
    assert pong == Pong(7)
    assert not world.core.state.requests
    send(world, client, columns(1))
    world.finish_all()
    assert isinstance(client.answers[1], Reply)


def test_a_batch_has_a_limit_of_requests() -> None:
    world, client = serving()
    world.turn([(client.peer, InferBatch("m", 0, columns(BATCH_REQUESTS + 1)))])
    (error,) = sent(world, client, Fail)
    assert error.request == 0
    assert f"an InferBatch has {BATCH_REQUESTS + 1} requests" in error.text
    assert not world.core.state.requests
    send(world, client, columns(BATCH_REQUESTS))
    world.finish_all()
    assert all(isinstance(client.answers[number], Reply) for number in range(1, BATCH_REQUESTS + 1))


@cases(
    [[["x", "FP32", [1]]] * (TENSORS + 1), [5], [1], [[b""] * (TENSORS + 1)]],
    [[["x" * (NAME_LENGTH + 1), "FP32", [1]]], [5], [1], [[b"abcd"]]],
    [[["x", "123456789", [1]]], [5], [1], [[b"abcd"]]],
    [[["x", "FP32", [1] * DIMS]], [5], [1], [[b"abcd"]]],
    [[["x", "FP32", [1]]], [5], [1], [[bytes(INLINE_BYTES + 1)]]],
    [[["x", "FP32", [1]]], [5], [1], [[[[1, 0, 4]]]]],
    [[["x", "FP32", [1]]], [-5], [1], [[b"abcd"]]],
    [[["x", "FP32", [1]]], [5], [-1], [[b"abcd"]]],
    [[["x", "FP32", [1]]], [2**63], [1], [[b"abcd"]]],
    [[["x", "FP32", [1]]], [0] * (PACKET_MESSAGES + 1), [1], [[b"abcd"]]],
    [[["x", "FP32", [1]]], [5], [1] * (PACKET_MESSAGES + 1), [[b"abcd"]]],
    [[["x", "FP32", [1]]], [5], [1], [[b"abcd"]] * (PACKET_MESSAGES + 1)],
    [[["x", "FP32", [1]]], [5], [1]],
    None,
)
def test_a_batch_over_the_limits_of_a_message_is_refused_and_the_others_are_not(bad: Any) -> None:
    packet = codec.encode([Ping(1), [12, "m", 0, bad], Ping(2)])
    first, refused, last = codec.Codec(ClientMessage, PACKET_MESSAGES).decode(packet)
    assert (first, last) == (Ping(1), Ping(2))
    assert isinstance(refused, codec.Refused)
    assert refused.request == 0
    assert "InferBatch" in refused.text
    assert "columns" in refused.text


def test_requests_of_one_form_go_to_the_worker_and_come_back_in_columns() -> None:
    world, client = serving()
    other = world.connect("other")
    worker = world.worker("m_0")
    worker.in_columns = True
    send(world, client, columns(1))  # runs, so that the next ones wait
    world.slow_to.add(worker.peer)
    for number in (2, 3, 4):
        client.sends(number)
    for number in (1, 2):
        other.sends(number)
    world.turn([(client.peer, InferBatch("m", 0, columns(3, 2))), (other.peer, InferBatch("m", 0, columns(2)))])
    world.finish()
    orders = [message for message in worker.inbox if isinstance(message, Execute)]
    assert orders
    assert all(order.columns is not None and not order.work_items for order in orders)
    world.slow_to.clear()
    world.settle()
    world.finish_all()
    answered = [batch.columns.requests for batch in sent(world, client, ReplyBatch)]
    assert sorted(sum(answered, ())) == [1, 2, 3, 4]
    assert client.answers.keys() == {1, 2, 3, 4}
    assert [batch.columns.requests for batch in sent(world, other, ReplyBatch)] == [(1, 2)]


def test_small_requests_are_split_by_encoded_size() -> None:
    """Each has a tensor of one byte, but their names and numbers fill several packets."""
    world = World()
    world.deploy(plain(max_batch=8192))
    client = world.connect("c")
    (worker,) = world.workers.values()
    world.slow_to.add(worker.peer)
    count = 6000
    tensor = Tensor("x", "FP32", (1, 1), bytes(4))
    world.turn([(client.peer, Infer(number, "m", 0, (tensor,))) for number in range(1, count + 1)])
    orders = [message for message in worker.inbox if isinstance(message, Execute)]
    packets = [codec.encode([order]) for order in orders]
    assert max(map(len, packets)) <= PACKET_BYTES
    assert sum(len(order.work_items) for order in orders) == count


@pytest.mark.parametrize("count", [PACKET_MESSAGES, PACKET_MESSAGES + 1, 3 * PACKET_MESSAGES])
def test_the_worker_can_read_a_batch_of_very_many_requests(count: int) -> None:
    world, client = serving(max_batch=4 * PACKET_MESSAGES)
    worker = world.worker("m_0")
    send(world, client, columns(1, 10**6))
    world.slow_to.add(worker.peer)
    batches = [columns(min(BATCH_REQUESTS, count - at), 1 + at) for at in range(0, count, BATCH_REQUESTS)]
    send(world, client, *batches)
    orders = [message for message in worker.inbox if isinstance(message, Execute)]
    world.slow_to.clear()
    read = codec.Codec(WorkerOrder)
    for order in orders:
        (found,) = read.decode(codec.encode([order]))
        assert isinstance(found, Execute)
    world.settle()
    world.finish_all()
    assert len(client.answers) == count + 1
    assert max(map(len, worker.started)) == count


@pytest.mark.parametrize("answer", [*IRREGULAR.values(), (1, 1), (1, 99)])
def test_a_worker_that_answers_in_invalid_columns_is_stopped(answer: Columns | tuple[int, int]) -> None:
    """Numbers: positions of the answered requests among the running ones; 99: not among them."""
    world, client = serving()
    worker = world.worker("m_0")
    send(world, client, columns(2))
    assert worker.running is not None
    if not isinstance(answer, Columns):
        known = [work.request for work in worker.running.work_items]
        told = tuple(known[number - 1] if number < 99 else 10**9 for number in answer)
        answer = Columns((TensorForm("y", "FP32", (1,)),), told, (1, 1), ((bytes(4),), (bytes(4),)))
    worker.outbox.append(Done(worker.running.number, (), (0, 0, 0, 0), columns=answer))
    world.settle()
    assert worker.dead
    world.advance(world.now + 60 * 10**9)
    world.finish_all()
    assert client.answers.keys() == {1, 2}
    assert not world.core.state.requests


ALIKE: dict[str, tuple[str, Columns, str]] = {
    "a shape of 31 large dimensions": ("m", columns(5, forms=(TensorForm("x", "FP32", (2**62,) * 31),)), "INVALID_ARG"),
    "another data type": ("m", columns(5, forms=(TensorForm("x", "INT64", (1,)),)), "INVALID_ARG"),
    "too many rows": ("m", columns(5, rows=9), "INVALID_ARG"),
    "too few bytes": ("m", replace(columns(5), data=((bytes(2),),) * 5), "INVALID_ARG"),
    "an unknown model": ("nobody", columns(5), "NOT_FOUND"),
}


def test_columns_of_a_client_that_holds_too_much_are_refused() -> None:
    world, client = serving(client_held_bytes=3)
    world.turn([client.infer(1)])
    world.finish()
    send(world, client, columns(2, first=2))
    reclaim, refusal = sent(world, client, Reclaim, FailBatch)
    assert isinstance(reclaim, Reclaim)
    assert (refusal.requests, refusal.code) == ((2, 3), "UNAVAILABLE")
    assert "client_held_bytes" in refusal.text


@pytest.mark.parametrize("name", ALIKE)
def test_requests_refused_for_the_same_reason_share_a_check_and_an_answer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, client = serving()
    checks: list[object] = []
    check = Checker.check

    def counted(self: Checker, *given: Any) -> Any:
        checks.append(given)
        return check(self, *given)

    monkeypatch.setattr(Checker, "check", counted)
    model, batch, code = ALIKE[name]
    send(world, client, batch, model=model)
    (answer,) = sent(world, client, FailBatch)
    assert (answer.requests, answer.code) == ((1, 2, 3, 4, 5), code)
    assert [client.answers[number].text for number in batch.requests] == [answer.text] * 5
    assert len(checks) <= 2
    assert world.core.state.observers.refusals == {code: 5}


def form_of(width: int) -> tuple[TensorForm, ...]:
    return (TensorForm("x", "FP32", (width,)),)


def test_only_accepted_forms_are_kept_and_few_of_them() -> None:
    """Each form could be as large as a packet, and a model would keep many."""
    checker = Checker(ModelPolicy("m", 1, 8, (X,), Y, BatchPolicy()))
    bad = tuple(TensorForm(str(index), "FP32", (1,) * 9) for index in range(20))
    for forms, data in ((bad, (bytes(4),) * 20), (form_of(2), (b"",))):
        refused = checker.form(forms)
        with pytest.raises(InvalidRequest):
            checker.check_rows(refused, 1, data)
        assert checker.form(forms) is not refused
    kept = []
    for width in range(2 * _FORMS):
        form = checker.form(form_of(width))
        assert checker.check_rows(form, 2, (bytes(8 * width),)) is not None
        assert checker.form(form_of(width)) is form
        kept.append(form)
        for rows in range(40):
            with suppress(InvalidRequest):
                checker.check_rows(form, rows, (bytes(4 * rows * width),))
        assert len(form.by_rows) <= 9  # 0 to max_batch
    assert sum(checker.form(form_of(width)) is form for width, form in enumerate(kept)) <= _FORMS


def test_requests_without_inputs_have_no_rows() -> None:
    """Whatever their columns say; otherwise each number would be kept and counted."""
    maybe = TensorSpec("x", "FP32", (1,), optional=True)
    checker = Checker(ModelPolicy("m", 1, 8, (maybe,), Y, BatchPolicy()))
    form = checker.form(())
    assert all(checker.check_rows(form, rows, ()) is None for rows in (1, 2, sys.maxsize))
    assert not form.by_rows


def test_a_form_may_be_evicted_while_requests_of_it_wait() -> None:
    """The requests still run, and are not mistaken for others."""
    world, client = serving(max_batch=4)
    worker = world.worker("m_0")
    send(world, client, columns(2))
    for index in range(_FORMS + 2):
        width = index + 2
        batch = Columns(form_of(width), (10 * width, 10 * width + 1), (1, 1), ((bytes(4 * width),),) * 2)
        send(world, client, batch)
    send(world, client, columns(2, 3))
    world.finish_all()
    assert not client.open
    assert all(isinstance(answer, Reply) for answer in client.answers.values())
    assert len(worker.started) >= _FORMS


def test_a_sampled_request_leaves_the_others_in_their_columns() -> None:
    """Its response is sent alone, and its trace has the batch."""
    world, client = serving()
    world.core.state.observers.traces.change_sampling({"m": Sample(3)})
    world.worker("m_0").in_columns = True
    send(world, client, columns(6))
    world.finish()
    assert [batch.columns.requests for batch in sent(world, client, ReplyBatch)] == [(1, 2, 4, 5)]
    assert [reply.request for reply in sent(world, client, Reply)] == [3, 6]
    traced = world.of(Traced)
    assert [effect.fields["request"] for effect in traced] == [3, 6]
    assert all(len(effect.times) == 4 and effect.fields["batch"] for effect in traced)

"""Shares under unlimited load: a client that sends more does not get more. No client and no model starves another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from shmserve.core import events
from shmserve.core.core import ROWS
from shmserve.core.effects import Send
from shmserve.core.ledger import RELEASED_PER_TURN
from shmserve.core.policy import BatchPolicy, ModelPolicy, QueuePolicy, TimeoutAction
from shmserve.protocol.messages import Handle, Infer, Map, Reply, Tensor
from tests.support.core.fakes.client import FakeClient
from tests.support.core.policies import plain, plain_mapped
from tests.support.core.world import World

MS = 10**6


class Load:
    """Clients that send the next request as soon as they are answered. `served`: rows by client and model."""

    def __init__(self, *models: ModelPolicy) -> None:
        self.world = World(checks=False)
        for policy in models:
            self.world.deploy(policy)
        self.served: Counter[str] = Counter()
        self.numbers = 0
        self.asks: dict[int, tuple[str, int]] = {}

    def infer(self, client: FakeClient, name: str, rows: int) -> tuple[int, Infer]:
        self.numbers += 1
        client.sends(self.numbers)
        self.asks[self.numbers] = name, rows
        tensor = Tensor("x", "FP32", (rows, 1), bytes(4 * rows))
        return client.peer, Infer(self.numbers, name, 0, (tensor,))

    def rounds(self, count: int, plan: list[tuple[FakeClient, str, int, int]]) -> None:
        """Each entry of the plan (client, model, in flight, rows) keeps that many requests in flight."""
        first = [self.infer(client, name, rows) for client, name, flight, rows in plan for _ in range(flight)]
        self.world.turn(first)
        for _ in range(count):
            self.world.now += MS
            self.world.finish_running(MS)
            self.world.turn(self.again())

    def again(self) -> list[tuple[int, Infer]]:
        turn = []
        for client in self.world.clients.values():
            for number in client.order:
                name, rows = self.asks.pop(number)
                self.served[f"{client.name}/{name}"] += rows
                turn.append(self.infer(client, name, rows))
                del client.answers[number]
            client.order.clear()
        return turn


def within(served: Counter[str], parts: int, share: float = 0.10) -> None:
    assert len(served) == parts
    fair = sum(served.values()) / parts
    for name, rows in served.items():
        assert abs(rows - fair) <= share * fair, f"{name} got {rows} of {dict(served)}"


CASES: dict[str, Callable[[FakeClient, FakeClient], list[tuple[FakeClient, str, int, int]]]] = {
    "equal": lambda a, b: [(a, "m", 100, 1), (b, "m", 100, 1)],
    "a thousand in flight against ten": lambda a, b: [(a, "small", 1000, 1), (b, "small", 10, 1)],
    "large requests against small": lambda a, b: [(a, "m", 100, 4), (b, "m", 100, 1)],
    "odd sizes": lambda a, b: [(a, "m", 100, 5), (b, "m", 100, 3)],
    "many large against few small": lambda a, b: [(a, "m", 400, 8), (b, "m", 20, 1)],
}


@pytest.mark.parametrize("case", CASES)
def test_two_clients_of_one_model(case: str) -> None:
    """One batch runs, one waits, one is being formed: a client needs half of three batches in flight."""
    load = Load(plain(), plain("small", 4))
    a, b = load.world.connect("a"), load.world.connect("b")
    load.rounds(400, CASES[case](a, b))
    within(load.served, 2)


def test_a_user_with_many_connections_delays_another_by_one_request() -> None:
    """Each packet has one small request. When the honest client sends its request, one runs, one waits at the worker,
    and one is ahead in the queue."""
    load = Load(plain(max_batch=1))
    crowd = [load.world.connect(f"crowd {number}") for number in range(300)]
    honest = load.world.connect("honest", audience="uid:2000")
    load.rounds(200, [(client, "m", 1, 1) for client in crowd] + [(honest, "m", 1, 1)])
    assert load.served["honest/m"] >= 50


def test_rows_of_mapped_steps_are_requested_in_small_turns() -> None:
    world = World(checks=False)
    world.deploy(plain())
    world.deploy(plain_mapped("e"))
    crowd, honest = world.connect("crowd"), world.connect("honest", audience="uid:2000")
    asks = [(crowd, number, 1000) for number in (1, 2, 3, 4)] + [(honest, 1, 3)]
    turn = []
    for client, number, rows in asks:
        client.sends(number)
        turn.append((client.peer, Infer(number, "e", 0, (Tensor("x", "FP32", (rows, 1), bytes(4 * rows)),))))
    before = len(world.core.state.requests)
    world.turn(turn)
    steps = len(world.core.state.requests) - before - len(asks)
    assert steps == ROWS, "of all clients, whatever they send in a turn"
    requests = world.core.state.requests.values()
    assert sum(request.client.number == honest.peer for request in requests) == 4, "the honest one's are among them"
    world.advance(world.now)
    while not all(client.answers.get(number) for client, number, _ in asks):
        world.now += MS
        world.finish_running(MS)
    for client, number, rows in asks:
        reply = client.answers[number]
        assert isinstance(reply, Reply)
        assert reply.outputs[0].shape == (rows, 1)


def test_requests_that_expire_do_not_cost_their_client_its_share() -> None:
    """Both send more than their share, one of them ten times as much; most of its requests expire."""
    policy = BatchPolicy(default_policy=QueuePolicy(TimeoutAction.REJECT, 20 * MS))
    load = Load(plain(batching=policy))
    world = load.world
    a, b = world.connect("a"), world.connect("b")
    for _ in range(200):
        world.turn([load.infer(a, "m", 1) for _ in range(80)] + [load.infer(b, "m", 1) for _ in range(8)])
        world.advance(world.now + MS)
        world.finish_running(MS)
        for client in (a, b):
            for answer in client.answers.values():
                load.served[client.name] += type(answer).__name__ == "Reply"
            client.answers.clear()
    within(load.served, 2)
    assert sum(load.served.values()) > 200 * 7


def test_the_holds_of_a_disconnected_client_are_released_in_small_turns() -> None:
    load = Load(plain())
    core, client, (worker,) = load.world.core, load.world.connect("a"), load.world.workers.values()
    ledger, owner = core.state.ledger, worker.peer
    segment, holder = owner << 32 | 7, core.state.clients[client.peer]
    ledger.announce(owner, Map(segment, 1 << 20), "")
    for number in range(2 * RELEASED_PER_TURN):
        ledger.give(holder, Handle(segment, 64 * number, 64))
    effects = core.handle([(0, events.Closed(client.peer))], load.world.now)
    turns = 1
    while core.deadline() == load.world.now:
        returned = [len(effect.message.handles) for effect in effects if isinstance(effect, Send)]
        assert returned == [RELEASED_PER_TURN]
        effects = core.tick(load.world.now)
        turns += 1
    assert (turns, ledger.holds, ledger.held_bytes, holder.held_bytes) == (2, {}, 0, 0)

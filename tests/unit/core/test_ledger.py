"""Ownership of memory: forged handles, boundaries, slices, orphans, and a state machine compared with a plain count."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from shmserve.core.effects import Forget, Send
from shmserve.core.ledger import Ledger
from shmserve.core.records import ClientState
from shmserve.errors import InvalidRequest
from shmserve.protocol.messages import Handle, Map, Return
from tests.support.hypothesis_profiles import examples

LAST = 2**63 - 1
WORKER = 1 << 30
SEGMENT = (WORKER << 32) + 1


def client(number: int) -> ClientState:
    return ClientState(number, "uid:1000", "lane", Ledger(), "memfd")


class Told:
    """A ledger, and the messages that it sent."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.a, self.b = client(1), client(2)

    def own(self, who: ClientState, index: int = 1, size: int = 4096) -> int:
        number = (who.number << 32) + index
        self.ledger.announce(who.number, Map(number, size), who.audience)
        return number

    def given(self, who: ClientState, offset: int = 0, size: int = 64) -> Handle:
        if SEGMENT not in self.ledger.segments:
            self.ledger.announce(WORKER, Map(SEGMENT, 1 << 20), "uid:1000")
        handle = Handle(SEGMENT, offset, size)
        self.ledger.show(SEGMENT, who.number)
        self.ledger.give(who, handle)
        return handle

    def said(self) -> list[Any]:
        self.ledger.flush()
        effects, self.ledger.effects = self.ledger.effects, []
        self.ledger.check({1: self.a, 2: self.b})
        return effects


@pytest.fixture
def told() -> Told:
    return Told()


def test_handles_are_inside_an_own_segment(told: Told) -> None:
    number = told.own(told.a)
    for offset, size in ((0, 4096), (4096, 0), (4095, 1), (0, 0)):
        assert told.ledger.resolve(told.a, Handle(number, offset, size)) is None
    over = [(4096, 1), (4095, 2), (0, 4097), (LAST, 1), (LAST, LAST), (1, LAST), (4097, 0), (2**32, 0), (2**62, 2**62)]
    for offset, size in over:
        with pytest.raises(InvalidRequest, match=f"handle of {size} bytes at offset {offset} is outside"):
            told.ledger.resolve(told.a, Handle(number, offset, size))


def test_slices_of_held_blocks_are_resolved(told: Told) -> None:
    told.given(told.a, 0, 64)
    told.given(told.a, 128, 64)
    told.given(told.b, 64, 64)
    for offset, size in ((128, 64), (128, 1), (130, 62), (191, 1), (192, 0)):
        assert told.ledger.resolve(told.a, Handle(SEGMENT, offset, size)) == (SEGMENT, 128)
    for offset, size in ((127, 1), (128, 65), (191, 2), (64, 64), (70, 2), (0, 192), (193, 0)):
        with pytest.raises(InvalidRequest):
            told.ledger.resolve(told.a, Handle(SEGMENT, offset, size))


def test_a_slice_that_is_passed_on(told: Told) -> None:
    """A slice is another hold of the whole block, and is returned as the slice."""
    ledger, whole = told.ledger, told.given(told.a, 64, 64)
    part = Handle(SEGMENT, 80, 8)
    assert ledger.may_pass_on(told.a, part, "uid:1000")
    assert not ledger.may_pass_on(told.a, part, "uid:2000")
    assert not ledger.may_pass_on(told.b, part, "uid:1000")
    assert not ledger.may_pass_on(told.a, Handle(SEGMENT, 120, 16), "uid:1000")
    assert not ledger.may_pass_on(told.a, Handle(SEGMENT, 80, 0), "uid:1000")
    for _ in range(2):
        ledger.give(told.b, part)
    ledger.give(told.b, Handle(SEGMENT, 64, 8))
    ledger.give(told.b, whole)
    assert told.b.held_bytes == 4 * 64
    told.said()
    ledger.take_back(told.a, whole)
    for wrong in (Handle(SEGMENT, 80, 16), Handle(SEGMENT, 96, 8), Handle(SEGMENT, 64, 16)):
        with pytest.raises(InvalidRequest, match="return each handle once, unchanged"):
            ledger.take_back(told.b, wrong)
    ledger.take_back(told.b, whole)
    with pytest.raises(InvalidRequest, match="return each handle once, unchanged"):
        ledger.take_back(told.b, whole)
    ledger.take_back(told.b, Handle(SEGMENT, 64, 8))
    ledger.take_back(told.b, part)
    assert not told.said()
    ledger.take_back(told.b, part)
    assert told.said() == [Send(WORKER, Return((whole,)))]
    assert not told.b.held_bytes


def test_a_segment_is_announced_and_withdrawn_once_by_its_owner(told: Told) -> None:
    number = told.own(told.a)
    with pytest.raises(InvalidRequest, match="has already been announced"):
        told.own(told.a)
    with pytest.raises(InvalidRequest, match="not in this connection's range"):
        told.ledger.announce(2, Map(number + 1, 10), "uid:1000")
    with pytest.raises(InvalidRequest, match="not announced by this connection"):
        told.ledger.withdraw(2, number)
    told.ledger.withdraw(1, number)
    assert told.said() == [Forget(number)]
    with pytest.raises(InvalidRequest, match="not announced by this connection"):
        told.ledger.withdraw(1, number)


def test_many_returns_are_split_into_several_messages(told: Told) -> None:
    handles = [told.given(told.a, 64 * n) for n in range(5000)]
    told.said()
    for handle in handles:
        told.ledger.take_back(told.a, handle)
    assert [len(effect.message.handles) for effect in told.said()] == [4096, 904]


class LedgerMachine(RuleBasedStateMachine):
    """Blocks of one worker, three clients, and pins, compared with two counters."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.ledger.announce(WORKER, Map(SEGMENT, 1 << 40), "uid:1000")
        self.clients = {number: client(number) for number in (1, 2, 3)}
        self.held: Counter[tuple[int, Handle]] = Counter()
        self.pins: Counter[Handle] = Counter()
        self.out: set[Handle] = set()
        self.next = 0
        self.alive = True

    def said(self) -> None:
        self.ledger.flush()
        effects, self.ledger.effects = self.ledger.effects, []
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Return):
                assert self.alive
                for handle in effect.message.handles:
                    self.out.remove(handle)

    @precondition(lambda self: self.alive and self.clients)
    @rule(who=st.integers(0, 2), size=st.integers(1, 100), gap=st.integers(0, 5))
    def give(self, who: int, size: int, gap: int) -> None:
        holder = list(self.clients.values())[who % len(self.clients)]
        handle = Handle(SEGMENT, self.next, size)
        self.next += size + gap
        assert self.ledger.is_new(handle, "uid:1000")
        self.ledger.give(holder, handle)
        self.out.add(handle)
        self.held[holder.number, handle] += 1

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), who=st.integers(0, 2))
    def give_to_another(self, which: int, who: int) -> None:
        handle = sorted(self.held, key=lambda pair: pair[1].offset)[which % len(self.held)][1]
        if SEGMENT in self.ledger.segments and self.clients:
            holder = list(self.clients.values())[who % len(self.clients)]
            self.ledger.give(holder, handle)
            self.held[holder.number, handle] += 1

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def take_back(self, which: int) -> None:
        number, handle = sorted(self.held, key=lambda pair: (pair[1].offset, pair[0]))[which % len(self.held)]
        self.ledger.take_back(self.clients[number], handle)
        self.held[number, handle] -= 1
        self.held += Counter()

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), skip=st.integers(0, 3), size=st.integers(0, 99))
    def pin(self, which: int, skip: int, size: int) -> None:
        number, handle = sorted(self.held, key=lambda pair: (pair[1].offset, pair[0]))[which % len(self.held)]
        inside = Handle(SEGMENT, handle.offset + min(skip, handle.size - 1), 0)
        inside = Handle(SEGMENT, inside.offset, min(size, handle.offset + handle.size - inside.offset))
        place = self.ledger.resolve(self.clients[number], inside)
        assert place == (SEGMENT, handle.offset)
        assert self.ledger.pin(place) == handle
        self.pins[handle] += 1

    @precondition(lambda self: self.pins)
    @rule(which=st.integers(0, 99))
    def unpin(self, which: int) -> None:
        handle = sorted(self.pins, key=lambda handle: handle.offset)[which % len(self.pins)]
        self.ledger.unpin(handle)
        self.pins[handle] -= 1
        self.pins += Counter()

    @precondition(lambda self: len(self.clients) > 1)
    @rule(who=st.integers(0, 2))
    def client_dies(self, who: int) -> None:
        number = list(self.clients)[who % len(self.clients)]
        self.ledger.client_died(self.clients.pop(number))
        while self.ledger.departed:
            self.said()
            self.ledger.check(self.clients)
            self.ledger.release_departed()
        self.held = Counter({pair: count for pair, count in self.held.items() if pair[0] != number})

    @rule(really=st.integers(0, 9))
    def worker_dies(self, really: int) -> None:
        if really == 0 and self.alive:
            self.said()
            self.alive = False
            self.ledger.worker_died(WORKER)

    @invariant()
    def the_account_is_right(self) -> None:
        self.said()
        self.ledger.check(self.clients)
        live = {handle for _, handle in self.held} | set(self.pins)
        assert {hold.handle for hold in self.ledger.holds.values()} == live
        if self.alive:
            assert self.out == live
        else:
            assert (SEGMENT in self.ledger.segments) == bool(live)
        for number, holder in self.clients.items():
            mine = sum(handle.size * count for (who, handle), count in self.held.items() if who == number)
            assert holder.held_bytes == mine


@pytest.mark.hypothesis
@pytest.mark.parametrize("step", [None, 1])
def test_ledger_machine(step: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """1: the holds of a disconnected client are released one per turn."""
    for name in ("AT_ONCE", "PER_TURN") if step else ():
        monkeypatch.setattr(f"shmserve.core.ledger.RELEASED_{name}", step)
    run_state_machine_as_test(LedgerMachine, settings=settings(max_examples=examples(60)))

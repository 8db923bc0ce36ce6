"""State transitions follow the tables."""

from __future__ import annotations

from enum import Enum

import pytest

from shmserve.core.ledger import Ledger
from shmserve.core.policy import InstanceSpec
from shmserve.core.records import ClientState, Instance, Request, Version
from shmserve.core.service.form import Reason
from shmserve.core.states import (
    MOVES,
    BatchState,
    IllegalMove,
    InstanceState,
    RequestState,
    SequenceState,
    VersionState,
)
from tests import ROOT

PAGE = ROOT / "docs" / "batching.md"


def test_an_illegal_transition_is_refused_and_describes_the_object() -> None:
    client, version = ClientState(7, "uid:1000", "lane", Ledger()), Version("m", 1, [])
    request = Request(42, client, client, client, 3, version, (), None, None, 2, 2, 0, None, (), (), 1000)
    request.state = RequestState.ENDED
    with pytest.raises(IllegalMove, match=r"request 42: ENDED -> SENT is not a legal transition; details: .*2 rows"):
        request.move(RequestState.SENT)
    assert request.state is RequestState.ENDED
    instance = Instance(InstanceSpec("m_0"), peer=9, deaths=2, reason="signal SIGSEGV")
    instance.state = InstanceState.STOPPED
    with pytest.raises(IllegalMove, match=r"instance m_0: .* 2 deaths in a row, last reason signal SIGSEGV"):
        instance.move(InstanceState.READY)


@pytest.mark.parametrize("kind", [RequestState, BatchState, InstanceState, VersionState, SequenceState])
def test_every_state_has_a_row_and_is_reachable(kind: type[Enum]) -> None:
    first, *others = kind
    moves = {state: MOVES[state] for state in (first, *others)}
    reached = set().union(*moves.values())
    assert set(others) <= reached <= set(kind), "all but the first state are reached from another one of their kind"
    # An UNAVAILABLE ensemble may recover with its models.
    assert any(not following for following in moves.values()) or kind is VersionState


def test_the_page_explains_every_reason() -> None:
    text = PAGE.read_text()
    for reason in Reason:
        assert f"- `{reason.value}`:" in text

"""Memory of outputs in host memory: its limit, its reuse and its audiences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from shmserve.errors import Unavailable
from shmserve.protocol.messages import Handle
from shmserve.repo.backends import OUTPUT_LIMIT
from tests.support.workers.batch_parts import Memory

SIZE = 1_000_000


@pytest.fixture
def memory() -> Iterator[Memory]:
    with closing(Memory()) as memory:
        yield memory


def test_outputs_are_limited_until_they_are_returned(memory: Memory, capfd: pytest.CaptureFixture[str]) -> None:
    arenas = memory.arenas
    arenas.limit = 2 << 20
    first, second = (arenas.allocate("internal", SIZE).handle() for _ in range(2))
    with pytest.raises(Unavailable, match=OUTPUT_LIMIT):
        arenas.allocate("internal", SIZE)
    arenas.free([first])
    assert arenas.allocate("internal", SIZE).handle() == first, "the block that was freed last is used first"
    arenas.free([Handle(second.segment, 77, 8), Handle(5, 0, 8), second])
    assert capfd.readouterr().err.count("cannot be freed") == 2, "wrong handles are logged and ignored"
    assert arenas.allocate("internal", SIZE).handle() == second


def test_memory_is_not_reused_across_audiences(memory: Memory) -> None:
    memory.arenas.limit = 3 << 20
    audiences = ["uid:1", "posix:uid:2", "uid:3", "uid:1"]
    for audience in audiences:
        memory.arenas.free([memory.arenas.allocate(audience, 2 * SIZE).handle()])
    assert [message.audience for message in memory.maps] == audiences
    assert len({message.segment for message in memory.maps}) == 4

"""CUDA IPC between processes, without a server: what the driver does, which the server relies on.

Each test has its own processes, since some leave a device in an unknown state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from bench.lib.child import Child

pytestmark = [pytest.mark.gpu, pytest.mark.process]

SIZE = 8 << 20
OPENED = 200
"""Segments that a process has open at the same time."""
Peers = Callable[[], Child]


@pytest.fixture
def peer(cupy: object) -> Iterator[Peers]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(Child("tests.gpu.peers:memory"))


def export(owner: Child, name: str = "m", value: int = 1, size: int = SIZE) -> str:
    handle: str = owner.ask(do="allocate", name=name, size=size)["handle"]
    assert owner.ask(do="fill", name=name, value=value) == {}
    return handle


def open_(reader: Child, handle: str, name: str = "m", size: int = SIZE) -> dict[str, object]:
    return reader.ask(do="open", name=name, handle=handle, size=size)


def values(child: Child, name: str = "m") -> object:
    answer = child.ask(do="values", name=name)
    return answer.get("values", answer)


def assert_usable(child: Child) -> None:
    """The process can still use the device."""
    assert "address" in child.ask(do="allocate", name="fresh", size=SIZE)
    assert child.ask(do="fill", name="fresh", value=77) == {}
    assert values(child, "fresh") == [77]
    assert child.ask(do="free", name="fresh") == {}


def test_memory_is_shared_both_ways_and_every_write_is_seen(peer: Peers) -> None:
    first, second = peer(), peer()
    for owner, reader, name in ((first, second, "a"), (second, first, "b")):
        assert "address" in open_(reader, export(owner, name, 5), name)
        for value in range(20):
            owner.ask(do="fill", name=name, value=value)
            assert values(reader, name) == [value]
        assert reader.ask(do="fill", name=name, value=66) == {}
        assert values(owner, name) == [66]


def test_several_processes_open_the_same_memory_again_and_again(peer: Peers) -> None:
    owner, readers = peer(), [peer() for _ in range(3)]
    handle = export(owner)
    for value in (4, 5, 6):
        owner.ask(do="fill", name="m", value=value)
        for reader in readers:
            assert "address" in open_(reader, handle)
        assert [values(reader) for reader in readers] == [[value]] * 3
        for reader in readers:
            assert reader.ask(do="close", name="m") == {}


def test_the_size_of_opened_memory_is_that_of_its_allocation(hardware: None, peer: Peers) -> None:
    """The server refuses segments that are announced larger than they are by this."""
    owner, reader = peer(), peer()
    for name, size in (("a", 2 << 20), ("b", 6 << 20)):
        open_(reader, export(owner, name, size=size), name, size)
        assert reader.ask(do="size", name=name) == {"size": size, "offset": 0, "status": 0}


def test_many_segments_are_open_at_once(peer: Peers) -> None:
    owner, reader = peer(), peer()
    for number in range(OPENED):
        handle = export(owner, str(number), number % 250, 2 << 20)
        assert "address" in open_(reader, handle, str(number), 2 << 20), number
    for number in range(0, OPENED, 37):
        assert values(reader, str(number)) == [number % 250]


def test_memory_that_its_owner_frees_while_it_is_open(
    peer: Peers, record_property: Callable[[str, object], None]
) -> None:
    """CUDA does not define what the reader sees. The server never frees exported memory before its process ends; a
    client's library may. The reader must stay usable."""
    owner, reader = peer(), peer()
    open_(reader, export(owner, value=8))
    assert owner.ask(do="free", name="m") == {}
    export(owner, "next", 9)
    record_property("values after the owner has freed it", values(reader))
    assert_usable(owner)
    assert_usable(reader)


def test_memory_of_an_owner_that_was_killed(peer: Peers, record_property: Callable[[str, object], None]) -> None:
    """The reader sees the old values or an error, and can still use the device. A new open is refused."""
    owner, reader = peer(), peer()
    handle, other = export(owner, value=8), export(owner, "other")
    open_(reader, handle)
    owner.kill()
    owner.close()
    found = values(reader)
    record_property("values after the owner was killed", found)
    assert found == [8] or isinstance(found, dict)
    assert "error" in open_(reader, other, "other")
    assert_usable(reader)


def test_an_invalid_handle_is_refused(hardware: None, peer: Peers) -> None:
    reader = peer()
    assert "error" in open_(reader, bytes(64).hex())
    assert "error" in open_(reader, bytes(range(64)).hex())
    assert_usable(reader)

"""The offset allocator against a model that keeps a map of bytes."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, invariant, multiple, rule

from shmserve.errors import Internal, InvalidRequest
from shmserve.shm import blocks as blocks_module
from shmserve.shm.blocks import Blocks
from tests.support.hypothesis_profiles import examples

SIZE = 4096


class Naive(RuleBasedStateMachine):
    """Every byte of the naive model knows the block that it belongs to."""

    held: Bundle[int] = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks(SIZE, 64)
        self.owner: list[int | None] = [None] * SIZE
        self.sizes: dict[int, int] = {}

    def take(self, offset: int, size: int) -> None:
        assert offset not in self.sizes
        assert offset >= 0
        assert offset + size <= SIZE
        assert all(owner is None for owner in self.owner[offset : offset + size])
        self.owner[offset : offset + size] = [offset] * size
        self.sizes[offset] = size

    def drop(self, offset: int) -> int:
        size = self.sizes.pop(offset)
        self.owner[offset : offset + size] = [None] * size
        return size

    def longest_run(self) -> int:
        """The most whole aligned units in a row that nobody has."""
        best = run = 0
        for unit in range(0, SIZE, 64):
            free = all(owner is None for owner in self.owner[unit : unit + 64])
            run = run + 64 if free else 0
            best = max(best, run)
        return best

    @rule(target=held, size=st.one_of(st.integers(0, 300), st.integers(0, SIZE + 64)))
    def allocate(self, size: int) -> MultipleResults[int] | int:
        offset = self.blocks.allocate(size)
        rounded = max(64, -(-size // 64) * 64)
        if offset is None:
            assert self.longest_run() < rounded
            return multiple()
        assert offset % 64 == 0
        self.take(offset, rounded)
        return offset

    @rule(target=held, offset=consumes(held), data=st.data())
    def split(self, offset: int, data: st.DataObject) -> MultipleResults[int]:
        whole = self.drop(offset)
        sizes = data.draw(st.lists(st.integers(1, 1 + whole // 4), min_size=1, max_size=4))
        while sum(sizes) > whole:
            sizes.pop()
        offsets = self.blocks.split(offset, sizes)
        assert offsets[0] == offset
        sizes[-1] += whole - sum(sizes)
        for piece, size in zip(offsets, sizes, strict=True):
            self.take(piece, size)
        return multiple(*offsets)

    @rule(offset=consumes(held))
    def free(self, offset: int) -> None:
        assert self.blocks.free(offset) == self.drop(offset)
        with pytest.raises(InvalidRequest):
            self.blocks.free(offset)

    @rule()
    def largest(self) -> None:
        assert self.blocks.largest_free == self.longest_run()

    @invariant()
    def agrees(self) -> None:
        self.blocks.check()
        assert self.blocks.used == sum(self.sizes.values())
        assert self.blocks.free_bytes == SIZE - self.blocks.used
        for offset, size in self.sizes.items():
            assert self.blocks.size_of(offset) == size

    def teardown(self) -> None:
        for offset in list(self.sizes):
            self.blocks.free(offset)
        assert self.blocks.used == 0
        assert self.blocks.largest_free == SIZE
        self.blocks.check()


TestNaive = Naive.TestCase
TestNaive.settings = settings(max_examples=examples(60), stateful_step_count=40)


def test_the_block_freed_last_is_given_first() -> None:
    blocks = Blocks(1 << 20)
    offsets = [blocks.allocate(1000) for _ in range(5)]
    order = [offsets[1], offsets[4], offsets[0]]
    for offset in order:
        assert offset is not None
        blocks.free(offset)
    assert [blocks.allocate(1000) for _ in range(3)] == order[::-1]


def test_a_split_block_is_found_again_when_its_last_piece_is_back() -> None:
    blocks = Blocks(1 << 20)
    first = blocks.allocate(32 * 400)
    assert first == 0
    pieces = blocks.split(first, [400] * 32)
    random.Random(1).shuffle(pieces)
    for piece in pieces:
        blocks.free(piece)
    assert blocks.allocate(32 * 400) == first


def test_the_rest_of_a_split_belongs_to_the_last_piece() -> None:
    blocks = Blocks(1024)
    offset = blocks.allocate(200)
    assert offset is not None
    assert blocks.split(offset, [3, 5]) == [0, 3]
    assert (blocks.size_of(0), blocks.size_of(3)) == (3, 253)
    assert blocks.split(3, [100]) == [3]
    assert blocks.size_of(3) == 253


@pytest.mark.parametrize("sizes", [[], [0], [10, 0, 10], [-1, 20], [100, 29], [2**63]])
def test_a_split_that_cannot_be_changes_nothing(sizes: list[int]) -> None:
    blocks = Blocks(1024)
    offset = blocks.allocate(128)
    assert offset is not None
    with pytest.raises(InvalidRequest, match="128 bytes"):
        blocks.split(offset, sizes)
    blocks.check()
    assert blocks.free(offset) == 128


def test_no_bytes_still_are_a_block_of_their_own() -> None:
    blocks = Blocks(256)
    offsets = [blocks.allocate(0) for _ in range(4)]
    assert sorted(offset for offset in offsets if offset is not None) == [0, 64, 128, 192]
    assert blocks.allocate(0) is None


@pytest.mark.parametrize("offset", [1, -64, 64, 2**63 - 1, 2**64])
def test_what_is_no_block_cannot_be_freed_sized_or_split(offset: int) -> None:
    blocks = Blocks(256)
    assert blocks.allocate(64) == 0
    for attempt in (blocks.free, blocks.size_of, lambda at: blocks.split(at, [1])):
        with pytest.raises(InvalidRequest, match=str(offset)):
            attempt(offset)
    with pytest.raises(InvalidRequest, match="-1 bytes"):
        blocks.allocate(-1)
    assert blocks.allocate(2**63) is None


def test_a_size_that_is_no_multiple_of_the_alignment_loses_only_its_tail() -> None:
    blocks = Blocks(200)
    assert blocks.largest_free == 192
    assert blocks.allocate(192) == 0
    assert blocks.allocate(1) is None
    blocks.check()


@pytest.mark.parametrize(("size", "align"), [(0, 64), (-1, 64), (64, 0), (64, 48)])
def test_senseless_blocks_are_refused(size: int, align: int) -> None:
    with pytest.raises(Internal):
        Blocks(size, align)


def test_many_sizes_do_not_gather_without_end() -> None:
    blocks = Blocks(1 << 22)
    for size in range(64, 64 * 3000, 64):
        offset = blocks.allocate(size)
        assert offset is not None
        blocks.free(offset)
    assert len(blocks._recent) <= blocks_module.RECENT_BLOCKS
    assert blocks.largest_free == 1 << 22


def test_freed_pieces_and_blocks_together_hold_the_largest_request() -> None:
    chance = random.Random(7)
    blocks = Blocks(1 << 20)
    held: list[int] = []
    for _ in range(5000):
        if held and chance.random() < 0.5:
            blocks.free(held.pop(chance.randrange(len(held))))
            continue
        size = chance.randrange(1, 5000)
        offset = blocks.allocate(size)
        if offset is None:
            continue
        if size > 10 and chance.random() < 0.3:
            held += blocks.split(offset, [size // 3, size // 3, 1])
        else:
            held.append(offset)
    blocks.check()
    for offset in held:
        blocks.free(offset)
    assert blocks.allocate(1 << 20) == 0

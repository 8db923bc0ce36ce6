"""The offset allocator, compared with a model that keeps the size of each block."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, invariant, multiple, rule

from shmserve.errors import Internal, InvalidRequest
from shmserve.shm.blocks import Blocks
from tests.support.hypothesis_profiles import examples

SIZE = 4096


class Naive(RuleBasedStateMachine):
    held: Bundle[int] = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks(SIZE, 64)
        self.sizes: dict[int, int] = {}
        """Offset -> size of each block."""

    def longest_run(self) -> int:
        """Of free bytes, in units of 64."""
        starts = [-(-(offset + size) // 64) * 64 for offset, size in sorted(self.sizes.items())]
        ends = [offset // 64 * 64 for offset in sorted(self.sizes)]
        return max(end - start for start, end in zip([0, *starts], [*ends, SIZE], strict=True))

    @rule(target=held, size=st.one_of(st.integers(0, 300), st.integers(0, SIZE + 64)))
    def allocate(self, size: int) -> MultipleResults[int] | int:
        offset = self.blocks.allocate(size)
        rounded = max(64, -(-size // 64) * 64)
        if offset is None:
            assert self.longest_run() < rounded
            return multiple()
        assert offset % 64 == 0
        self.sizes[offset] = rounded
        return offset

    @rule(target=held, offset=consumes(held), data=st.data())
    def split(self, offset: int, data: st.DataObject) -> MultipleResults[int]:
        whole = self.sizes.pop(offset)
        sizes = data.draw(st.lists(st.integers(1, 1 + whole // 4), min_size=1, max_size=4))
        while sum(sizes) > whole:
            sizes.pop()
        offsets = self.blocks.split(offset, sizes)
        assert offsets[0] == offset
        sizes[-1] += whole - sum(sizes)
        self.sizes |= zip(offsets, sizes, strict=True)
        return multiple(*offsets)

    @rule(offset=consumes(held))
    def free(self, offset: int) -> None:
        assert self.blocks.free(offset) == self.sizes.pop(offset)
        with pytest.raises(InvalidRequest):
            self.blocks.free(offset)

    @invariant()
    def agrees(self) -> None:
        """No block overlaps the next one or the end."""
        offsets = [*sorted(self.sizes), SIZE]
        assert offsets[0] >= 0
        assert all(offset + self.sizes[offset] <= following for offset, following in pairwise(offsets))
        assert self.blocks.used == sum(self.sizes.values())
        assert self.blocks.free_bytes == SIZE - self.blocks.used
        for offset, size in self.sizes.items():
            assert self.blocks.size_of(offset) == size

    def teardown(self) -> None:
        for offset in list(self.sizes):
            self.blocks.free(offset)
        assert self.blocks.used == 0
        assert self.blocks.allocate(SIZE) == 0


TestNaive = Naive.TestCase
TestNaive.settings = settings(max_examples=examples(60), stateful_step_count=40)


@pytest.mark.parametrize("offset", [1, -64, 64, 2**63 - 1, 2**64])
def test_an_unknown_offset_is_refused(offset: int) -> None:
    blocks = Blocks(256)
    assert blocks.allocate(64) == 0
    for attempt in (blocks.free, blocks.size_of, lambda at: blocks.split(at, [1])):
        with pytest.raises(InvalidRequest, match=str(offset)):
            attempt(offset)
    with pytest.raises(InvalidRequest, match="-1 bytes"):
        blocks.allocate(-1)
    assert blocks.allocate(2**63) is None


def test_sizes_alignments_and_reuse() -> None:
    blocks = Blocks(200)
    assert (blocks.allocate(192), blocks.allocate(1)) == (0, None), "only the tail below the alignment is unusable"
    for size, align in ((0, 64), (-1, 64), (64, 0), (64, 48)):
        with pytest.raises(Internal):
            Blocks(size, align)
    blocks = Blocks(1 << 20)
    offsets = [blocks.allocate(1000) or 0 for _ in range(5)]
    order = [offsets[1], offsets[4], offsets[0]]
    for offset in order:
        blocks.free(offset)
    assert [blocks.allocate(1000) for _ in range(3)] == order[::-1]
    for offset in blocks.split(blocks.allocate(128) or 0, [64, 64]):
        blocks.free(offset)
    pair = {blocks.allocate(64) or 0 for _ in range(2)}
    for _ in range(300):  # more than are kept unmerged
        for offset in sorted(pair):
            blocks.free(offset)
        assert [blocks.allocate(64) for _ in pair] == sorted(pair, reverse=True), "the last one freed is used first"

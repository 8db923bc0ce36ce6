"""Histograms of durations with power-of-two buckets.

Invariant: bucket k counts durations from 2**(k-1) to 2**k - 1 ns, bucket 0 those of 0 ns; so the index is
`ns.bit_length()`, without a function call.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from msgspec import Struct, field

BUCKETS = 66
"""Enough for the difference of any two 63-bit times, valid or not."""


def empty() -> list[int]:
    return [0] * BUCKETS


class Durations(Struct):
    """A histogram with the sum of its durations."""

    counts: list[int] = field(default_factory=empty)
    sum_ns: int = 0

    def add(self, ns: int) -> None:
        self.counts[ns.bit_length()] += 1
        self.sum_ns += ns

    @property
    def count(self) -> int:
        return sum(self.counts)


def edge(bucket: int) -> int:
    """The longest duration of the bucket, in ns."""
    return (1 << bucket) - 1


def cumulative(counts: Sequence[int], first: int, last: int) -> list[int]:
    """The number of durations up to `edge(bucket)`, for the buckets from `first` to `last`."""
    return list(accumulate(counts))[first : last + 1]


def quantile(counts: Sequence[int], share: float) -> float:
    """Estimates the duration in ns that `share` of all do not exceed, by interpolation within its bucket.

    The error is less than a factor of two. 0 if nothing was counted.
    """
    total = sum(counts)
    rank = share * total
    below = 0
    for bucket, count in enumerate(counts):
        if count and below + count >= rank:
            low, high = (1 << bucket) >> 1, edge(bucket)
            return low + (high - low) * (rank - below) / count
        below += count
    return 0.0

"""Durations in buckets that double: one shift of a duration says where it is counted.

The rule of the file: bucket k counts durations of 2**(k-1) up to 2**k - 1 ns, bucket 0 those of none; so what is
counted where is `ns.bit_length()`, and nobody needs a function for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

BUCKETS = 66
"""A difference of any two times that fit in 63 bits has one, also a wrong one."""


def empty() -> list[int]:
    return [0] * BUCKETS


def edge(bucket: int) -> int:
    """The longest duration in it, in ns."""
    return (1 << bucket) - 1


def cumulative(counts: Sequence[int], first: int, last: int) -> list[int]:
    """How many durations are at most `edge(bucket)` long, for the buckets from `first` to `last`."""
    return list(accumulate(counts))[first : last + 1]


def quantile(counts: Sequence[int], share: float) -> float:
    """About the duration in ns that `share` of all do not exceed: spread evenly over the bucket that it lies in.

    It is in the same bucket as the true one, and so wrong by less than a factor of two. 0 where nothing was counted.
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

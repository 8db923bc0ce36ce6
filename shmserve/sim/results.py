"""What came of it: counts, times, batch sizes, and a digest of all answers.

The rule of the file: no number here depends on the machine that computed it.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import Any
from zlib import crc32

from msgspec import Struct, field

_BITS = 7
"""Durations are told apart to 1/64 of their size."""
_PENDING = 1 << 14
SECOND = 1_000_000_000


class Histogram:
    """Durations in ns, each counted to within 1/64 of it; the mean is exact."""

    __slots__ = ("count", "counts", "largest", "total")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.count = self.total = self.largest = 0

    def add(self, ns: int) -> None:
        shift = ns.bit_length() - _BITS
        bucket = (shift << (_BITS - 1)) + (ns >> shift) if shift > 0 else ns
        counts = self.counts
        counts[bucket] = counts.get(bucket, 0) + 1
        self.count += 1
        self.total += ns
        if ns > self.largest:
            self.largest = ns

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> int:
        """What `share` of all do not exceed: the upper end of the bucket that it lies in, or the largest of all."""
        below, rank = 0, share * self.count
        for bucket in sorted(self.counts):
            below += self.counts[bucket]
            if below >= rank:
                return min(_upper(bucket), self.largest)
        return 0


def _upper(bucket: int) -> int:
    half = 1 << (_BITS - 1)
    if bucket < 2 * half:
        return bucket
    shift = bucket // half - 1
    return ((bucket - shift * half + 1) << shift) - 1


class ModelResult(Struct):
    """Of the requests that callers sent to one model, and of the batches that its instances ran."""

    name: str
    sent: int = 0
    answered: int = 0
    in_time: int = 0
    """Answered before the deadline; those without one count too."""
    good: int = 0
    """Of those in time, the ones that came while requests were still being sent."""
    overdue_ns: int = 0
    """The most that an answer, of whatever kind, came after the deadline."""
    failed: dict[str, int] = {}
    """Answered with an error, by its code."""
    abandoned: int = 0
    """Their client died first."""
    parts: int = 0
    latency: Histogram = field(default_factory=Histogram)
    """From call to answer, of those answered."""
    batches: dict[int, int] = {}
    """Rows -> batches."""
    elements: int = 0
    """Rows x padded length, of the batches of a model whose inputs are padded."""
    padded_elements: int = 0
    """Of these, how many were padding."""
    instances: int = 0
    busy_ns: int = 0
    deaths: int = 0
    seconds: float = 0.0
    """The load's."""
    elapsed_s: float = 0.0
    """Until the last answer."""

    @property
    def goodput(self) -> float:
        """Answers in time, a second, while requests are being sent."""
        return self.good / self.seconds if self.seconds else 0.0

    @property
    def utilisation(self) -> float:
        """The share of its time that an instance ran batches."""
        return self.busy_ns / SECOND / self.elapsed_s / self.instances if self.elapsed_s and self.instances else 0.0

    @property
    def mean_batch(self) -> float:
        count = sum(self.batches.values())
        return sum(rows * times for rows, times in self.batches.items()) / count if count else 0.0

    def as_json(self) -> dict[str, Any]:
        latency = self.latency
        return {
            "sent": self.sent,
            "answered": self.answered,
            "in_time": self.in_time,
            "failed": dict(sorted(self.failed.items())),
            "abandoned": self.abandoned,
            "parts": self.parts,
            "overdue_ms": self.overdue_ns / 1e6,
            "goodput": round(self.goodput, 3),
            "latency_ms": {
                "mean": round(latency.mean / 1e6, 4),
                "p50": latency.quantile(0.5) / 1e6,
                "p90": latency.quantile(0.9) / 1e6,
                "p99": latency.quantile(0.99) / 1e6,
                "p99.9": latency.quantile(0.999) / 1e6,
                "max": latency.largest / 1e6,
            },
            "batches": {str(rows): count for rows, count in sorted(self.batches.items())},
            "mean_batch": round(self.mean_batch, 3),
            "elements": self.elements,
            "padded_elements": self.padded_elements,
            "instances": self.instances,
            "utilisation": round(self.utilisation, 4),
            "deaths": self.deaths,
        }


class Result(Struct):
    """`lost` were never answered though their client lived. `digest` is of all answers, in their order: whom, when,
    and with what code."""

    models: dict[str, ModelResult]
    seconds: float
    """How long requests were sent."""
    turns: int
    lost: int
    digest: str
    log: list[str]
    """What an operator would have read, of warnings and errors, the first few."""
    cache_hits: int = 0
    cache_misses: int = 0

    @property
    def sent(self) -> int:
        return sum(model.sent for model in self.models.values())

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 6),
            "turns": self.turns,
            "lost": self.lost,
            "digest": self.digest,
            "cache": {"hits": self.cache_hits, "misses": self.cache_misses},
            "models": {name: model.as_json() for name, model in self.models.items()},
        }


class Digest:
    """Of answers, in their order."""

    __slots__ = ("_codes", "_hash", "_pending")

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)
        self._pending = array("q")
        self._codes: dict[str, int] = {"": 0}

    def add(self, client: int, number: int, at: int, code: str) -> None:
        pending = self._pending
        known = self._codes.get(code)
        if known is None:
            known = self._codes[code] = crc32(code.encode()) + 1
        pending.extend((client, number, at, known))
        if len(pending) >= _PENDING:
            self._flush()

    def _flush(self) -> None:
        self._hash.update(self._pending.tobytes())
        del self._pending[:]

    def text(self) -> str:
        self._flush()
        return self._hash.hexdigest()

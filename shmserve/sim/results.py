"""Results: counts, durations, batch sizes, and a digest of all responses.

Invariant: no number here depends on the machine that runs the simulation.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import Any
from zlib import crc32

from msgspec import Struct, field

_BITS = 7
"""Histogram resolution: 1/64 of the value."""
_PENDING = 1 << 14
SECOND = 1_000_000_000


class Histogram:
    """A histogram of durations in ns with a resolution of 1/64; the mean is exact."""

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
        """The duration that `share` of all do not exceed: the upper bound of its bucket, or the maximum if that is
        less."""
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
    """Results of the requests that clients sent to a model, and of the batches that its instances ran."""

    name: str
    sent: int = 0
    cold: int = 0
    """Requests that arrived while no instance was loaded, and waited for one."""
    answered: int = 0
    in_time: int = 0
    """Answered before their deadline, or without one."""
    good: int = 0
    """Those of `in_time` that were answered while requests were still being sent."""
    overdue_ns: int = 0
    """The longest time between a deadline and the response to the request, of any kind."""
    failed: dict[str, int] = {}
    """Error code -> number of responses."""
    abandoned: int = 0
    """Requests whose client died first."""
    parts: int = 0
    latency: Histogram = field(default_factory=Histogram)
    """From request to response, for successful responses."""
    batches: dict[int, int] = {}
    """Rows -> batches."""
    elements: int = 0
    """For models with padding: sum of rows x padded length of all batches."""
    padded_elements: int = 0
    """Padding among these elements."""
    instances: int = 0
    loaded: int = 0
    """How many of them are loaded now."""
    loads: int = 0
    """How often one has loaded."""
    busy_ns: int = 0
    deaths: int = 0
    seconds: float = 0.0
    """Duration of the load."""
    elapsed_s: float = 0.0
    """Time until the last response."""
    sizes: list[tuple[float, int]] = []
    """For a scaled model: (seconds since the start of the load, number of loaded instances from then on)."""
    _changes: list[tuple[int, int]] = []

    @property
    def goodput(self) -> float:
        """Responses in time per second, while requests are being sent."""
        return self.good / self.seconds if self.seconds else 0.0

    @property
    def utilization(self) -> float:
        """The fraction of time during which an instance runs batches."""
        available = self.mean_instances * self.elapsed_s
        return self.busy_ns / SECOND / available if available else 0.0

    @property
    def mean_instances(self) -> float:
        if not self.sizes or not self.elapsed_s:
            return float(self.instances)
        ends = [at for at, _ in self.sizes[1:]] + [self.elapsed_s]
        return sum(count * (end - at) for (at, count), end in zip(self.sizes, ends, strict=True)) / self.elapsed_s

    def resized(self, now: int, more: int) -> None:
        """Records that an instance has loaded, or that a loaded one has ended."""
        self.loaded += more
        self.loads += more > 0
        self._changes.append((now, more))

    def end_sizes(self, began: int) -> None:
        """Fills in `sizes` once `elapsed_s` is known. `began`: start of the load."""
        sizes: dict[float, int] = {}
        count = 0
        for at, more in self._changes:
            count += more
            sizes[max(0.0, (at - began) / SECOND)] = count
        self.sizes = [(at, count) for at, count in sizes.items() if at < self.elapsed_s]

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
            "sizes": [[round(at, 3), count] for at, count in self.sizes],
            "utilization": round(self.utilization, 4),
            "deaths": self.deaths,
        }


class Result(Struct):
    """`lost`: requests never answered although their client lived. `digest`: of all responses in order, with client,
    time and code."""

    models: dict[str, ModelResult]
    seconds: float
    """How long requests were sent."""
    turns: int
    lost: int
    digest: str
    log: list[str]
    """The first warnings and errors of the log."""
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
    """A digest of all responses, in order."""

    __slots__ = ("_codes", "_hash", "_pending")

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)
        self._pending = array("q")
        self._codes: dict[str, int] = {"": 0}

    def add(self, client: int, number: int, at: int, code: str) -> None:
        pending = self._pending
        number_of_code = self._codes.get(code)
        if number_of_code is None:
            number_of_code = self._codes[code] = crc32(code.encode()) + 1
        pending.extend((client, number, at, number_of_code))
        if len(pending) >= _PENDING:
            self._flush()

    def _flush(self) -> None:
        self._hash.update(self._pending.tobytes())
        del self._pending[:]

    def text(self) -> str:
        self._flush()
        return self._hash.hexdigest()

"""The results of a simulated fleet: counts, latencies, a timeline, server utilization, and costs."""

from __future__ import annotations

from statistics import median
from typing import Any

from msgspec import Struct, field

from shmserve.sim.results import SECOND, Histogram

HOUR = 3600 * SECOND
MILLION = 1_000_000
RECOVERED_SHARE = 0.99
"""The fleet has recovered once this share of requests, relative to before, is answered in time again."""


class FleetWindow(Struct):
    """Requests sent in one window of the timeline, and their outcomes."""

    start_ns: int
    sent: int = 0
    good: int = 0
    """Answered in time."""
    failed: int = 0
    latency: Histogram = field(default_factory=Histogram)
    servers: int = 0
    """Servers that balancers use at the end of the window."""


class FleetResult(Struct):
    servers: int
    """Number of servers at the beginning."""
    instances: int
    """Instances of each server."""
    rate: float
    policy: str
    seconds: float
    """How long requests were sent."""
    windows: list[FleetWindow]
    sent: int = 0
    answered: int = 0
    good: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    retried: int = 0
    hits: int = 0
    latency: Histogram = field(default_factory=Histogram)
    elapsed_s: float = 0.0
    """Time until the last response."""
    busy: list[float] = field(default_factory=list)
    """Utilization of each server that ran to the end, ascending."""
    most_servers: int = 0
    instance_ns: int = 0
    """Total billed time of all instances."""
    disturbed_ns: int = -1
    """When the first outage or surge began; -1: none."""
    recovered_s: float | None = None
    """Time from `disturbed_ns` until requests were answered in time as before. None: never, or there was no outage or
    surge."""

    @property
    def goodput(self) -> float:
        return self.good / self.seconds if self.seconds else 0.0

    @property
    def utilization(self) -> float:
        return sum(self.busy) / len(self.busy) if self.busy else 0.0

    def cost(self, hour: float) -> float | None:
        """The cost of a million requests answered in time, if an instance costs `hour` per hour."""
        return self.instance_ns / HOUR * hour / self.good * MILLION if self.good else None

    def close(self) -> None:
        """Computes the totals of the windows."""
        for window in self.windows:
            merge(self.latency, window.latency)
            self.sent += window.sent
            self.good += window.good
        self.answered = self.latency.count
        if self.disturbed_ns >= 0:
            self.recovered_s = recovery(self.windows, self.disturbed_ns)

    def as_json(self, hour: float) -> dict[str, Any]:
        latency, busy = self.latency, self.busy
        cost = self.cost(hour)
        return {
            "servers": self.servers,
            "instances": self.instances,
            "rate": self.rate,
            "policy": self.policy,
            "seconds": round(self.seconds, 6),
            "sent": self.sent,
            "answered": self.answered,
            "in_time": self.good,
            "failed": dict(sorted(self.failed.items())),
            "retried": self.retried,
            "cache_hits": self.hits,
            "goodput": round(self.goodput, 3),
            "latency_ms": {"mean": round(latency.mean / 1e6, 4), **quantiles(latency)},
            "utilization": {
                "mean": round(self.utilization, 4),
                "least": round(busy[0], 4) if busy else 0.0,
                "most": round(busy[-1], 4) if busy else 0.0,
            },
            "most_servers": self.most_servers,
            "recovered_s": self.recovered_s,
            "instance_hours": round(self.instance_ns / HOUR, 6),
            "cost_per_million": round(cost, 4) if cost is not None else None,
            "timeline": [
                {
                    "at_s": round(window.start_ns / SECOND, 4),
                    "sent": window.sent,
                    "in_time": window.good,
                    "failed": window.failed,
                    "p50_ms": window.latency.quantile(0.5) / 1e6,
                    "p99_ms": window.latency.quantile(0.99) / 1e6,
                    "servers": window.servers,
                }
                for window in self.windows
            ],
        }


def quantiles(latency: Histogram) -> dict[str, float]:
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
    return {name: latency.quantile(share) / 1e6 for name, share in shares.items()} | {"max": latency.largest / 1e6}


def merge(into: Histogram, other: Histogram) -> None:
    for bucket, count in other.counts.items():
        into.counts[bucket] = into.counts.get(bucket, 0) + count
    into.count += other.count
    into.total += other.total
    into.largest = max(into.largest, other.largest)


def recovery(windows: list[FleetWindow], disturbed_ns: int) -> float | None:
    """Seconds from `disturbed_ns` until the end of the last window that was worse than before: with a smaller share of
    requests in time, or twice the p99. 0: no window was. None: the last window still is, or no requests were sent
    before."""
    full = [window for window in windows if window.sent]
    length = windows[1].start_ns - windows[0].start_ns if len(windows) > 1 else 0
    before = [window for window in full if window.start_ns + length <= disturbed_ns]
    if not before or not length:
        return None
    # Medians, because requests that were at a failing server belong to earlier windows.
    share = median(window.good / window.sent for window in before) * RECOVERED_SHARE
    p99 = median(window.latency.quantile(0.99) for window in before) * 2
    after = [window for window in full if window.start_ns + length > disturbed_ns]
    worse = [window for window in after if window.good < share * window.sent or window.latency.quantile(0.99) > p99]
    if not worse:
        return 0.0
    if worse[-1] is after[-1]:
        return None
    return (worse[-1].start_ns + length - disturbed_ns) / SECOND

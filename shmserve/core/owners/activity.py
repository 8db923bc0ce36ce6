"""Current activity of versions and instances. Read-only functions over the core's tables, shared by all views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from heapq import nlargest
from typing import NamedTuple

from shmserve.core.records import Instance, Request, Version
from shmserve.core.states import BatchState, RequestState
from shmserve.core.stats.callers import Caller

BUSY_NS = 1_000_000_000
BUSY_BATCHES = 10
"""A batch counts as slow after BUSY_NS and BUSY_BATCHES times the mean batch time of its version, whichever is
later."""


def queued(versions: Iterable[Version]) -> int:
    """Requests that no worker has started: in the broker's queue, or in a batch that waits at a worker."""
    count = 0
    for version in versions:
        count += version.waits
        count += sum(instance.waiting.remaining for instance in version.instances if instance.waiting is not None)
    return count


SHOWN_CALLERS = 10
"""Limit of `callers`."""


class CallerActivity(NamedTuple):
    in_flight: int
    queued: int
    """As for `queued`."""
    caller: Caller


def callers(requests: Iterable[Request], known: Iterable[Caller]) -> list[CallerActivity]:
    """The callers of gateways with the most requests in flight, and then those whose requests took most time. Callers
    without an admitted request are left out."""
    waiting: Counter[Caller] = Counter()
    served = [caller for caller in known if caller.entered]
    shown = nlargest(SHOWN_CALLERS, served, key=lambda caller: (caller.in_flight, caller.finished_ns))
    for request in requests if shown and shown[0].in_flight else ():
        payer, batch = request.payer, request.batch
        if type(payer) is Caller and (
            request.state is RequestState.QUEUED or (batch is not None and batch.state is BatchState.OPEN)
        ):
            waiting[payer] += 1
    return [CallerActivity(caller.in_flight, waiting[caller], caller) for caller in shown]


def in_flight(versions: Iterable[Version]) -> int:
    """Requests that have started. For ensembles all of them, because waiting happens in their steps."""
    count = 0
    for version in versions:
        count += sum(running(instance) for instance in version.instances)
        count += version.users if version.service.graph is not None else 0
    return count


def running(instance: Instance) -> int:
    batch = instance.running
    return (batch.remaining if batch is not None else 0) + bool(instance.leased_since) + len(instance.streams)


def busy_ns(version: Version, instance: Instance, now: int) -> int:
    """How long the instance has been running a slow batch; 0: it is not. Waiting for other models or for callers does
    not count."""
    batch = instance.running
    if instance.waits or (batch is None and not instance.leased_since):
        return 0
    ran = now - instance.leased_since if batch is None else batch.worked(now)
    return ran if ran > max(BUSY_NS, BUSY_BATCHES * version.service_ns) else 0


def streaming_ns(version: Version, now: int) -> int:
    """How long its instances have had open streams, in total."""
    since = [instance.streaming_since for instance in version.instances if instance.streams]
    return version.statistics.streaming_ns + len(since) * now - sum(since)


def waits_for(versions: Iterable[Version], now: int) -> str:
    """Why an unload has not completed."""
    versions = list(versions)
    started, waiting = in_flight(versions), queued(versions)
    reasons = [f"{started} request(s) in flight and {waiting} queued"] if started or waiting else []
    for version in versions:
        for instance in version.instances:
            ns = busy_ns(version, instance, now)
            if ns:
                reasons.append(f"instance '{instance.spec.name}' is busy with one batch for {ns / 1e9:.0f} s")
    processes = sum(bool(instance.peer) for version in versions for instance in version.instances)
    return ", ".join(reasons) or f"{processes} process(es) to end"

"""The next batch of a version, and the instance that runs it. Reads the version; only `take` changes its queue."""

from __future__ import annotations

from shmserve.core.batching.form import Plan, Reason, form
from shmserve.core.batching.padding import form_padded
from shmserve.core.records import Batch, Instance, Request, Version


def plan_batch(version: Version, now: int, alone: bool = False) -> Plan:
    """The next batch; `alone`: of one request."""
    if alone or version.shape is None:
        return Plan(1, version.queue.first(1)[0].cost, Reason.ALONE if alone else Reason.SINGLE)
    if version.padding is not None:
        waiting = version.queue.first(version.padding.lookahead)
        return form_padded(waiting, version.shape, version.padding, now, _urgent(version, now))
    return form(version.queue.first(version.shape.enough), version.shape, now)


def plan_extension(version: Version, batch: Batch, now: int) -> Plan:
    shape = version.shape
    if shape is None or batch.rows in shape.preferred or batch.rows >= shape.max_batch:
        return Plan(0, 0, batch.reason)
    if version.padding is not None:
        waiting = version.queue.first(version.padding.lookahead)
        base = batch.rows, batch.signature, *batch.lengths()
        return form_padded(waiting, shape, version.padding, now, _urgent(version, now), *base)
    return form(version.queue.first(shape.enough), shape, now, batch.rows, batch.signature)


def _urgent(version: Version, now: int) -> int:
    """A request whose time is over before this might be too late if another batch ran first."""
    return now + 2 * version.service_ns + 4 * version.spread_ns


def planned(version: Version, plan: Plan) -> list[Request]:
    """What the plan is about."""
    if plan.chosen is None:
        return version.queue.first(plan.count)[: plan.count]
    waiting = version.queue.first(plan.chosen[-1] + 1)
    return [waiting[place] for place in plan.chosen]


def take(version: Version, plan: Plan) -> list[Request]:
    """The same, out of the queue."""
    return version.queue.take(plan.count) if plan.chosen is None else version.queue.pick(plan.chosen)


def sends_ahead(version: Version, prefetch_ns: int) -> bool:
    """May a batch wait at a busy instance?"""
    return version.prefetch and (len(version.instances) == 1 or version.service_ns <= prefetch_ns)


def busy(version: Version) -> list[Instance]:
    """Those that have something to do; the one that will probably be done first is first."""
    kept = (version.trial, version.reserved)
    found = [
        i for i in version.instances if not i.idle and i.usable and i not in kept and not i.waits and not i.quarantined
    ]
    if len(found) > 1:
        found.sort(key=_began)
    return found


def place_for(version: Version, suspect: Request) -> Instance | None:
    """Where it is run again: if possible not where its worker died, and where it can begin first."""
    able = [i for i in version.instances if i.usable and not i.leaving and not i.waits]
    return min(
        able,
        key=lambda i: (i.quarantined, i is suspect.suspect, not i.idle, i.waiting is not None, _began(i)),
        default=None,
    )


def _began(instance: Instance) -> int:
    return instance.running.began if instance.running is not None else 0

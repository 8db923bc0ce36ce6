"""Plans the next batch of a version and chooses the instance that runs it. Only `take` changes the queue."""

from __future__ import annotations

from shmserve.core.records import Instance, Request, Version
from shmserve.core.service.batch import Batch
from shmserve.core.service.form import BatchPlan, Reason, form
from shmserve.core.service.padding import form_padded


def plan_batch(version: Version, now: int, alone: bool = False) -> BatchPlan:
    """Plans the next batch; `alone`: of a single request."""
    service = version.service
    rules = service.batch_rules
    if alone or rules is None:
        return BatchPlan(1, service.queue.first(1)[0].cost, Reason.ALONE if alone else Reason.SINGLE)
    if service.padding is not None:
        waiting = service.queue.first(service.padding.lookahead)
        return form_padded(waiting, rules, service.padding, now, _urgent(version, now))
    return form(service.queue.first(rules.lookahead), rules, now)


def plan_extension(version: Version, batch: Batch[Request], now: int) -> BatchPlan:
    service = version.service
    rules = service.batch_rules
    if rules is None or batch.rows in rules.preferred or batch.rows >= rules.max_batch:
        return BatchPlan(0, 0, batch.reason)
    if service.padding is not None:
        waiting = service.queue.first(service.padding.lookahead)
        base = batch.rows, batch.signature, *batch.lengths()
        return form_padded(waiting, rules, service.padding, now, _urgent(version, now), *base)
    return form(service.queue.first(rules.lookahead), rules, now, batch.rows, batch.signature)


def _urgent(version: Version, now: int) -> int:
    """Requests that expire before this time are urgent: they might be too late if another batch ran first."""
    return now + 2 * version.service_ns + 4 * version.spread_ns


def planned(version: Version, plan: BatchPlan) -> list[Request]:
    """The requests of the plan."""
    service = version.service
    if plan.chosen is None:
        return service.queue.first(plan.count)[: plan.count]
    waiting = service.queue.first(plan.chosen[-1] + 1)
    return [waiting[place] for place in plan.chosen]


def take(version: Version, plan: BatchPlan) -> list[Request]:
    """Removes the requests of the plan from the queue and returns them."""
    service = version.service
    return service.queue.take(plan.count) if plan.chosen is None else service.queue.pick(plan.chosen)


def sends_ahead(version: Version, prefetch_ns: int) -> bool:
    """May a batch wait at a busy instance?"""
    service = version.service
    return (
        service.prefetch
        and not version.calls_others
        and (len(version.instances) == 1 or version.service_ns <= prefetch_ns)
    )


def busy(version: Version) -> list[Instance]:
    """Busy instances that may take more work, in the order in which they will probably finish."""
    kept = (version.trial, version.reserved)
    found = [
        i
        for i in version.instances
        if not i.idle and i.usable and i not in kept and not (i.waits or i.quarantined or i.lease)
    ]
    if len(found) > 1:
        found.sort(key=_began)
    return found


def place_for(version: Version, suspect: Request) -> Instance | None:
    """The instance for a retry: the one that can start it first, preferably not the one whose worker died."""
    able = [i for i in version.instances if i.usable and not i.retiring and not i.waits]
    return min(
        able,
        key=lambda i: (i.quarantined, i is suspect.suspect, not i.idle, i.waiting is not None, _began(i)),
        default=None,
    )


def _began(instance: Instance) -> int:
    return instance.running.began if instance.running is not None else 0

"""Batch forming: a pure function of the waiting requests, the model's policy and the time.

`form` walks the queue from its head and adds requests until a rule stops it. On the way it remembers `best`: the last
point at which the batch had a preferred size, or, if there was none, the point at which the next request would exceed
the largest one. Then it decides whether to run the requests up to `best`, to run all that it has added (`pending`), or
to wait. The rules and their order match Triton's dynamic batcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from msgspec import Struct

from shmserve.core.policy import BatchPolicy


class BatchItem(Protocol):
    """The fields of a request that the batcher reads."""

    @property
    def cost(self) -> int: ...
    @property
    def arrived(self) -> int: ...
    @property
    def signature(self) -> object: ...


class Reason(Enum):
    """Why a batch was formed at this moment and with these requests."""

    __hash__ = object.__hash__  # faster: Enum.__hash__ is a Python function

    FULL = "full"  # no more rows fit
    PREFERRED = "preferred"  # it has a preferred size, or the next request would exceed the largest one
    DELAY = "delay"  # its oldest request has reached the maximum queue delay
    SHAPE = "shape"  # the next request differs in shapes or optional inputs, or too much in length to pad
    IDLE = "idle"  # an instance is idle, and no rule delays the batch
    ALONE = "alone"  # a request that runs alone, because a batch with it has killed a worker
    SINGLE = "single"  # the model takes one request at a time


class BatchPlan(Struct, gc=False):
    """Run the first `count` requests of the queue now, for `reason`. Count 0: run none, and plan again at the time
    `wake` (0: when an event arrives). `chosen`: run the requests at these increasing queue positions instead."""

    count: int
    rows: int
    reason: Reason
    wake: int = 0
    chosen: list[int] | None = None


class BatchRules(Struct, frozen=True):
    """The batch rules of a model, precomputed.

    `max_batch`: limit of rows. `preferred`: preferred sizes, only `max_batch` if none are configured.
    `largest_preferred`: the largest of them. `varies`: requests may differ in shapes or optional inputs, and then
    cannot share a batch. `simple`: no delay, no variation, and no preferred size other than `max_batch`: a batch takes
    as many requests as fit. `prefers`: sizes other than `max_batch` are preferred. `may_overtake`: a request may
    overtake earlier ones to reduce padding.
    """

    max_batch: int
    largest_preferred: int
    preferred: frozenset[int]
    delay_ns: int
    varies: bool
    simple: bool
    prefers: bool = True
    may_overtake: bool = True
    lookahead: int = 0
    """How many waiting requests callers should pass to `form`: one more than can fit into a batch."""

    @classmethod
    def of(cls, max_batch: int, policy: BatchPolicy, varies: bool) -> BatchRules:
        preferred = tuple(size for size in policy.preferred if size > 0) or (max_batch,)
        simple = policy.delay_ns == 0 and preferred == (max_batch,) and not varies
        prefers = preferred != (max_batch,)
        may_overtake = not policy.preserve_ordering
        lookahead = max(max_batch, *preferred) + 1
        sizes = max_batch, max(preferred), frozenset(preferred)
        return cls(*sizes, policy.delay_ns, varies, simple, prefers, may_overtake, lookahead)

    def reason(self, rows: int) -> Reason:
        """The reason for a batch of a preferred size: FULL, or PREFERRED if it is a configured size below the limit."""
        return Reason.PREFERRED if self.prefers and rows < self.max_batch else Reason.FULL


def form(
    waiting: Sequence[BatchItem], rules: BatchRules, now: int, base: int = 0, signature: object = None
) -> BatchPlan:
    """Plans which of `waiting` (in order, not empty) run now.

    With `base` > 0, plans instead which of them to add to a batch of `base` rows with this `signature` that already
    waits at a worker. That batch cannot start before the worker is free, so the queue delay is ignored.
    """
    if rules.simple:
        return _fill(waiting, rules.max_batch, base)
    count = rows = best_count = best_rows = 0
    saturated = stopped = False
    reason = Reason.FULL
    oldest = waiting[0].arrived
    for request in waiting:
        if base + rows:
            total = base + rows + request.cost
            if total > rules.largest_preferred and best_count == 0 and not saturated:
                best_count, best_rows, saturated = count, rows, True
            if total > rules.max_batch:
                stopped = True
                break
            if rules.varies and request.signature != (signature if base else waiting[0].signature):
                stopped, reason = True, Reason.SHAPE
                break
        count += 1
        rows += request.cost
        oldest = min(oldest, request.arrived)
        if base + rows in rules.preferred:
            best_count, best_rows = count, rows
    if base:
        return _extension(count, rows, best_count, best_rows, saturated, rules.reason(base + best_rows))
    pending, best = BatchPlan(count, rows, reason), BatchPlan(best_count, best_rows, rules.reason(best_rows))
    return _decide(rules, now - oldest, now, pending, best, stopped)


def _decide(rules: BatchRules, age: int, now: int, pending: BatchPlan, best: BatchPlan, stopped: bool) -> BatchPlan:
    """Chooses between a preferred size (`best`), all requests that fit (`pending`), and waiting for more.

    `age`: time for which the oldest request has waited. `stopped`: the next request cannot be added.
    """
    delay = rules.delay_ns
    if best.count and not (delay and age >= delay):
        return best
    if stopped or pending.rows >= rules.largest_preferred:
        return pending
    if age >= delay:
        pending.reason = Reason.DELAY if delay else Reason.IDLE
        return pending
    return BatchPlan(0, 0, Reason.DELAY, now + delay - age)


def _extension(count: int, rows: int, best_count: int, best_rows: int, saturated: bool, reason: Reason) -> BatchPlan:
    """The plan for a batch that is extended. `saturated`: the next request would exceed the largest preferred size."""
    if best_count or saturated:
        return BatchPlan(best_count, best_rows, reason)
    return BatchPlan(count, rows, Reason.IDLE)


def _fill(waiting: Sequence[BatchItem], max_batch: int, base: int) -> BatchPlan:
    """Takes as many requests as fit: the fast path for `BatchRules.simple`."""
    rows = base
    count = 0
    for request in waiting:
        rows += request.cost
        if rows > max_batch:
            rows -= request.cost
            return BatchPlan(count, rows - base, Reason.FULL)
        count += 1
    return BatchPlan(count, rows - base, Reason.FULL if rows == max_batch else Reason.IDLE)

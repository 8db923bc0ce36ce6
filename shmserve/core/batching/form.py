"""Batch forming: a pure function of the waiting requests, the model's policy and the time.

It walks the queue from its head and adds requests until a rule stops it. `best` is the point up to which the batch has
a preferred size. The rules and their order are those of Triton's dynamic batcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from msgspec import Struct

from shmserve.core.policy import BatchPolicy


class Waiting(Protocol):
    """The fields of a request that the batcher reads."""

    @property
    def cost(self) -> int: ...
    @property
    def arrived(self) -> int: ...
    @property
    def signature(self) -> object: ...


class Reason(Enum):
    """Why a batch was formed at this moment and with these requests."""

    __hash__ = object.__hash__  # Enum.__hash__ is a Python function

    FULL = "full"  # no more rows fit
    PREFERRED = "preferred"  # it has a preferred size, or the next request would exceed the largest one
    DELAY = "delay"  # its oldest request has reached the maximum queue delay
    SHAPE = "shape"  # the next request differs in shapes or optional inputs, or too much in length to pad
    IDLE = "idle"  # an instance is idle, and no rule delays the batch
    ALONE = "alone"  # a retry on its own, after its batch has killed a worker
    SINGLE = "single"  # the model takes one request at a time


class Plan(Struct, gc=False):
    """Run the first `count` requests now, for `reason`; with count 0, plan again at `wake` (0: when an event arrives).
    `chosen`: the places of the requests to run instead of the first ones, increasing."""

    count: int
    rows: int
    reason: Reason
    wake: int = 0
    chosen: list[int] | None = None


class Shape(Struct, frozen=True):
    """The batch rules of a model, precomputed. `simple`: no delay, and no preferred size except the largest batch.
    `prefers`: the model configures preferred sizes; otherwise the only one is the largest batch. `passes`: requests may
    overtake earlier ones to reduce padding."""

    max_batch: int
    largest: int
    preferred: frozenset[int]
    delay_ns: int
    varies: bool
    simple: bool
    prefers: bool = True
    passes: bool = True
    enough: int = 0
    """More requests than fit into a batch: `form` reads no more."""

    @classmethod
    def of(cls, max_batch: int, policy: BatchPolicy, varies: bool) -> Shape:
        preferred = tuple(size for size in policy.preferred if size > 0) or (max_batch,)
        simple = policy.delay_ns == 0 and preferred == (max_batch,) and not varies
        prefers = preferred != (max_batch,)
        passes = not policy.preserve_ordering
        enough = max(max_batch, *preferred) + 1
        sizes = max_batch, max(preferred), frozenset(preferred)
        return cls(*sizes, policy.delay_ns, varies, simple, prefers, passes, enough)

    def reason(self, rows: int) -> Reason:
        """Why a batch of a preferred size is sent: it is full, or the model prefers this size."""
        return Reason.PREFERRED if self.prefers and rows < self.max_batch else Reason.FULL


def form(waiting: Sequence[Waiting], shape: Shape, now: int, base: int = 0, signature: object = None) -> Plan:
    """Plans which of `waiting` (not empty, in order) run now. If `base` rows with `signature` already wait at a worker,
    the plan extends them: a delay would gain nothing, so only requests that fit are taken."""
    if shape.simple:
        return _fill(waiting, shape.max_batch, base)
    count = rows = best_count = best_rows = 0
    saturated = stopped = False
    reason = Reason.FULL
    oldest = waiting[0].arrived
    for request in waiting:
        if base + rows:
            total = base + rows + request.cost
            if total > shape.largest and best_count == 0 and not saturated:
                best_count, best_rows, saturated = count, rows, True
            if total > shape.max_batch:
                stopped = True
                break
            if shape.varies and request.signature != (signature if base else waiting[0].signature):
                stopped, reason = True, Reason.SHAPE
                break
        count += 1
        rows += request.cost
        oldest = min(oldest, request.arrived)
        if base + rows in shape.preferred:
            best_count, best_rows = count, rows
    if base:
        return _extension(count, rows, best_count, best_rows, saturated, shape.reason(base + best_rows))
    pending, best = Plan(count, rows, reason), Plan(best_count, best_rows, shape.reason(best_rows))
    return _decide(shape, now - oldest, now, pending, best, stopped)


def _decide(shape: Shape, age: int, now: int, pending: Plan, best: Plan, stopped: bool) -> Plan:
    delay = shape.delay_ns
    if best.count and not (delay and age >= delay):
        return best
    if stopped or pending.rows >= shape.largest:
        return pending
    if age >= delay:
        pending.reason = Reason.DELAY if delay else Reason.IDLE
        return pending
    return Plan(0, 0, Reason.DELAY, now + delay - age)


def _extension(count: int, rows: int, best_count: int, best_rows: int, saturated: bool, reason: Reason) -> Plan:
    if best_count or saturated:
        return Plan(best_count, best_rows, reason)
    return Plan(count, rows, Reason.IDLE)


def _fill(waiting: Sequence[Waiting], max_batch: int, base: int) -> Plan:
    """As many as fit: the fast path of the common case."""
    rows = base
    count = 0
    for request in waiting:
        rows += request.cost
        if rows > max_batch:
            rows -= request.cost
            return Plan(count, rows - base, Reason.FULL)
        count += 1
    return Plan(count, rows - base, Reason.FULL if rows == max_batch else Reason.IDLE)

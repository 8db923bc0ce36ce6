"""How a batch is formed: a pure function of what waits, what the model asks for, and the time.

It walks the queue from its head and adds requests until something says stop. `best` is the point up to which the
batch has a size that the model prefers. The rules, and their order, are those of Triton's dynamic batcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from msgspec import Struct

from shmserve.core.policy import BatchPolicy


class Waiting(Protocol):
    """What the batcher reads of a request."""

    @property
    def cost(self) -> int: ...
    @property
    def arrived(self) -> int: ...
    @property
    def signature(self) -> object: ...


class Reason(Enum):
    """Why a batch was formed when it was, and of what it was."""

    __hash__ = object.__hash__  # Enum's own is a Python function

    FULL = "full"  # no more rows may be added
    PREFERRED = "preferred"  # it has a size that the model prefers, or the next request would pass over the last one
    DELAY = "delay"  # its oldest request has waited for as long as it may
    SHAPE = "shape"  # the next request has other shapes, or other optional inputs, or too different a length to pad
    IDLE = "idle"  # an instance is idle, and nothing says that it should wait
    ALONE = "alone"  # it was in a batch that has killed its worker
    SINGLE = "single"  # the model takes one request at a time


class Plan(Struct, gc=False):
    """Run the first `count` now, for `reason`; or, with count 0, look again at `wake` (0: when something arrives).
    `chosen`: not the first, but those at these places, rising."""

    count: int
    rows: int
    reason: Reason
    wake: int = 0
    chosen: list[int] | None = None


class Shape(Struct, frozen=True):
    """The batch rules of one model, ready for use. `simple`: no delay, no preferred size but the largest batch.
    `prefers`: the model names sizes; otherwise its one preferred size is the largest batch. `passes`: to pad less,
    requests may run before others that came earlier."""

    max_batch: int
    largest: int
    preferred: frozenset[int]
    delay_ns: int
    varies: bool
    simple: bool
    prefers: bool = True
    passes: bool = True
    enough: int = 0
    """More requests than fit into a batch: `form` looks no further."""

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
        """Why a batch of a best size is sent: nothing more fits in, or the model prefers it."""
        return Reason.PREFERRED if self.prefers and rows < self.max_batch else Reason.FULL


def form(waiting: Sequence[Waiting], shape: Shape, now: int, base: int = 0, signature: object = None) -> Plan:
    """What of `waiting` (not empty, in order) should run now. `base` rows with `signature` wait at a worker already
    and would be extended; then nothing is gained by waiting, and only what fits is taken."""
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
    """As many as fit. The common case, and so the shortest."""
    rows = base
    count = 0
    for request in waiting:
        rows += request.cost
        if rows > max_batch:
            rows -= request.cost
            return Plan(count, rows - base, Reason.FULL)
        count += 1
    return Plan(count, rows - base, Reason.FULL if rows == max_batch else Reason.IDLE)

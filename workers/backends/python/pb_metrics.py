"""Metrics of Python models: counted where the model runs, in memory that the server reads when metrics are requested.

Invariants: counting sends no message. Objects with the same name, kind and labels, also of several instances, are one
metric.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from shmserve.shm.counters import COUNTER, GAUGE, HISTOGRAM, Subject, observe, set_gauge
from shmserve.workers.backends.python import pb_requests
from shmserve.workers.backends.python.pb_tensor import TritonModelException

_RESERVED = ("nv_", "shmserve_", "process_")
"""Prefixes of metric names that are reserved for the server."""
_KINDS = (COUNTER, GAUGE, HISTOGRAM)
_lock = threading.Lock()


class _Shared:
    """The shared part of all objects of one metric: its memory and the number of objects."""

    def __init__(self, numbers: memoryview[float]) -> None:
        self.numbers = numbers
        self.users = 0


class _Registry:
    metrics: dict[Subject, _Shared] = {}
    families: dict[str, tuple[str, str]] = {}
    """By name: kind and description, from the first definition."""
    kept = False


def keep() -> None:
    """Called when the model ends: its counts remain although its objects are deleted."""
    _Registry.kept = True


class Metric:
    """One metric of a family. Create it with `MetricFamily.Metric`."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        with _lock:
            shared = _Registry.metrics.get(subject)
            if shared is None:
                shared = _Registry.metrics[subject] = _Shared(pb_requests.current().count(subject))
            shared.users += 1
            shared.numbers[0] = 1.0
        self._shared = shared

    def increment(self, value: float) -> None:
        subject = self._subject
        if subject.kind == HISTOGRAM or (subject.kind == COUNTER and value < 0):
            raise TritonModelException(f"{subject.kind} '{subject.name}' cannot be incremented by {value}")
        numbers = self._shared.numbers
        with _lock:
            numbers[1] += value

    def set(self, value: float) -> None:
        if self._subject.kind != GAUGE:
            raise TritonModelException(f"{self._subject.kind} '{self._subject.name}' cannot be set, only a gauge can")
        numbers = self._shared.numbers
        with _lock:
            set_gauge(numbers, value)

    def observe(self, value: float) -> None:
        subject = self._subject
        if subject.kind != HISTOGRAM:
            raise TritonModelException(f"{subject.kind} '{subject.name}' cannot observe, only a histogram can")
        numbers = self._shared.numbers
        with _lock:
            observe(numbers, subject.edges, value)

    def value(self) -> float:
        """Returns the value that this instance of the model has counted, or set last."""
        if self._subject.kind == HISTOGRAM:
            raise TritonModelException(f"histogram '{self._subject.name}' has no single value")
        number: float = self._shared.numbers[1]
        return number

    def __del__(self) -> None:
        """Takes no lock: it may run while this thread holds the turn, which another one waits for with the lock."""
        shared: _Shared | None = getattr(self, "_shared", None)
        if shared is None or _Registry.kept:
            return
        shared.users -= 1
        if not shared.users:
            for index in range(len(shared.numbers)):
                shared.numbers[index] = 0.0


class MetricFamily:
    """Metrics with the same name and different labels."""

    COUNTER, GAUGE, HISTOGRAM = range(3)

    def __init__(self, name: str, description: str, kind: int) -> None:
        if name.startswith(_RESERVED):
            prefixes = ", ".join(_RESERVED)
            raise TritonModelException(f"metric family '{name}': names that begin with {prefixes} are the server's")
        if kind not in range(len(_KINDS)):
            raise TritonModelException(f"metric family '{name}' has the unknown kind {kind}")
        _checked(Subject(name, "", _KINDS[kind]))
        known, self._help = _Registry.families.setdefault(name, (_KINDS[kind], str(description)))
        if known != _KINDS[kind]:
            raise TritonModelException(f"metric family '{name}' is already a {known} and cannot be a {_KINDS[kind]}")
        self._name = name
        self._kind = _KINDS[kind]

    def Metric(self, labels: dict[str, Any] | None = None, buckets: Sequence[float] | None = None) -> Metric:
        pairs = tuple(sorted((str(key), str(value)) for key, value in (labels or {}).items()))
        if (buckets is not None) != (self._kind == HISTOGRAM):
            raise TritonModelException(
                f"metric of {self._kind} '{self._name}' {'needs' if buckets is None else 'cannot have'} buckets"
            )
        edges = tuple(float(edge) for edge in buckets or ())
        return Metric(_checked(Subject(self._name, self._help, self._kind, pairs, edges)))


def _checked(subject: Subject) -> Subject:
    try:
        subject.check()
    except ValueError as error:
        raise TritonModelException(f"metric {error}") from None
    return subject

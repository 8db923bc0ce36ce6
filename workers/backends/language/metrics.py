"""Counts what an engine for language models does (`llm.figures`). The server reads the counts with other metrics.

Invariant: each text that was begun ends once, with a reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from shmserve.llm.figures import METRICS, Metric
from shmserve.shm.counters import Subject, observe, set_gauge

if TYPE_CHECKING:
    from shmserve.workers.backends.language.engine import EngineLimits

    Count: TypeAlias = Callable[[Subject], memoryview[float]]

_METRICS = {metric.key: metric for metric in METRICS}


class LanguageMetrics:
    """The counters of one instance. Its methods may be called in any thread."""

    def __init__(self, count: Count, model: str, version: int, instance: str, limits: EngineLimits) -> None:
        self._count = count
        self._labels = (("model", model), ("version", str(version)))
        self._instance = ("model_instance", instance)
        self._lock = threading.Lock()
        self._running = self._waiting = self._cached = 0
        self._capacity = limits.cache
        self._numbers = {metric.key: self._add(metric) for metric in METRICS if not metric.label}
        self._reasons: dict[str, memoryview[float]] = {}
        set_gauge(self._numbers["slots"], limits.slots)
        set_gauge(self._numbers["context"], limits.context)
        self._update(0, 0)

    def _add(self, metric: Metric, *more: tuple[str, str]) -> memoryview[float]:
        labels = (*self._labels, self._instance) if metric.by_instance else (*self._labels, *more)
        numbers = self._count(Subject(metric.name, metric.help, metric.kind, labels, metric.edges))
        numbers[0] = 1.0
        return numbers

    def _observe(self, key: str, seconds: float, count: int = 1) -> None:
        observe(self._numbers[key], _METRICS[key].edges, seconds, count)

    def _update(self, running: int, cached: int) -> None:
        self._running += running
        self._cached += cached
        set_gauge(self._numbers["running"], self._running)
        set_gauge(self._numbers["kv_cache"], self._cached / self._capacity)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A request waits for a slot during the block."""
        self._wait(1)
        try:
            yield
        finally:
            self._wait(-1)

    def _wait(self, more: int) -> None:
        with self._lock:
            self._waiting += more
            set_gauge(self._numbers["waiting"], self._waiting)

    def began(self) -> TextMetrics:
        with self._lock:
            self._update(1, 0)
        return TextMetrics(self)

    # ------------------------------------------------------------------------------------ for TextMetrics

    def prompted(self, tokens: int) -> None:
        with self._lock:
            self._numbers["prompt_tokens"][1] += tokens
            self._update(0, tokens)

    def generated(self, tokens: int, seconds: float, first: bool) -> None:
        """`seconds`: since the start, or since the previous tokens."""
        with self._lock:
            self._numbers["generated_tokens"][1] += tokens
            self._update(0, tokens)
            if first:
                self._observe("first_token", seconds)
                tokens, seconds = tokens - 1, 0.0
            if tokens:  # those that arrive together
                self._observe("between_tokens", seconds / tokens, tokens)

    def ended(self, reason: str, seconds: float, cached: int, hits: int) -> None:
        with self._lock:
            numbers = self._reasons.get(reason)
            if numbers is None:
                ended = _METRICS["ended"]
                numbers = self._reasons[reason] = self._add(ended, (ended.label, reason))
            numbers[1] += 1
            self._numbers["prefix_hits"][1] += hits
            self._observe("whole", seconds)
            self._update(-1, -cached)


class TextMetrics:
    """Counts for one text."""

    def __init__(self, metrics: LanguageMetrics) -> None:
        self._metrics = metrics
        self._began = self._last = time.monotonic()
        self._prompt = self._tokens = self._hits = 0

    def prompted(self, tokens: int) -> None:
        """The number of tokens of the prompt is known."""
        if not self._prompt:
            self._prompt = tokens
            self._metrics.prompted(tokens)

    def generated(self, tokens: int) -> None:
        if tokens > 0:
            now = time.monotonic()
            self._metrics.generated(tokens, now - self._last, self._tokens == 0)
            self._tokens += tokens
            self._last = now

    def finished(self, hits: int) -> None:
        """`hits`: tokens of the prompt that were in the engine's cache."""
        self._hits = hits

    def ended(self, reason: str) -> None:
        self._metrics.ended(reason, time.monotonic() - self._began, self._prompt + self._tokens, self._hits)

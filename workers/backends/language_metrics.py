"""Metrics of an engine for language models, with names close to vLLM's. The server reads them with the other metrics.

Invariant: each text that was begun ends once, with a reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from shmserve.shm.counters import COUNTER, GAUGE, HISTOGRAM, Subject, observe, set_gauge

if TYPE_CHECKING:
    Count: TypeAlias = Callable[[Subject], memoryview[float]]

FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
BETWEEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
WHOLE_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0)


class LanguageMetrics:
    """The counters of one instance. Its methods may be called in any thread."""

    def __init__(self, count: Count, model: str, version: int, instance: str, slots: int, context: int) -> None:
        self._count = count
        self._labels = (("model", model), ("version", str(version)))
        self._lock = threading.Lock()
        self._running = self._cached = 0
        self._capacity = slots * context
        own = (*self._labels, ("model_instance", instance))
        self._gauges = {
            name: self._add(name, text, GAUGE, own)
            for name, text in (
                ("llm_num_requests_running", "texts that the engine is generating"),
                ("llm_slots", "texts that the engine can generate at once"),
                ("llm_kv_cache_usage_perc", "part of the KV cache that running texts use, from 0 to 1"),
            )
        }
        self._prompt = self._counter("llm_prompt_tokens_total", "tokens of prompts")
        self._hits = self._counter("llm_prefix_cache_hits_total", "tokens of prompts that were found in the cache")
        self._generated = self._counter("llm_generation_tokens_total", "generated tokens")
        self._first = self._histogram("llm_time_to_first_token_seconds", "from the start in the engine", FIRST_TOKEN_S)
        self._between = self._histogram("llm_inter_token_latency_seconds", "between tokens of a text", BETWEEN_S)
        self._whole = self._histogram("llm_e2e_request_latency_seconds", "from start to end in the engine", WHOLE_S)
        self._reasons: dict[str, memoryview[float]] = {}
        self._set("llm_slots", slots)
        self._update(0, 0)

    def _add(
        self, name: str, text: str, kind: str, labels: tuple[tuple[str, str], ...], edges: tuple[float, ...] = ()
    ) -> memoryview[float]:
        numbers = self._count(Subject(name, text, kind, labels, edges))
        numbers[0] = 1.0
        return numbers

    def _counter(self, name: str, text: str) -> memoryview[float]:
        return self._add(name, text, COUNTER, self._labels)

    def _histogram(self, name: str, text: str, edges: tuple[float, ...]) -> tuple[memoryview[float], tuple[float, ...]]:
        return self._add(name, text, HISTOGRAM, self._labels, edges), edges

    def _set(self, name: str, value: float) -> None:
        set_gauge(self._gauges[name], value)

    def _update(self, running: int, cached: int) -> None:
        self._running += running
        self._cached += cached
        self._set("llm_num_requests_running", self._running)
        self._set("llm_kv_cache_usage_perc", self._cached / self._capacity)

    def began(self) -> TextMetrics:
        with self._lock:
            self._update(1, 0)
        return TextMetrics(self)

    # ------------------------------------------------------------------------------------ for TextMetrics

    def prompted(self, tokens: int) -> None:
        with self._lock:
            self._prompt[1] += tokens
            self._update(0, tokens)

    def generated(self, tokens: int, seconds: float, first: bool) -> None:
        """`seconds`: since the start, or since the previous tokens."""
        with self._lock:
            self._generated[1] += tokens
            self._update(0, tokens)
            if first:
                observe(*self._first, seconds)
            else:
                observe(*self._between, seconds / tokens, tokens)

    def ended(self, reason: str, seconds: float, cached: int, hits: int) -> None:
        with self._lock:
            numbers = self._reasons.get(reason)
            if numbers is None:
                labels = (*self._labels, ("finished_reason", reason))
                text = "texts that have ended, by reason"
                numbers = self._reasons[reason] = self._add("llm_request_success_total", text, COUNTER, labels)
            numbers[1] += 1
            self._hits[1] += hits
            observe(*self._whole, seconds)
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

    def finished(self, tokens: int, hits: int) -> None:
        """The totals of the engine: generated tokens, and tokens of the prompt that were in its cache."""
        self.generated(tokens - self._tokens)
        self._hits = hits

    def ended(self, reason: str) -> None:
        self._metrics.ended(reason, time.monotonic() - self._began, self._prompt + self._tokens, self._hits)

"""The figures of language models: what their engines count, and what all views show of it.

Invariant: a metric is a row of METRICS, and a figure a row of FIGURES. Engines, statistics, `stats`, `top` and the page
read these tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeAlias

from msgspec import Struct

Counts: TypeAlias = Mapping[str, Any]
"""What the engines of a version have counted, by the keys of METRICS. A histogram is `{"sum", "edges", "counts"}`."""


class Metric(Struct, frozen=True):
    """`name` is that on /metrics, close to vLLM's; `key` that in statistics."""

    key: str
    name: str
    kind: str  # counter, gauge or histogram
    help: str
    edges: tuple[float, ...] = ()
    label: str = ""
    """Each value of this label has a counter of its own."""

    @property
    def by_instance(self) -> bool:
        return self.kind == "gauge"


_FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_BETWEEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_WHOLE_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0)

METRICS = (
    Metric("running", "llm_num_requests_running", "gauge", "texts that the engine is generating"),
    Metric("waiting", "llm_num_requests_waiting", "gauge", "requests that wait in the engine for a slot"),
    Metric("slots", "llm_slots", "gauge", "texts that the engine can generate at once"),
    Metric("context", "llm_max_model_len", "gauge", "tokens that a text and its prompt may have"),
    Metric("kv_cache", "llm_kv_cache_usage_perc", "gauge", "part of the KV cache that running texts use, from 0 to 1"),
    Metric("prompt_tokens", "llm_prompt_tokens_total", "counter", "tokens of prompts"),
    Metric("prefix_hits", "llm_prefix_cache_hits_total", "counter", "tokens of prompts that were found in the cache"),
    Metric("generated_tokens", "llm_generation_tokens_total", "counter", "generated tokens"),
    Metric("ended", "llm_request_success_total", "counter", "texts that have ended", label="finished_reason"),
    Metric(
        "first_token",
        "llm_time_to_first_token_seconds",
        "histogram",
        "time from the start in the engine to the first token",
        _FIRST_S,
    ),
    Metric(
        "between_tokens", "llm_inter_token_latency_seconds", "histogram", "time between tokens of a text", _BETWEEN_S
    ),
    Metric(
        "whole",
        "llm_e2e_request_latency_seconds",
        "histogram",
        "time of a text in the engine, from start to end",
        _WHOLE_S,
    ),
)
AVERAGED = ("kv_cache", "context")
PREFIX = "llm_"
"""The beginning of all names of METRICS."""
_BY_NAME = {metric.name: metric for metric in METRICS}

Sample: TypeAlias = tuple[str, Mapping[str, str], Sequence[float], Sequence[float]]
"""The name, labels, edges and numbers of a metric: one number, or the sum and the counts of the buckets of a
histogram."""


def counts_of(samples: Iterable[Sample]) -> dict[str, Any]:
    """The counts of a version. Gauges of several instances are added, AVERAGED ones averaged. Samples that are not
    finite or not of METRICS are left out."""
    counts: dict[str, Any] = {}
    shares: dict[str, list[float]] = {}
    for name, labels, edges, numbers in samples:
        metric = _BY_NAME.get(name)
        if metric is None or tuple(edges) != metric.edges or not all(map(math.isfinite, numbers)):
            continue
        key = metric.key
        if metric.edges:
            total, *buckets = numbers
            counts[key] = {"sum": total, "edges": list(metric.edges), "counts": list(map(int, buckets))}
        elif metric.label:
            reasons = counts.setdefault(key, {})
            reason = labels.get(metric.label, "")
            reasons[reason] = reasons.get(reason, 0) + int(numbers[0])
        elif key in AVERAGED:
            shares.setdefault(key, []).append(numbers[0])
        else:
            counts[key] = counts.get(key, 0) + int(numbers[0])
    return counts | {key: fmean(values) for key, values in shares.items()}


def with_queue(counts: Counts, queued: int, tokens: int) -> dict[str, Any]:
    """The counts with the requests in the server's queue, which also wait for a slot, and with the tokens of the
    prompts that have not been computed."""
    return {**counts, "waiting": counts.get("waiting", 0) + queued, "waiting_tokens": tokens}


# ------------------------------------------------------------------------------------ figures

_Value: TypeAlias = Callable[[Counts, Counts, float], Any]
"""The value of a figure from the counts at the beginning (empty: since the version was loaded) and at the end of an
interval, and its length in seconds (0: unknown). None: there is none."""


class Figure(Struct, frozen=True):
    """`head` is that of a column. `unit`: count, rate (per second), share, duration (seconds) or counts (by reason).
    `rank`: figures with a low one are kept when space is short."""

    key: str
    head: str
    name: str
    unit: str
    rank: int
    help: str
    value: _Value


def _now(key: str) -> _Value:
    return lambda before, after, seconds: after.get(key)


def _grown(key: str, before: Counts, after: Counts) -> float:
    """Counts that have become smaller were reset."""
    more: float = after.get(key, 0) - before.get(key, 0)
    return more if more >= 0 else after.get(key, 0)


def _per_s(key: str) -> _Value:
    return lambda before, after, seconds: _grown(key, before, after) / seconds if seconds > 0 else None


def _share(part: str, whole: str) -> _Value:
    def value(before: Counts, after: Counts, seconds: float) -> float | None:
        total = _grown(whole, before, after)
        return _grown(part, before, after) / total if total else None

    return value


def _reasons(key: str) -> _Value:
    def value(before: Counts, after: Counts, seconds: float) -> dict[str, float]:
        old, new = before.get(key, {}), after.get(key, {})
        return {reason: more for reason in new if (more := _grown(reason, old, new))}

    return value


def _quantile(key: str, share: float) -> _Value:
    def value(before: Counts, after: Counts, seconds: float) -> float | None:
        new, old = after.get(key), before.get(key)
        if new is None:
            return None
        counts = new["counts"]
        if old is not None and all(a >= b for a, b in zip(counts, old["counts"], strict=True)):
            counts = [a - b for a, b in zip(counts, old["counts"], strict=True)]
        return quantile(new["edges"], counts, share)

    return value


def quantile(edges: Sequence[float], counts: Sequence[float], share: float) -> float | None:
    """Interpolated within its bucket, as Prometheus does; the last bucket counts as its lower edge. None if nothing was
    counted."""
    total, below, low = sum(counts), 0.0, 0.0
    for edge, count in zip(edges, counts, strict=False):
        if count and below + count >= share * total:
            return low + (edge - low) * (share * total - below) / count
        below += count
        low = edge
    return low if total else None


FIGURES = (
    Figure("texts", "texts", "Texts running", "count", 5, "texts that are being generated", _now("running")),
    Figure("waiting", "wait", "Waiting", "count", 4, "requests that wait for a slot", _now("waiting")),
    Figure(
        "waiting_tokens",
        "wait tok",
        "Tokens waiting",
        "count",
        15,
        "tokens of prompts that have not been computed, an estimate",
        _now("waiting_tokens"),
    ),
    Figure("slots", "slots", "Slots", "count", 9, "texts that can be generated at once", _now("slots")),
    Figure("kv_cache", "kv", "KV cache", "share", 7, "share of the KV cache that running texts use", _now("kv_cache")),
    Figure(
        "prompt_tokens_per_s",
        "in/s",
        "Prompt tokens/s",
        "rate",
        6,
        "tokens of prompts per second",
        _per_s("prompt_tokens"),
    ),
    Figure(
        "generated_tokens_per_s",
        "tok/s",
        "Tokens/s",
        "rate",
        1,
        "generated tokens per second",
        _per_s("generated_tokens"),
    ),
    Figure(
        "first_token_p50",
        "ttft",
        "First token, p50",
        "duration",
        2,
        "median time from the start in the engine to the first token",
        _quantile("first_token", 0.5),
    ),
    Figure(
        "first_token_p95",
        "ttft95",
        "First token, p95",
        "duration",
        8,
        "95th percentile of this time",
        _quantile("first_token", 0.95),
    ),
    Figure(
        "between_tokens_p50",
        "itl",
        "Between tokens, p50",
        "duration",
        3,
        "median time between tokens",
        _quantile("between_tokens", 0.5),
    ),
    Figure(
        "between_tokens_p95",
        "itl95",
        "Between tokens, p95",
        "duration",
        10,
        "95th percentile of this time",
        _quantile("between_tokens", 0.95),
    ),
    Figure(
        "prefix_hits",
        "prefix",
        "Prefix cache hits",
        "share",
        11,
        "share of the tokens of prompts that were found in the cache",
        _share("prefix_hits", "prompt_tokens"),
    ),
    Figure(
        "ended", "texts ended by", "Ended by", "counts", 14, "reasons for which texts have ended", _reasons("ended")
    ),
    Figure(
        "prompt_tokens",
        "tokens in",
        "Prompt tokens",
        "count",
        12,
        "tokens of prompts since the version was loaded",
        _now("prompt_tokens"),
    ),
    Figure(
        "generated_tokens",
        "tokens out",
        "Generated tokens",
        "count",
        13,
        "generated tokens since the version was loaded",
        _now("generated_tokens"),
    ),
)


def figures_of(before: Counts | None, after: Counts | None, seconds: float = 0.0) -> dict[str, Any]:
    """The values of FIGURES; all None for a model without such counts."""
    if not after:
        return dict.fromkeys(figure.key for figure in FIGURES)
    return {figure.key: figure.value(before or {}, after, seconds if before else 0.0) for figure in FIGURES}

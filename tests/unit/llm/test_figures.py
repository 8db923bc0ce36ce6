"""Figures of language models: expected values are computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shmserve.llm.figures import FIGURES, METRICS, counts_of, figures_of, quantile

FIRST = next(metric for metric in METRICS if metric.key == "first_token")


def first_token(*buckets: int) -> list[float]:
    """The sum, 1, and the counts of the first buckets."""
    return [1.0, *buckets, *[0.0] * (len(FIRST.edges) + 1 - len(buckets))]


def samples(prompts: float, hits: float, tokens: float, *times: int, stops: int = 0) -> list[Any]:
    return [
        ("llm_num_requests_running", {"model_instance": "a"}, (), [2.0]),
        ("llm_num_requests_running", {"model_instance": "b"}, (), [1.0]),
        ("llm_kv_cache_usage_perc", {"model_instance": "a"}, (), [0.5]),
        ("llm_kv_cache_usage_perc", {"model_instance": "b"}, (), [0.25]),
        *[("llm_max_model_len", {"model_instance": name}, (), [512.0]) for name in "ab"],
        ("llm_prompt_tokens_total", {}, (), [prompts]),
        ("llm_prefix_cache_hits_total", {}, (), [hits]),
        ("llm_generation_tokens_total", {}, (), [tokens]),
        ("llm_request_success_total", {"finished_reason": "stop"}, (), [float(stops)]),
        ("llm_time_to_first_token_seconds", {}, FIRST.edges, first_token(*times)),
    ]


def test_figures_between_two_states_and_since_the_version_was_loaded() -> None:
    before, after = counts_of(samples(100, 0, 10, 4, stops=1)), counts_of(samples(140, 10, 210, 4, 0, 10, stops=3))
    figures = figures_of(before, after, 4.0)
    assert (figures["texts"], figures["kv_cache"], after["context"]) == (3, 0.375, 512)
    assert (figures["prompt_tokens_per_s"], figures["generated_tokens_per_s"]) == (10, 50)
    assert (figures["prefix_hits"], figures["ended"], figures["generated_tokens"]) == (0.25, {"stop": 2}, 210)
    assert figures["first_token_p50"] == pytest.approx(0.0075)  # all ten took 5 to 10 ms
    figures = figures_of(None, after)
    assert (figures["generated_tokens_per_s"], figures["prefix_hits"]) == (None, 10 / 140)
    assert (figures["ended"], figures["first_token_p50"]) == ({"stop": 3}, pytest.approx(0.0065))


def test_counts_that_were_reset_count_from_zero() -> None:
    figures = figures_of(counts_of(samples(100, 50, 10, 4, stops=5)), counts_of(samples(8, 4, 6, 0, 1, stops=1)), 2.0)
    assert (figures["generated_tokens_per_s"], figures["prefix_hits"], figures["ended"]) == (3, 0.5, {"stop": 1})
    assert figures["first_token_p50"] == pytest.approx(0.003)


def test_a_model_without_counts_has_no_figures() -> None:
    assert set(figures_of({"slots": 1}, None, 1.0).values()) == {None}
    assert {figure.key for figure in FIGURES} == figures_of(None, {}).keys()


def test_metrics_of_a_model_that_misuses_the_names_are_left_out() -> None:
    wrong: list[Any] = [
        ("llm_slots", {}, (), [math.nan]),
        ("llm_prompt_tokens_total", {}, (1.0,), [1.0, 2.0, 3.0]),
        ("llm_time_to_first_token_seconds", {}, (), [1.0]),
        ("llm_of_mine", {}, (), [1.0]),
    ]
    assert counts_of(wrong) == {}


def test_quantiles() -> None:
    assert quantile((1.0, 2.0), [0, 0, 0], 0.5) is None
    assert quantile((1.0, 2.0), [1, 1, 0], 0.75) == 1.5
    assert quantile((1.0, 2.0), [0, 0, 5], 0.5) == 2.0, "beyond the last edge"

"""How busy the steps of an ensemble are, against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

from shmserve.terminal.console import Screen
from shmserve.tools.tune.steps import StepUse, step_uses, text


def entry(name: str, *sizes: tuple[int, int, int]) -> dict[str, Any]:
    """`sizes`: rows of a batch, number of batches, and milliseconds of them all."""
    return {
        "name": name,
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": {"count": count, "ns": 0},
                "compute_infer": {"count": count, "ns": ms * 900_000},
                "compute_output": {"count": count, "ns": ms * 100_000},
            }
            for rows, count, ms in sizes
        ],
    }


def test_the_busiest_step_is_the_bottleneck() -> None:
    before = {"model_stats": [entry("a", (1, 5, 50)), entry("ensemble")]}
    after = {
        "model_stats": [
            entry("a", (1, 15, 250), (4, 10, 200)),
            entry("b", (8, 10, 900)),
            entry("ensemble"),
            entry("other", (1, 1, 1)),
        ]
    }
    uses = step_uses(before, after, {"a": 2, "b": 1}, 1_000_000_000)
    assert uses == [StepUse("b", 1, 0.9, 90.0, 8.0), StepUse("a", 2, 0.2, 20.0, 2.5)]
    assert text(uses, Screen(False)).splitlines()[1].split() == ["b", "1", "90%", "90", "8"]


def test_a_step_that_ran_nothing_is_idle() -> None:
    document = {"model_stats": [entry("a", (1, 5, 50))]}
    assert step_uses(document, document, {"a": 1}, 10**9) == [StepUse("a", 1, 0.0, 0.0, 0.0)]

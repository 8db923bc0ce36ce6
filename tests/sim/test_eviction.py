"""Which models stay in memory: the core beside an LRU cache in which loads take no time."""

from __future__ import annotations

import pytest

from bench.suites.eviction import run


@pytest.mark.parametrize(("workload", "rate"), [("zipf", 100.0), ("sizes", 60.0)])
def test_more_load_time_is_saved_than_by_lru(workload: str, rate: float) -> None:
    """The most popular model stays in memory, although a load takes time and only a few models load at a time."""
    found = run(workload, 1200, rate, seed=2)
    assert found.saved > found.lru_saved + 0.03
    assert found.hot_p90_ms < 20  # a request takes 5 ms


def test_unpopular_models_are_served_in_turn() -> None:
    """All models are equally popular, and more loads are asked for than can take place: none waits for much longer than
    it takes to load each of the others once, four at a time."""
    found = run("uniform", 400, 250.0, seed=2)
    assert found.longest_ms < 200 * 100 / 4 * 1.5

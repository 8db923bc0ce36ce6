"""The figures on the page about batching theory match the saved results, which the simulator still reproduces."""

from __future__ import annotations

import pytest

from bench.batching import __main__ as figures
from bench.batching.__main__ import measured
from tests import ROOT

RESULTS = figures.saved()
PAGE = (ROOT / "docs" / "batching.md").read_text()


@pytest.mark.parametrize("name", figures.plots(RESULTS))
def test_the_plots_are_current(name: str) -> None:
    text = (figures.PLOTS / f"{name}.svg").read_text()
    assert text == figures.plots(RESULTS)[name], "draw them with: make batching-plots"
    assert f"(figures/{name}.svg)" in PAGE


@pytest.mark.parametrize(("max_batch", "delay_ms"), [(1, 0), (16, 5)])
def test_the_simulator_gives_the_saved_results(max_batch: int, delay_ms: int) -> None:
    row = measured(max_batch, delay_ms, 50)
    assert dict(row) in [*RESULTS["size"], *RESULTS["delay"]], "simulate again: make batching-plots ARGS=--simulate"


def test_the_numbers_of_the_page() -> None:
    def row(max_batch: int, delay_ms: int, rate: int) -> dict[str, float]:
        rows = [*RESULTS["size"], *RESULTS["delay"]]
        return next(
            one for one in rows if (one["max_batch"], one["delay_ms"], one["rate"]) == (max_batch, delay_ms, rate)
        )

    shown = " ".join(PAGE.split())
    assert f"At 400 requests per second a batch has {row(16, 0, 400)['mean_batch']:.1f} rows" in shown
    assert f"at 2,000 it has {row(16, 0, 2000)['mean_batch']:.0f}." in shown
    assert f"p99 is {row(1, 0, 400)['p99_ms']:.0f} ms at 400 requests per second" in shown
    at_rate = f"{row(16, 0, 400)['p99_ms']:.1f} ms at that rate, and {row(16, 0, 2400)['p99_ms']:.0f} ms at 2,400"
    assert f"up to 16 rows it is {at_rate}" in shown
    idle, waiting = row(16, 0, 400), row(16, 5, 400)
    assert f"the median from {idle['p50_ms']:.1f} to {waiting['p50_ms']:.1f} ms" in shown
    assert f"busy for {waiting['busy']:.0%} of the".replace("%", " %") in shown
    assert f"instead of {idle['busy']:.0%}.".replace("%", " %") in shown

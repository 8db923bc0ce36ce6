"""Eight client processes at once, every dtype, random sizes, batches, cancels and timeouts: each request gets one right
answer, and nothing is left. The full minute is a measure of bench."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.soak.run import run_soak

pytestmark = pytest.mark.process


def test_a_mixed_load_loses_and_leaks_nothing(tmp_path: Path) -> None:
    found = run_soak(tmp_path, 6.0, largest=1 << 20)
    assert found.lost == 0, found.text()
    assert found.twice == 0, found.text()
    assert found.wrong == 0, found.text()
    assert found.leaked == 0, found.text()
    # The server was not idle, and requests ended in every way.
    assert found.counts["right"] > 0, found.text()
    assert found.counts["cancelled"] > 0, found.text()
    assert found.counts["timed out"] > 0, found.text()
    assert found.counts["broker descriptors more than before"] == 0, found.text()

"""The chaos soak: half a minute here; with `make stress` ten minutes, and ten more with sleeping models.

A failure shows its seed and the last 200 events; SHMSERVE_SEED repeats the same choices.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.stress.chaos.chaos import run_chaos

pytestmark = pytest.mark.process

SECONDS = float(os.environ.get("SHMSERVE_CHAOS_SECONDS", "25"))
LONG = 60.0
SEED = int(os.environ.get("SHMSERVE_SEED", "1"))


@pytest.mark.parametrize("sleeping", [False] if SECONDS < LONG else [False, True])
def test_every_request_is_answered_once_whatever_process_is_killed(tmp_path: Path, sleeping: bool) -> None:
    found = run_chaos(tmp_path, SECONDS, SEED, sleeping)
    print(found.text())
    assert not found.faults, found.report()
    # The server was not idle, and every kind of event happened.
    assert found.counts["right"] > found.happened.total(), found.text()
    for kind in ("worker", "client", "gateway", "broker"):
        assert found.happened[f"killed {kind}"], found.text()
    for kind in ("worker", "client"):
        assert found.happened[f"stopped {kind}"], found.text()
    for kind in ("operations", "cancelled", "timed out"):
        assert found.counts[kind], found.text()
    assert found.leased, found.text()

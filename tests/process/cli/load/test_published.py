"""`bench.published`: every experiment runs to its end, with small networks and one short turn."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from bench.published.experiments import EXPERIMENTS
from tests import ROOT

pytestmark = pytest.mark.process
END_S = 480


@pytest.mark.parametrize("name", EXPERIMENTS, ids=lambda name: f"{name} {EXPERIMENTS[name].engine}".strip())
def test_every_claim_has_a_measured_ratio(name: str) -> None:
    experiment = EXPERIMENTS[name]
    if experiment.engine and importlib.util.find_spec(experiment.engine) is None:
        pytest.skip(f"{experiment.engine} is not installed: make test-engines")
    command = [sys.executable, "-m", "bench.published", name, "--quick"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=END_S)
    assert ran.returncode == 0, ran.stderr
    rows = [line.strip("| ").split(" | ") for line in ran.stdout.partition("\n\n")[0].splitlines()[2:]]
    assert [claim for claim, *_ in rows] == [claim.name for claim in experiment.claims]
    assert all(float(measured) > 0 for _, _, measured, _ in rows)

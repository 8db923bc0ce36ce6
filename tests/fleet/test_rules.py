"""promtool checks and tests the rules and alerts of deploy/prometheus."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import ROOT
from tests.fleet import programs

DEPLOY = ROOT / "deploy" / "prometheus"
CASES = sorted((ROOT / "tests" / "fleet" / "rules").glob("*.yml"))


def promtool(*words: str | Path) -> str:
    command = [programs.need("promtool"), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("name", ["rules.yml", "alerts.yml"])
def test_rules_are_valid(name: str) -> None:
    assert "SUCCESS" in promtool("check", "rules", "--lint=all", "--lint-fatal", DEPLOY / name)


def test_the_configuration_is_valid() -> None:
    assert "2 rule files found" in promtool("check", "config", DEPLOY / "prometheus.yml")


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_alerts_and_recording_rules_in_each_case(case: Path) -> None:
    assert "SUCCESS" in promtool("test", "rules", case)

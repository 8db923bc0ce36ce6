"""The workflows: valid according to GitHub's schema, and everything that they run is in the Makefile."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT
from tests.package import pythons
from tests.support.cases import cases

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def load(path: Path) -> dict[Any, Any]:
    document: dict[Any, Any] = yaml.safe_load(path.read_text())
    return document


def commands(workflow: dict[Any, Any]) -> list[str]:
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


@pytest.mark.skipif(find_spec("check_jsonschema") is None, reason="check-jsonschema is not installed")
@cases(
    ("vendor.github-workflows", WORKFLOWS),
    ("vendor.github-issue-forms", [GITHUB / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "feature.yml")]),
    ("vendor.github-issue-config", [GITHUB / "ISSUE_TEMPLATE" / "config.yml"]),
)
def test_the_schema(schema: str, files: list[Path]) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_targets_of_the_makefile_only(path: Path) -> None:
    workflow = load(path)
    assert commands(workflow)
    targets = [
        target
        for job in workflow["jobs"].values()
        for target in job.get("strategy", {}).get("matrix", {}).get("target", [])
    ]
    for command in commands(workflow):
        words = command.split()
        assert words[0] == "make", command
        assert len(command.splitlines()) == 1, command
        targets += [words[1]] if not words[1].startswith("$") else []
    assert set(targets) <= TARGETS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_have_few_permissions_and_a_time_limit(path: Path) -> None:
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] for job in workflow["jobs"].values())
    writing = {
        f"{path.stem}/{name}": {key for key, value in job.get("permissions", {}).items() if value == "write"}
        for name, job in workflow["jobs"].items()
    }
    allowed = {"release/publish": {"id-token", "attestations"}, "image/image": {"id-token", "packages"}}
    assert all(found <= allowed.get(name, set()) for name, found in writing.items())


def test_the_suite_runs_on_every_supported_python() -> None:
    workflow = load(GITHUB / "workflows" / "test.yml")
    assert tuple(workflow["jobs"]["suite"]["strategy"]["matrix"]["python"]) == pythons.VERSIONS


def test_every_target_of_the_gate_runs_in_a_workflow() -> None:
    gate = set(re.findall(r"^(?:make|begin) ([\w-]+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))
    run = {command.split()[1] for path in WORKFLOWS for command in commands(load(path))}
    run |= set(load(GITHUB / "workflows" / "test.yml")["jobs"]["parts"]["strategy"]["matrix"]["target"])
    assert gate <= run

"""The plugin for scripts that run pytest: it writes the same lines as `sitecustomize` for unittest."""

from __future__ import annotations

import importlib
import os
from typing import Any

DRIVER = "test_infer_shm_leak.py"
"""Runs the unit tests inside of the model that the environment variable MODEL_NAME names."""
_failed: dict[str, str] = {}
"""Tests with a failed subtest, and why the first one failed. pytest reports the test itself as passed."""


def pytest_runtest_logreport(report: Any) -> None:
    if type(report).__name__ == "SubtestReport":
        if report.outcome == "failed":
            _failed.setdefault(report.nodeid, _reason(report))
        return
    if report.when != "call" and report.outcome == "passed":
        return
    file, *names = report.nodeid.split("::")
    name = ".".join(names[-2:])
    if os.path.basename(file) == DRIVER:
        name += f"[{os.environ.get('MODEL_NAME', '')}]"
    outcome, reason = report.outcome, ""
    if outcome == "failed":
        reason = _reason(report)
    elif report.nodeid in _failed:
        outcome, reason = "failed", _failed.pop(report.nodeid)
    importlib.import_module("sitecustomize").note(os.path.basename(file), name, outcome, reason, report.duration)


def _reason(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr)

"""The plugin for scripts that run pytest: the same lines as `sitecustomize` writes for unittest."""

from __future__ import annotations

import importlib
import os
from typing import Any

DRIVER = "test_infer_shm_leak.py"
"""Runs the unit tests inside of the model that the environment variable MODEL_NAME names."""


def pytest_runtest_logreport(report: Any) -> None:
    if type(report).__name__ == "SubtestReport" or (report.when != "call" and report.outcome == "passed"):
        return
    file, *names = report.nodeid.split("::")
    name = ".".join(names[-2:])
    if os.path.basename(file) == DRIVER:
        name += f"[{os.environ.get('MODEL_NAME', '')}]"
    reason = ""
    if report.outcome == "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash else str(report.longrepr)
    importlib.import_module("sitecustomize").note(os.path.basename(file), name, report.outcome, reason, report.duration)

"""The plugin for scripts that run pytest: the same lines as `sitecustomize` writes for unittest."""

from __future__ import annotations

import importlib
import os
from typing import Any


def pytest_runtest_logreport(report: Any) -> None:
    if type(report).__name__ == "SubtestReport" or (report.when != "call" and report.outcome == "passed"):
        return
    file, *names = report.nodeid.split("::")
    reason = ""
    if report.outcome == "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash else str(report.longrepr)
    importlib.import_module("sitecustomize").note(
        os.path.basename(file), ".".join(names[-2:]), report.outcome, reason, report.duration
    )

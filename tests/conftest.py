"""Shared by all tests: the leak check, and pytester for the tests of the leak check itself."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

# Read when onnxruntime is imported. Without it, the engine keeps a database and an upload thread in this process.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

# Expected output has no colours.
for variable in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "LINES"):
    os.environ.pop(variable, None)

# A background job of a shell ignores SIGINT, and so would every server that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# With PYTHONDONTWRITEBYTECODE, each worker would rewrite the assertions of all files: 15 s of processor time.
sys.dont_write_bytecode = False

pytest_plugins = ("tests.support.leaks", "tests.support.hypothesis_profiles", "pytester")


_module: list[Path] = []
"""That of the last test."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What exists before a module lives until the end, so garbage collections need not scan it."""
    if _module != [item.path]:
        _module[:] = [item.path]
        gc.collect()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the long tests first: at the end, a single worker would be busy with them."""
    items.sort(key=lambda item: item.get_closest_marker("stress") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keeps the tests of a file on one worker, because they share fixtures; also files with the same `xdist_group`."""
    from xdist.scheduler import LoadGroupScheduling

    class ByFile(LoadGroupScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            scope = super()._split_scope(nodeid)
            return nodeid.partition("::")[0] if scope == nodeid else scope

    return ByFile(config, log) if config.getoption("dist") == "loadgroup" else None

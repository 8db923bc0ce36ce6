"""What every test of the suite has: the leak check, and pytester for the tests of the leak check itself."""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import Any

import pytest

from tests.support.hypothesis_profiles import load_profile

# Read when onnxruntime is imported: without it the engine keeps a database and an uploading thread in this process.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

# What commands print is compared with text without colours.
for variable in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "LINES"):
    os.environ.pop(variable, None)

# A job that a shell starts in the background ignores SIGINT, and so would every server that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# With PYTHONDONTWRITEBYTECODE, each worker would rewrite the assertions of all files: 15 s of processor time.
sys.dont_write_bytecode = False

load_profile()

pytest_plugins = ("tests.support.leaks", "pytester")


def pytest_collection_finish() -> None:
    """The suite itself stays to the end: no collection need go through its objects, and tests make many."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long tests first: at the end they would keep one worker busy alone."""
    items.sort(key=lambda item: item.get_closest_marker("stress") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests of one file stay on one worker, for the fixtures they share; so do files with one `xdist_group`."""
    from xdist.scheduler import LoadGroupScheduling

    class ByFile(LoadGroupScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            scope = super()._split_scope(nodeid)
            return nodeid.partition("::")[0] if scope == nodeid else scope

    return ByFile(config, log) if config.getoption("dist") == "loadgroup" else None

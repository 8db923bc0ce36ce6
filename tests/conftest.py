"""What every test of the suite has: the leak check, and pytester for the tests of the leak check itself."""

from __future__ import annotations

import gc
import os

# Read when onnxruntime is imported: without it the engine keeps a database and an uploading thread in this process.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

pytest_plugins = ("tests.leaks", "pytester")


def pytest_collection_finish() -> None:
    """The suite itself stays to the end: no collection need go through its objects, and tests make many."""
    gc.collect()
    gc.freeze()

"""What every test of the suite has: the leak check, and pytester for the tests of the leak check itself."""

from __future__ import annotations

import os

# Read when onnxruntime is imported: without it the engine keeps a database and an uploading thread in this process.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

pytest_plugins = ("tests.leaks", "pytester")

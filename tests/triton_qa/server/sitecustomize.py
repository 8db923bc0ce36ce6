"""Loaded by the server's processes alone. Models get what Triton gives them: the packages of the environment for the
tests, after the server's own, and the environment variables of the server, which workers do not inherit otherwise.
What unit tests inside of models come to is recorded as that of the scripts is.
"""

from __future__ import annotations

import importlib.util
import json
import os
import site
import sys
from pathlib import Path

PACKAGES = "SHMSERVE_MODEL_QA_PACKAGES"
VARIABLES = "SHMSERVE_MODEL_QA_VARIABLES"
RESULTS, STARTS = "SHMSERVE_MODEL_QA_RESULTS", "SHMSERVE_MODEL_QA_STARTS"
"""Environment variables with this prefix are passed on to workers: a directory, an object as JSON, and two files."""
DELAY = "TRITONSERVER_DELAY_SCHEDULER"
RECORDER = Path(__file__).parents[1] / "recorder" / "sitecustomize.py"

if DELAY in os.environ:  # in the broker; workers have it only after the loop below
    importlib.import_module("delayed").install(os.environ)
if PACKAGES in os.environ:
    site.addsitedir(os.environ[PACKAGES])
for name, value in json.loads(os.environ.get(VARIABLES, "{}")).items():
    os.environ.setdefault(name, value)
if RESULTS in os.environ:
    os.environ["TRITON_QA_RESULTS"] = os.environ[RESULTS]
    os.environ["TRITON_QA_STARTS"] = os.environ[STARTS]
    spec = importlib.util.spec_from_file_location("triton_qa_recorder", RECORDER)
    assert spec is not None
    assert spec.loader is not None
    recorder = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recorder)

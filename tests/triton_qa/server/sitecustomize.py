"""Loaded only by the server's processes. Models get the packages of the tests' environment, after the server's own.
Results of unit tests inside of models are recorded like those of scripts.
"""

from __future__ import annotations

import importlib.util
import os
import site
import sys
from pathlib import Path

PACKAGES = "SHMSERVE_MODEL_QA_PACKAGES"
RESULTS, STARTS = "SHMSERVE_MODEL_QA_RESULTS", "SHMSERVE_MODEL_QA_STARTS"
"""Environment variables with this prefix are passed on to workers: a directory, and two files."""
DELAY = "TRITONSERVER_DELAY_SCHEDULER"
RECORDER = Path(__file__).parents[1] / "recorder" / "sitecustomize.py"

if DELAY in os.environ and not any(word.startswith("shmserve.workers") for word in sys.orig_argv):
    importlib.import_module("delayed").install(os.environ)
if PACKAGES in os.environ:
    site.addsitedir(os.environ[PACKAGES])
if RESULTS in os.environ:
    os.environ["TRITON_QA_RESULTS"] = os.environ[RESULTS]
    os.environ["TRITON_QA_STARTS"] = os.environ[STARTS]
    spec = importlib.util.spec_from_file_location("triton_qa_recorder", RECORDER)
    assert spec is not None
    assert spec.loader is not None
    recorder = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recorder)

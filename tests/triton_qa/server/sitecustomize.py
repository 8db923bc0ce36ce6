"""Loaded by the server's processes alone. Models get what Triton gives them: the packages of the environment for the
tests, after the server's own, and the environment variables of the server, which workers do not inherit otherwise.
"""

from __future__ import annotations

import importlib
import json
import os
import site

PACKAGES = "SHMSERVE_MODEL_QA_PACKAGES"
VARIABLES = "SHMSERVE_MODEL_QA_VARIABLES"
"""Environment variables with this prefix are passed on to workers: a directory, and an object as JSON."""
DELAY = "TRITONSERVER_DELAY_SCHEDULER"

if DELAY in os.environ:  # in the broker; workers have it only after the loop below
    importlib.import_module("delayed").install(os.environ)
if PACKAGES in os.environ:
    site.addsitedir(os.environ[PACKAGES])
for name, value in json.loads(os.environ.get(VARIABLES, "{}")).items():
    os.environ.setdefault(name, value)

"""`shmserve build`: replaces this process by one that builds a TensorRT plan from an ONNX model, for this machine's
GPU.

Invariant: the model is not examined here; the arguments are passed on as one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import NoReturn

from shmserve.paths import python
from shmserve.terminal.errors import Failed

PASSED_ON = (
    "model",
    "out",
    "profile",
    "max_batch",
    "version",
    "precision",
    "workspace_mb",
    "level",
    "timing_cache",
    "no_timing_cache",
    "version_compatible",
    "hardware",
    "plugins",
    "json",
)
"""Arguments that are fields of the order; `shmserve.workers.backends.tensorrt.build` reads them by these names."""


def build(args: argparse.Namespace) -> NoReturn:
    given = {name: value for name in PASSED_ON if (value := getattr(args, name)) is not None}
    command = [*python(), "-m", "shmserve.workers.backends.tensorrt.build", json.dumps(given, default=os.fspath)]
    try:
        os.execv(sys.executable, command)
    except OSError as error:
        raise Failed(f"cannot start the build process: {error.strerror}") from error

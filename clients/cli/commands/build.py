"""`shmserve build`: replaces this process by one that builds a TensorRT plan from an ONNX model, for this machine's
GPU.

Invariant: the model is not examined here; the arguments are passed on as one JSON document.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from shmserve.clients.cli.commands.base import order_of
from shmserve.paths import python
from shmserve.terminal.errors import Failed


def build(args: argparse.Namespace) -> NoReturn:
    command = [*python(), "-m", "shmserve.workers.backends.tensorrt.build", order_of(args)]
    try:
        os.execv(sys.executable, command)
    except OSError as error:
        raise Failed(f"cannot start the build process: {error.strerror}") from error

"""`shmserve run`: replaces this process by one that runs the model in this terminal. `shmserve gateway`: runs a
gateway.

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
    "model_dir",
    "file",
    "input",
    "random",
    "batch",
    "shape",
    "seed",
    "outputs",
    "out",
    "repeat",
    "version",
    "json",
    "pdb",
    "backend_config",
    "model_config_name",
    "backend_directory",
)
"""Arguments that are fields of the order; `shmserve.workers.foreground.solo` reads them by these names."""


def run(args: argparse.Namespace) -> NoReturn:
    order = {name: getattr(args, name) for name in PASSED_ON}
    given = {name: value for name, value in order.items() if value is not None}
    command = [*python(), "-m", "shmserve.workers.foreground.solo", json.dumps(given, default=os.fspath)]
    # As in a server, disable the engine's telemetry unless the user has enabled it.
    environment = {"ORT_DISABLE_TELEMETRY": "1"} | os.environ
    try:
        os.execve(sys.executable, command, environment)
    except OSError as error:
        size = len(command[-1])
        text = f"cannot start the model's process with {size} bytes of arguments: {error.strerror}"
        raise Failed(f"{text}; put long inputs into a file") from error


def gateway(args: argparse.Namespace) -> int:
    try:
        from shmserve.gateway import main
    except ModuleNotFoundError as error:
        if error.name != "httptools":
            raise
        raise Failed("the package httptools is missing: pip install 'shmserve[gateway]'") from error
    return main.run(args)

"""`shmserve run`: this process becomes one that has the model in it, in this terminal. `shmserve gateway`: it becomes a
door to the network.

The rule of the file: nothing of the model is looked at here; what is asked for goes on as one JSON document.
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
"""Arguments that are fields of the order; `shmserve.workers.foreground.solo` knows them by these names."""


def run(args: argparse.Namespace) -> NoReturn:
    order = {name: getattr(args, name) for name in PASSED_ON}
    given = {name: value for name, value in order.items() if value is not None}
    command = [*python(), "-m", "shmserve.workers.foreground.solo", json.dumps(given, default=os.fspath)]
    # As in a server, an engine does not tell others what it runs, unless it was set up to.
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

"""The commands that run another program of the package: serve, dev, run, build, gateway.

Invariant: this module does not examine the model; the arguments of `run` and `build` are passed on as one JSON
document.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from shmserve.clients.cli.commands.base import order_of
from shmserve.extras import missing
from shmserve.paths import python
from shmserve.system import interrupts
from shmserve.terminal.errors import Failed

FOLLOW = (
    "--model-control-mode=poll",
    "--repository-poll-secs=0.05",
    "--strict-readiness=false",
    "--exit-on-error=false",
)
"""Options of a server that loads a file again as soon as it is saved, and keeps the old code if that fails."""


def serve(options: Sequence[str]) -> int:
    """Replaces this process with the broker."""
    if text := missing("serve"):
        print(f"shmserve serve: {text}", file=sys.stderr)
        return 1
    interrupts.block_until_exec()
    os.execv(sys.executable, [*python(), "-m", "shmserve.broker", *options])


def dev(args: argparse.Namespace) -> int:
    return serve([*FOLLOW, args.file, *args.options])


def run(args: argparse.Namespace) -> NoReturn:
    """Replaces this process with one that runs the model in this terminal."""
    command = _command("shmserve.workers.foreground", args)
    # As in a server, disable the engine's telemetry unless the user has enabled it.
    environment = {"ORT_DISABLE_TELEMETRY": "1"} | os.environ
    try:
        interrupts.block_until_exec()
        os.execve(sys.executable, command, environment)
    except OSError as error:
        size = len(command[-1])
        text = f"cannot start the model's process with {size} bytes of arguments: {error.strerror}"
        raise Failed(f"{text}; put long inputs into a file") from error


def build(args: argparse.Namespace) -> NoReturn:
    """Replaces this process with one that builds a TensorRT plan from an ONNX model, for this machine's GPU."""
    try:
        os.execv(sys.executable, _command("shmserve.workers.backends.tensorrt.build", args))
    except OSError as error:
        raise Failed(f"cannot start the build process: {error.strerror}") from error


def _command(module: str, args: argparse.Namespace) -> list[str]:
    return [*python(), "-m", module, order_of(args)]


def gateway(args: argparse.Namespace) -> int:
    from shmserve.gateway import main

    return main.run(args)

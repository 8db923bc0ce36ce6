"""The stand-in for the `tritonserver` executable: it becomes `shmserve serve` in the same process.

It starts with Triton's defaults.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

STARTS = "TRITON_QA_STARTS"
"""Environment variable: the file that gets one line a start, the flags as JSON."""
BACKENDS = "TRITON_QA_BACKENDS"
"""Environment variable: the stand-ins for Triton's test backends."""
FLAGS = "TRITON_QA_FLAGS"
"""Environment variable: flags of the suite, a line each."""
SERVER_PATH = Path(__file__).parent / "server"
"""Replaces the recorder in PYTHONPATH, which is for the tests alone."""


def flags(given: list[str]) -> list[str]:
    named = any(word.partition("=")[0] == "--backend-directory" for word in given)
    if BACKENDS in os.environ:
        directory = Path(os.environ[BACKENDS])
        built = sorted(path.parent.name for path in directory.glob("*/libtriton_*.so"))
        own = [] if named else [f"--backend-directory={directory}"]
        given = [*own, *[f"--backend-config=native,prefer={','.join(built)}"][: len(built)], *given]
    more = [flag for flag in os.environ.get(FLAGS, "").split("\n") if flag]
    return ["--triton-compatible", *more, f"--runtime-dir={tempfile.mkdtemp(prefix='qa-')}", *given]


def main(given: list[str]) -> None:
    if path := os.environ.get(STARTS):
        with open(path, "a") as starts:
            starts.write(json.dumps(given) + "\n")
    os.environ["PYTHONPATH"] = str(SERVER_PATH)
    command = [sys.executable, "-m", "shmserve.clients.cli.main", "serve", *flags(given)]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main(sys.argv[1:])

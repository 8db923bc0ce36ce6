"""Commands that print a line of JSON at each refresh until they are interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any

END_S = 60


def first_lines(command: list[str], count: int) -> tuple[list[Any], int, bytes]:
    """Interrupts the command after this many lines. Returns the lines, the exit code and the output on standard
    error."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(count)]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=END_S)
    finally:
        process.kill()
        process.wait()
    return lines, process.returncode, errors

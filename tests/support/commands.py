"""The command `shmserve`: in this process, where the leak check covers it, or in one of its own."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

from shmserve.clients.cli import main

COMMAND = [sys.executable, "-m", "shmserve.clients.cli.main"]


def run(*words: str | Path) -> tuple[int, str, str]:
    """The exit code, and what was printed on standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.main([str(word) for word in words])
    return code, out.getvalue(), err.getvalue()


IMPATIENT = [
    sys.executable,
    "-c",
    """
import sys
from shmserve.clients.cli.commands import base
from shmserve.clients.cli.main import main
base.CONNECT_S = 2
sys.exit(main(sys.argv[1:]))
""",
]
"""The command, with a shorter wait for a server that is not there."""

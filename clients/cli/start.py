"""The program `shmserve`: imports the command and runs it.

Until it is imported, Ctrl-C ends the process by the signal's default action, without a traceback.
"""

from __future__ import annotations

import signal


def main() -> int:
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else it is ignored, as in the background of a script
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from shmserve.clients.cli import main as command

    signal.signal(signal.SIGINT, before)
    return command.main()

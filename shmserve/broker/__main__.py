"""Starts the broker process, as `shmserve serve` does.

Until its modules are imported, Ctrl-C ends the process by the signal's default action, without a traceback.
"""

from __future__ import annotations

import signal
import sys


def main() -> int:
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else it is ignored, as in the background of a script
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    from shmserve.broker.main import main as broker

    signal.signal(signal.SIGINT, before)
    return broker()


if __name__ == "__main__":
    sys.exit(main())

"""Entry point of the broker process for `shmserve serve`. While it imports the broker, Ctrl-C just ends the process."""

from __future__ import annotations

import sys

from shmserve.system import interrupts


def main() -> int:
    interrupts.end_process()
    from shmserve.broker.main import main as broker

    interrupts.raise_exception()
    return broker()


if __name__ == "__main__":
    sys.exit(main())

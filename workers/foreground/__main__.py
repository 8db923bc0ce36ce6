"""The process of `shmserve run`: imports its modules, during which Ctrl-C just ends the process, and calls `run`."""

from __future__ import annotations

from typing import NoReturn

from shmserve.system import interrupts


def main() -> NoReturn:
    interrupts.end_process()
    from shmserve.workers.foreground import run
    from shmserve.workers.process.exit_codes import exit_process

    interrupts.raise_exception()
    exit_process(run.main())


if __name__ == "__main__":
    main()

"""The process of `shmserve run`: imports its modules (Ctrl-C during the imports just ends the process) and runs
`solo`."""

from __future__ import annotations

from typing import NoReturn

from shmserve.system import interrupts


def main() -> NoReturn:
    interrupts.end_process()
    from shmserve.workers.foreground import solo
    from shmserve.workers.process.exit_codes import exit_process

    interrupts.raise_exception()
    exit_process(solo.main())


if __name__ == "__main__":
    main()

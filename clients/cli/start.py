"""The program `shmserve`: imports the command and runs it. During the import, Ctrl-C just ends the process."""

from __future__ import annotations

from shmserve.system import interrupts


def main() -> int:
    interrupts.end_process()  # until the command's own module is imported: arguments.common
    from shmserve.clients.cli import main as command

    return command.main()

"""A server in a process of its own, which reports on a pipe that it is ready."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from shmserve.paths import python
from shmserve.system.procfs import children

READY = "READY"


class ServerProcess:
    def __init__(
        self, arguments: Sequence[str], log: Path, environment: Mapping[str, str], new_session: bool = False
    ) -> None:
        """`arguments`: of `shmserve serve`. The output is appended to `log`."""
        self._reader, writer = os.pipe()
        try:
            with log.open("ab") as output:
                self.process = subprocess.Popen(
                    [*python(), "-m", "shmserve.broker.main", "--ready-fd", str(writer), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[writer],
                    env={**environment, "ORT_DISABLE_TELEMETRY": "1"},
                    start_new_session=new_session,
                )
        except BaseException:
            os.close(self._reader)
            raise
        finally:
            os.close(writer)

    def report(self, seconds: float) -> list[str] | None:
        """The words of its report: READY, and its endpoints with their ports. Empty if it has exited, or is about to;
        None if it has not reported within `seconds`."""
        if not select.select([self._reader], [], [], seconds)[0]:
            return None
        return os.read(self._reader, 4096).decode().split()

    def kill(self, seconds: float) -> list[int]:
        """Kills the server. Returns the workers that have not ended `seconds` later."""
        workers: dict[int, int] = {}
        try:
            for pid in children(self.process.pid):
                try:
                    workers[pid] = os.pidfd_open(pid)
                except ProcessLookupError:
                    continue
            self.process.kill()
            self.process.wait()
            return [pid for pid, pidfd in workers.items() if not select.select([pidfd], [], [], seconds)[0]]
        finally:
            for pidfd in workers.values():
                os.close(pidfd)

    def close(self) -> None:
        """Closes the pipe."""
        os.close(self._reader)

"""A server of any kind as a set of processes, which are stopped while another server is measured.

Stopped processes use no processor time, so all servers can stay up during a measurement with short turns.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic

from bench.lib.processes import descendants
from bench.lib.wrk import Post

START_S, END_S, LOOK_S = 120.0, 30.0, 0.1
HEAD_SIZE = "Inference-Header-Content-Length"
MARK = "SHMSERVE_BENCH_PEER"
"""Environment variable of all processes of a server, because some start daemons that are not descendants."""


class Running:
    def __init__(self, name: str, process: subprocess.Popen[bytes], mark: str, log: Path) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._mark = f"{MARK}={mark}".encode()
        self._log = log

    def members(self) -> set[int]:
        marked = {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_marked(pid)}
        return marked.union(*(descendants(pid) for pid in marked))

    def _is_marked(self, pid: int) -> bool:
        try:
            return self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False  # it has ended, or belongs to another user

    def pause(self) -> None:
        """Stops processes until none is left that could start another one."""
        stopped: set[int] = set()
        while result := self.members() - stopped:
            self._signal(result, signal.SIGSTOP)
            stopped |= result

    def resume(self) -> None:
        self._signal(self.members(), signal.SIGCONT)

    def await_answer(self, post: Post) -> bytes:
        """The first answer, without the JSON before the tensors of KServe's protocol."""
        return self.await_success(urllib.request.Request(post.url, post.bodies[0], dict(post.headers)))

    def await_success(self, request: urllib.request.Request) -> bytes:
        """Most of these servers give no other notification that they are ready."""
        end, ended, output = monotonic() + START_S, os.pidfd_open(self._process.pid), ""
        try:
            while True:
                try:
                    with urllib.request.urlopen(request, timeout=START_S) as answer:
                        return bytes(answer.read()[int(answer.headers.get(HEAD_SIZE, 0)) :])
                except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
                    output = str(error)
                if monotonic() > end or select.select([ended], [], [], LOOK_S)[0]:
                    break
        finally:
            os.close(ended)
        raise RuntimeError(f"{self.name} has not come up ({output}): {self._log.read_text(errors='replace')[-2000:]}")

    def end(self) -> None:
        self.resume()
        self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):  # then it is killed with the rest
            self._process.wait(END_S)
        remaining = self.members()
        self._signal(remaining, signal.SIGKILL)
        self._process.wait()
        for pid in remaining:
            self._await_end(pid)

    def _await_end(self, pid: int) -> None:
        try:
            ended = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        select.select([ended], [], [], END_S)
        os.close(ended)

    def _signal(self, pids: set[int], number: signal.Signals) -> None:
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


@contextmanager
def running(name: str, command: list[str], environment: Mapping[str, str], work: Path) -> Iterator[Running]:
    mark = f"{os.getpid()}-{name}-{work.name}"
    log = work / f"{name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env={**os.environ, **environment, MARK: mark}
        )
    server = Running(name, process, mark, log)
    try:
        yield server
    finally:
        server.end()

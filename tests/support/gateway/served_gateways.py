"""`shmserve serve` with gateways as a process whose log can be followed, and HTTP requests to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.launch import children_of
from tests.support.model_files import python_model

END_S = 60
ANY_PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--metrics-interval-ms", "0")

WAITING_REQUEST = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [7]}]}


def waiting_model(gate: Path) -> str:
    """The source of a model that responds when its gate, a named pipe, is opened."""
    return python_model(f"open({str(gate)!r}).read()\nreturn self.respond(x)")


def gateways_of(server: int) -> list[int]:
    return [pid for pid in children_of(server) if b"\0gateway\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]


class Serving:
    def __init__(self, repository: Path, place: Path, *options: str) -> None:
        self.runtime_dir = place / "run"
        command = [sys.executable, "-m", "shmserve.broker.main", "--model-repository", str(repository)]
        command += ["--runtime-dir", str(self.runtime_dir), *options]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self._stderr = self.process.stderr
        self.log: list[str] = []
        self._skipped: list[str] = []

    def until(self, pattern: str) -> re.Match[str]:
        """Waits for the first line with this pattern that was not returned before. Lines of the server and of its
        gateway may come in any order."""
        for line in self._skipped:
            if found := re.search(pattern, line):
                self._skipped.remove(line)
                return found
        for line in self._stderr:
            self.log.append(line)
            if found := re.search(pattern, line):
                return found
            self._skipped.append(line)
        raise AssertionError(f"the server never logged {pattern!r}:\n{''.join(self.log)}")

    def gateways(self) -> list[int]:
        return gateways_of(self.process.pid)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.end()

    def end(self) -> int:
        """Waits for the process to exit. Returns its exit code."""
        if not self._stderr.closed:
            self.log += self._stderr
            self._stderr.close()
        return self.process.wait(END_S)


@contextlib.contextmanager
def serving(repository: Path, place: Path, *options: str) -> Iterator[Serving]:
    server = Serving(repository, place, *options)
    try:
        yield server
    finally:
        code = server.stop()
        assert code == 0 or sys.exc_info()[0], "".join(server.log)


def ask(port: int, path: str, body: Any = None) -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=END_S)) as made:
        made.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        answer = made.getresponse()
        return answer.status, answer.read()

"""A server for one command: it has its own sockets, is monitored while it loads, and ends with the command.

Invariant: no process or file outlives the `with` block, unless this process is killed with SIGKILL.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from shmserve.errors import Unavailable
from shmserve.paths import temporary_dir
from shmserve.system.server_process import READY, ServerProcess

if TYPE_CHECKING:
    from shmserve.clients.client import Client

START_S = 60.0
STOP_S = 30.0
CONNECT_S = 1.0
MAX_PATH_BYTES = 60
"""Maximum length of the path of the temporary folder."""
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_KEPT = ("SHMSERVE_BACKEND_CONFIG", "SHMSERVE_HOST_POLICY", "SHMSERVE_DISABLE_AUTO_COMPLETE_CONFIG")
"""Settings that a model may need to load. All others belong to another server, e.g. its log file and sockets."""
_OF_SERVER = ("SHMSERVE_MODEL_REPOSITORY", "SHMSERVE_MODEL_CONTROL_MODE", "SHMSERVE_MODEL_CONFIG_NAME")
_FOR_MODELS = "SHMSERVE_MODEL_"


class TemporaryServer:
    """A server for the repositories. `options` are those of `shmserve serve`."""

    def __init__(self, repositories: Sequence[Path], options: Sequence[str] = ()) -> None:
        self._ready = False
        started = False
        try:
            with _delayed_signals():  # a signal in between would leave a process or a folder that nothing refers to
                self._folder = tempfile.TemporaryDirectory(prefix="shmserve-check-", dir=temporary_dir(MAX_PATH_BYTES))
                self._runtime_dir = Path(self._folder.name, "run")
                self._log_file = Path(self._folder.name, "server.log")
                try:
                    self._server = self._start(repositories, options)
                except BaseException:
                    self._folder.cleanup()
                    raise
                started = True
        except (KeyboardInterrupt, SystemExit):
            if started:  # otherwise the signal arrived before signals were delayed
                self.__exit__()
            raise

    def __enter__(self) -> TemporaryServer:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._stop()
        finally:
            self._server.close()
            self._folder.cleanup()

    def client(self, timeout: float) -> Client:
        from shmserve.clients.client import Client

        return Client(runtime_dir=self._runtime_dir, timeout=timeout, reconnect_timeout=CONNECT_S)

    def ready(self, seconds: float) -> bool:
        """Waits up to `seconds` for the first round of loading to end. Raises Unavailable if the server has exited."""
        report = self._server.report(seconds) if not self._ready else None
        if report is not None:
            if report[:1] != [READY]:
                code = self._server.process.wait(STOP_S)
                raise Unavailable(f"the temporary server exited with code {code}: {self.last_words}")
            self._ready = True
        return self._ready

    def await_start(self) -> None:
        """Waits for the first round of loading to end. Raises Unavailable if that does not happen within START_S."""
        if not self.ready(START_S):
            raise Unavailable(f"the temporary server did not start within {START_S:g} s: {self.last_words}")

    @property
    def log(self) -> str:
        return self._log_file.read_text(errors="replace")

    @property
    def last_words(self) -> str:
        lines = [line.strip() for line in self.log.split("\n") if line.strip()]
        return "; ".join(lines[-3:]) or "it printed nothing"

    # ------------------------------------------------------------------------------------------------- start and stop

    def _start(self, repositories: Sequence[Path], options: Sequence[str]) -> ServerProcess:
        arguments = ["--runtime-dir", str(self._runtime_dir), "--no-gateway"]
        for repository in repositories:
            arguments += ["--model-repository", str(repository.resolve())]
        arguments += ["--strict-readiness", "false", "--exit-on-error", "false", "--exit-timeout-secs", "0"]
        arguments += options
        # In a new session: Ctrl-C is handled by this process, which stops the server.
        return ServerProcess(arguments, self._log_file, _environment(), new_session=True)

    def _stop(self) -> None:
        self._server.process.terminate()
        try:
            self._server.process.wait(STOP_S)
        except BaseException as error:  # including a second Ctrl-C, so that nothing is left behind
            self._server.kill(STOP_S)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Within this block, SIGTERM and SIGHUP end the program as Ctrl-C does, running every `finally`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _end) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _delayed_signals() -> Iterator[None]:
    """Within this block, Ctrl-C, SIGTERM and SIGHUP are delayed until its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *_ENDING)}
    kept = [number for number, handler in before.items() if callable(handler)]
    for number in kept:  # a handler, not a mask, which the child process would inherit
        signal.signal(number, lambda received, _frame: arrived.append(received))
    try:
        yield
    finally:
        for number in kept:
            signal.signal(number, before[number])
    if arrived:
        signal.raise_signal(arrived[0])


def _environment() -> dict[str, str]:
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("SHMSERVE_") or key in _KEPT or (key.startswith(_FOR_MODELS) and key not in _OF_SERVER)
    }

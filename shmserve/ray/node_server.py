"""A server that this process owns alone, or shares with processes on the node that use the same key.

Invariant: the server lives as long as any of its owners and ends after the last one, even if that was killed (`host`).
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import msgspec

from shmserve.errors import Unavailable
from shmserve.paths import make_runtime_dir, python, temporary_dir
from shmserve.ray.config import ServerConfig
from shmserve.ray.host import LISTENING, ServerState

ENDED = ("failed", "over")
"""States without a server."""
CLOSED = ServerState("closed")
OVER = ServerState("over", reason="the host of the server has ended")
LONGEST = 40
"""Maximum length of the path of the temporary folder, in bytes."""


def default_directory() -> Path:
    """The directory for the sockets of all servers that Ray workers of this user have on this machine."""
    return Path(temporary_dir(LONGEST)) / f"shmserve-ray-{os.geteuid()}"


class NodeServer:
    """Owners with the same `key` and directory share a server. Call `start`, then `close`, or use `with`.

    `on_failure` is called, in a thread, when the server has failed for good.
    """

    def __init__(
        self,
        config: ServerConfig,
        key: str,
        directory: Path | None = None,
        on_failure: Callable[[], object] | None = None,
    ) -> None:
        self._config = config
        self._key = key
        self._directory = directory or default_directory()
        self._on_failure = on_failure
        self._socket: socket.socket | None = None
        self._changed = threading.Condition()
        self._state = CLOSED
        self._started = False
        self._runs = 0

    @property
    def is_ready(self) -> bool:
        """False while the server is being restarted, and after it has failed for good."""
        with self._changed:
            return self._state.state == "ready"

    @property
    def runs(self) -> int:
        """How many times the server has become ready: more than once if it was restarted."""
        with self._changed:
            return self._runs

    @property
    def runtime_dir(self) -> Path:
        """For `Client(runtime_dir=...)`; it stays the same when the server is restarted."""
        return Path(self._known().runtime_dir)

    @property
    def ports(self) -> dict[str, int]:
        """Endpoint -> port on 127.0.0.1. A restarted server has other ports; empty until it is ready again."""
        return dict(self._known().ports)

    @property
    def host(self) -> int:
        """The pid of the host."""
        return self._known().host

    @property
    def failure(self) -> str:
        """Why the server has failed for good; "" while it runs or is being restarted."""
        with self._changed:
            return self._state.reason if self._state.state in ENDED else ""

    def start(self, timeout: float) -> None:
        """Starts the server, unless another owner has, and waits until it is ready."""
        end = time.monotonic() + timeout
        while True:
            with self._locked():
                owned = self._connected() or self._spawned()
            self._socket = owned
            threading.Thread(target=self._follow, args=(owned,), name="shmserve host", daemon=True).start()
            with self._changed:
                settled, state = self._settled(end), self._state
                self._started = state.state == "ready"
            if self._started:
                return
            self.close()
            if not settled:
                raise Unavailable(f"the server was not ready within {timeout:g} s")
            if state.state == "failed":
                raise Unavailable(state.reason)
            # "over": the last other owner of a shared server has just left, so that server ends; start another

    def wait_ready(self, end: float) -> None:
        """Waits for a server that is being restarted, until `end` of the monotonic clock. Raises Unavailable."""
        with self._changed:
            settled = self._settled(end)
        if not settled:
            raise Unavailable("the server was not restarted in time")
        if self.failure:
            raise Unavailable(f"there is no server: {self.failure}")

    def wait_end(self, run: int, timeout: float) -> None:
        """Waits until the host has noticed that this run of the server has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._runs != run or self._state.state != "ready", timeout)

    def close(self) -> None:
        """Releases the server, which ends if this was the last owner. Returns at once."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket = None
        with self._changed:
            self._state = CLOSED
            self._started = False

    def __enter__(self) -> NodeServer:
        self.start(60.0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ internals

    def _known(self) -> ServerState:
        with self._changed:
            if not self._state.runtime_dir:
                raise Unavailable("the server is not running")
            return self._state

    def _settled(self, end: float) -> bool:
        """Waits, with the lock of the state, until the server is ready or has failed for good. False at `end`."""
        return self._changed.wait_for(lambda: self._state.state in ("ready", *ENDED), end - time.monotonic())

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock, so that only one process on the node starts a server at a time."""
        while True:
            make_runtime_dir(self._directory)
            lock = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if self._directory.exists() and os.path.samestat(os.fstat(lock), self._directory.stat()):
                    yield
                    return
            finally:
                os.close(lock)

    def _connected(self) -> socket.socket | None:
        tried = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            tried.connect(str(self._directory / f"{self._key}.sock"))
        except (FileNotFoundError, ConnectionRefusedError):
            tried.close()
            return None
        return tried

    def _spawned(self) -> socket.socket:
        reader, writer = os.pipe()
        try:
            config = msgspec.json.encode(self._config).decode()
            command = [*python(), "-m", "shmserve.ray.host", str(self._directory), self._key, config, str(writer)]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[writer], start_new_session=True)
            process.wait()
        finally:
            os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            listening = pipe.read() == LISTENING
        connected = self._connected() if listening else None
        if connected is None:
            raise Unavailable(f"the host of the server did not start (code {process.returncode}); see its output")
        return connected

    def _follow(self, owned: socket.socket) -> None:
        """Reads the server's state, in a separate thread, until the host ends."""
        with owned, owned.makefile("rb") as lines:
            try:
                for line in lines:
                    self._state_changed(owned, msgspec.json.decode(line, type=ServerState))
            except (OSError, msgspec.DecodeError):
                pass  # the connection ended in the middle of a line: the host was killed
        self._state_changed(owned, OVER)

    def _state_changed(self, owned: socket.socket, state: ServerState) -> None:
        with self._changed:
            if owned is not self._socket:
                return
            failed = self._started and state.state in ENDED
            self._state = state
            self._runs += state.state == "ready"
            self._changed.notify_all()
        if failed and self._on_failure is not None:
            self._on_failure()

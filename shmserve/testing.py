"""A server for tests of programs that use shmserve.

    import numpy as np
    import pytest
    from shmserve.testing import Server

    @pytest.fixture(scope="session")
    def server():
        with Server("models") as server:
            yield server

    def test_scores_are_probabilities(server):
        with server.client() as client:
            scores = client.infer("mlp", {"x": np.zeros((1, 64), np.float32)})["y"]
        assert scores.sum() == pytest.approx(1)

Invariant: nothing outlives the `with` block. A server that does not exit cleanly is an error that contains its log.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import shmserve
from shmserve.paths import BROKER, LANE
from shmserve.repo.storage.model_files import is_model_path
from shmserve.system.procfs import children
from shmserve.system.server_process import READY, ServerProcess

_SHM = Path("/dev/shm")
_KILLED_S = 30.0
ANY_PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
"""Options with which the kernel chooses free ports."""


class Server:
    """A server in a separate process, with its own directory for sockets; ready when the `with` block begins.

    `models` is a model repository, or a file that is served as a model, e.g. "model.onnx" or "app.py". `options` are
    those of `shmserve serve`, e.g. `Server("models", "--exit-on-error", "true")`; without this option, the server
    starts even if a model fails to load. `runtime_dir` is the directory for the sockets (default: a temporary one).
    `start_timeout` and `stop_timeout` are in seconds; a server that exceeds them is killed, and the error contains its
    log. With `gateway=True`, the server also has network endpoints on free ports (see `endpoints`).
    """

    def __init__(
        self,
        models: str | os.PathLike[str],
        *options: str,
        runtime_dir: str | os.PathLike[str] | None = None,
        start_timeout: float = 60.0,
        stop_timeout: float = 60.0,
        gateway: bool = False,
    ) -> None:
        self._models = os.fspath(models)
        self._options = options
        self._named = None if runtime_dir is None else Path(runtime_dir)
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout
        self._gateway_options = ANY_PORTS if gateway else ("--no-gateway",)
        self._ports: dict[str, int] = {}
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._server: ServerProcess | None = None
        self._log = ""

    # ------------------------------------------------------------------------------------------- properties

    @property
    def runtime_dir(self) -> Path:
        """The directory of its sockets, for `Client(runtime_dir=...)` and `shmserve --runtime-dir`."""
        return self._named or self._directory() / "run"

    @property
    def url(self) -> str:
        """The lane's URL, for `Client(url)`."""
        return f"unix://{self.runtime_dir / LANE}"

    @property
    def zmq_url(self) -> str:
        """The ZeroMQ URL, for `Client(url)`."""
        return f"ipc://{self.runtime_dir / BROKER}"

    @property
    def endpoints(self) -> dict[str, str]:
        """With `gateway=True`: endpoint -> address, e.g. {"http": "127.0.0.1:41234", "metrics": "127.0.0.1:41235"}."""
        return {endpoint: f"127.0.0.1:{port}" for endpoint, port in self._ports.items()}

    @property
    def pid(self) -> int:
        """The broker's pid."""
        if self._server is None:
            raise RuntimeError("the server is not running")
        return self._server.process.pid

    @property
    def log(self) -> str:
        """The output of the server and its models, across restarts. Remains available after the server has stopped."""
        if self._temporary is not None:
            self._log = self._log_file().read_text(errors="replace")
        return self._log

    def client(self, **options: Any) -> shmserve.Client:
        """A client of this server; `options` are those of `shmserve.Client`. Close it before the server stops."""
        return shmserve.Client(runtime_dir=self.runtime_dir, **options)

    def async_client(self, **options: Any) -> shmserve.AsyncClient:
        """The same as `client`, for asyncio."""
        return shmserve.AsyncClient(runtime_dir=self.runtime_dir, **options)

    # ------------------------------------------------------------------------------------- start and stop

    def start(self) -> None:
        """Starts the server and waits until its models are loaded. Called by `with`."""
        if self._server is not None:
            raise RuntimeError("the server is running already")
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="shmserve-server-")
        try:
            self._start()
        except BaseException:
            self._abandon()
            raise

    def stop(self) -> None:
        """Stops the server after its requests in flight. Called by `with`. Does nothing if it is not running."""
        try:
            self._stop()
        finally:
            self._remove()

    def restart(self) -> None:
        """Stops the server, unless it was killed, and starts it with the same sockets, so that clients reconnect."""
        self._stop()
        self.start()

    def kill(self) -> None:
        """Kills the server with SIGKILL, like a crash, and waits until its workers have exited as a consequence."""
        if self._server is None:
            raise RuntimeError("the server is not running")
        remaining = self._server.kill(_KILLED_S)
        self._server = None
        if remaining:
            raise RuntimeError(f"worker process(es) {remaining} have outlived their server:\n{self.log}")

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    # ------------------------------------------------------------------------------------------------- internals

    def _start(self) -> None:
        arguments = [self._models] if is_model_path(Path(self._models)) else ["--model-repository", self._models]
        arguments += ["--runtime-dir", str(self.runtime_dir), "--metrics-interval-ms", "0"]
        arguments += [*self._gateway_options, *self._options]
        server = self._server = ServerProcess(arguments, self._log_file(), os.environ)
        try:
            report = server.report(self._start_timeout)
        finally:
            server.close()
        if report is None:
            raise RuntimeError(f"the server was not ready within {self._start_timeout:g} s:\n{self.log}")
        if report[:1] != [READY]:
            code = server.process.wait(self._stop_timeout)
            self._server = None
            raise RuntimeError(f"the server ended with code {code} before it was ready:\n{self.log}")
        self._ports = {endpoint: int(port) for endpoint, _, port in (word.partition("=") for word in report[1:])}

    def _abandon(self) -> None:
        try:
            if self._server is not None:
                self.kill()
        finally:
            self._remove()

    def _stop(self) -> None:
        if self._server is None:
            return
        process = self._server.process
        pids = [process.pid, *children(process.pid)]
        alone = process.poll() is not None
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(self._stop_timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            text = f"the server did not stop within {self._stop_timeout:g} s of SIGTERM and was killed"
            raise RuntimeError(f"{text}:\n{self.log}") from None
        self._server = None
        if code or alone:
            text = (
                f"the server exited unexpectedly with code {code}" if alone else f"the server stopped with code {code}"
            )
            raise RuntimeError(f"{text}:\n{self.log}")
        remaining = [name for name in (LANE, BROKER) if (self.runtime_dir / name).exists()]
        remaining += [path.name for pid in pids for path in _SHM.glob(f"shmserve-{pid}-*")]
        if remaining:
            raise RuntimeError(f"the server has left {', '.join(remaining)} behind:\n{self.log}")

    def _directory(self) -> Path:
        if self._temporary is None:
            raise RuntimeError("the server is not running; use it as `with Server(...) as server:`")
        return Path(self._temporary.name)

    def _log_file(self) -> Path:
        return self._directory() / "server.log"

    def _remove(self) -> None:
        if self._temporary is not None:
            self._log = self.log
            self._temporary.cleanup()
            self._temporary = None

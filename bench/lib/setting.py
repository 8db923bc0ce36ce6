"""The parameters of a measure: its duration, its working directory, and servers to measure.

Servers are only started here.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.lib import models


@dataclass
class BenchServer:
    """A running server, as seen by its clients."""

    runtime_dir: Path
    log: Callable[[], str] = str
    """The server's log so far."""

    @property
    def lane(self) -> str:
        return f"unix://{self.runtime_dir}/lane.sock"

    @property
    def zmq(self) -> str:
        return f"ipc://{self.runtime_dir}/broker.sock"

    def broker_pid(self) -> int:
        """The pid of the process that listens on the lane, according to the kernel."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as lane:
            lane.connect(f"{self.runtime_dir}/lane.sock")
            credentials = lane.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid: int = struct.unpack("3i", credentials)[0]
        return pid


@contextmanager
def serving(repository: Path, *options: str) -> Iterator[BenchServer]:
    """Runs a server. `options` are those of `shmserve serve`."""
    from shmserve.testing import Server

    with Server(repository, *options) as server:
        yield BenchServer(Path(server.runtime_dir), lambda: server.log)


@dataclass
class Setting:
    work: Path
    seconds: float
    rounds: int
    soak_seconds: float
    _files: dict[str, Path] = field(default_factory=dict)

    def onnx(self, name: str) -> Path:
        """The model file of mlp or cnn, created once."""
        if name not in self._files:
            path = self.work / "onnx" / f"{name}.onnx"
            {"mlp": models.make_mlp, "cnn": models.make_cnn}[name](path)
            self._files[name] = path
        return self._files[name]

    def repository(self, name: str) -> Path:
        """A new and empty repository."""
        path = self.work / f"repository-{name}-{len(list(self.work.iterdir()))}"
        path.mkdir()
        return path

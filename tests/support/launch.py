"""A broker as a child process of a test: started, awaited through its ready pipe, and awaited again at its end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from shmserve.system import procfs
from shmserve.workers.zygote import NAME as PREPARED
from tests.support import model_files
from tests.support.ensemble_models import config_text
from tests.support.patience import PATIENCE_S

END_S = 60


def identity(repository: Path, name: str, batch: int = 8, count: int = 1, **parameters: str) -> None:
    """Writes a model that returns its inputs."""
    more = "dynamic_batching { } " if batch else ""
    more += f"max_batch_size: {batch} instance_group [ {{ count: {count} kind: KIND_CPU }} ] "
    model_files.write_model(
        repository, name, config_text("identity", "x", "y", more + model_files.parameters(**parameters))
    )


class Launched:
    """A broker in its own process. `program`: Python code to run instead of `shmserve.broker.main`."""

    def __init__(
        self, repository: Path, runtime_dir: Path, *options: str, stdin: int = subprocess.DEVNULL, program: str = ""
    ) -> None:
        self.runtime_dir = runtime_dir
        self.lane = str(runtime_dir / "lane.sock")
        self.zmq = str(runtime_dir / "broker.sock")
        self._log = runtime_dir.with_suffix(".log")
        self.code: int | None = None
        reader, writer = os.pipe()
        start = ("-c", program) if program else ("-m", "shmserve.broker.main")
        command = [sys.executable, *start, "--model-repository", str(repository)]
        command += ["--runtime-dir", str(runtime_dir), "--ready-fd", str(writer)]
        command += ["--no-gateway", "--metrics-interval-ms", "0", *options]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdin=stdin, stdout=log, stderr=log, pass_fds=[writer])
        os.close(writer)
        with open(reader, "rb", 0) as report:
            if not select.select([report], [], [], PATIENCE_S)[0] or report.read(16) != b"READY\n":
                self.kill()
                raise AssertionError(f"the broker did not become ready:\n{self.log}")

    @property
    def log(self) -> str:
        return self._log.read_text()

    def workers(self) -> list[int]:
        return workers_of(self.process.pid)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        self.code = self.process.wait(END_S)
        return self.code

    def stop(self) -> int:
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Kills the broker with SIGKILL and waits for the end of its workers, which follows."""
        workers = []
        if self.process.poll() is None:
            for pid in children_of(self.process.pid):
                with contextlib.suppress(ProcessLookupError):  # the process has just ended
                    workers.append(os.pidfd_open(pid))
        self.process.kill()
        self.process.wait()
        for worker in workers:
            ended = select.select([worker], [], [], END_S)[0]
            os.close(worker)
            assert ended, "a worker has outlived its broker"

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.code is None:
            code = self.stop()
            assert kind is not None or code == 0, self.log


children_of = procfs.children


def workers_of(pid: int) -> list[int]:
    """The children of a broker, without the process from which workers are forked."""
    return [child for child in children_of(pid) if _name_of(child) not in (PREPARED, "")]


def descriptors_of(pid: int) -> list[str]:
    """The targets of a process's descriptors, without those that are closed while they are listed."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(entry))
    return found


def _name_of(pid: int) -> str:
    """Empty if the process has ended since it was listed."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def await_end(pid: int, seconds: float = 30.0) -> None:
    """Waits for the end of a process that is not a child of this one."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], seconds)[0], f"process {pid} has not ended"
    finally:
        os.close(descriptor)

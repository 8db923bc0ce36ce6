"""Worker processes: started as fresh interpreters, heard over their link, listened to on stderr, waited for.

Whether a worker should run is decided elsewhere; here it is only done.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from shmserve import wire
from shmserve.broker.cgroups import Groups
from shmserve.broker.link import Link
from shmserve.broker.logs import printable
from shmserve.broker.memory import Memory
from shmserve.broker.terms import NOTHING, Terms
from shmserve.core.effects import Spawn
from shmserve.core.policy import InstanceSpec
from shmserve.messages import WorkerReport
from shmserve.paths import python
from shmserve.repo.gpus import VISIBLE

STDERR_LINES = 20
"""The last lines of a worker's stderr, told to operators when it dies."""
LINE_BYTES = 4096
_LEVELS = {"verbose": "debug", "info": "info", "warning": "warning", "error": "error"}
"""How a line begins that has a level (workers.say), and what the log calls it. Other lines are what a model prints."""
GRACE_S = 10.0
"""A worker whose link has ended has this long to end itself."""

_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR", "TZ", "VIRTUAL_ENV")
_PASSED_ON_PREFIXES = ("OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "ORT_", "CUDA_", "SHMSERVE_MODEL_")
"""What of the environment a worker gets. Not more: it may hold the server's secrets."""

_codec = wire.Codec(WorkerReport)


class Worker(Struct, eq=False):
    peer: int
    name: str
    about: dict[str, Any]
    """For the log: model, version, instance."""
    process: subprocess.Popen[bytes]
    link: Link
    pidfd: int
    stderr: deque[str]
    loading_error: str = ""
    partial: bytes = b""
    killed: str = ""


class Workers:
    """`exited(peer, reason, loading_error, detail)` is called once for each, when its process has ended."""

    def __init__(
        self,
        loop: Any,
        deliver: Callable[[int, list[Any], list[int]], None],
        exited: Callable[[int, str, str, str], None],
        say: Callable[[str, str, dict[str, Any]], None],
        groups: Callable[[], Groups] | None = None,
    ) -> None:
        """`groups` divides our control group, so that the kernel keeps workers to their limits of memory."""
        self._loop = loop
        self._deliver = deliver
        self._exited = exited
        self._say = say
        self._workers: dict[int, Worker] = {}
        self.gpus: Mapping[int, str] = {}
        """The uuids of the GPUs, by number: a worker sees its own, and no other."""
        self._memory = Memory(loop, self.kill, make=groups)

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, peer: int) -> Worker | None:
        return self._workers.get(peer)

    def spawn(self, effect: Spawn, terms: Terms = NOTHING) -> Worker:
        peer, spec = effect.peer, effect.instance
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        group = self._memory.group(peer, terms.memory)
        place = str(group.processes) if group is not None else ""
        try:
            process = subprocess.Popen(
                [*python(), "-m", "shmserve.workers.main", *arguments_of(spec, terms, theirs.fileno(), place)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=worker_environment() | self._device(spec),
                start_new_session=True,  # a terminal's Ctrl-C is for the broker, which stops its workers in order
            )
        except OSError:
            ours.close()
            self._memory.ended(peer)
            raise
        finally:
            theirs.close()
        pidfd = os.pidfd_open(process.pid)
        link = Link(ours, peer, _codec, self._deliver, self._link_ended, self._loop)
        about = {"model": effect.model, "version": effect.version, "instance": spec.name}
        worker = Worker(peer, spec.name, about, process, link, pidfd, deque(maxlen=STDERR_LINES))
        self._workers[peer] = worker
        self._memory.started(peer, process.pid, terms.memory)
        self._loop.add_reader(pidfd, self._ended, worker)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._loop.add_reader(process.stdout.fileno(), self._listen, worker)
        return worker

    def _device(self, spec: InstanceSpec) -> dict[str, str]:
        uuid = self.gpus.get(spec.device) if spec.kind == "KIND_GPU" else None
        return {VISIBLE: uuid} if uuid is not None else {}

    def kill(self, peer: int, reason: str) -> None:
        worker = self._workers.get(peer)
        if worker is not None and not worker.killed:
            worker.killed = reason
            worker.process.kill()

    def _link_ended(self, peer: int, reason: str) -> None:
        """Usually the process is ending too, and tells more; one that does not end is no worker any more."""
        self._loop.call_later(GRACE_S, self.kill, peer, "it closed its link and did not end")

    def _listen(self, worker: Worker) -> None:
        assert worker.process.stdout is not None
        try:
            data = os.read(worker.process.stdout.fileno(), 65536)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(worker.process.stdout.fileno())
            data = b"\n" if worker.partial else b""
        *lines, worker.partial = (worker.partial + data).split(b"\n")
        if len(worker.partial) > LINE_BYTES:
            lines.append(worker.partial)
            worker.partial = b""
        for line in lines:
            text = printable(line[:LINE_BYTES].decode("utf-8", "backslashreplace"))
            worker.stderr.append(text)
            word, colon, rest = text.partition(": ")
            level = _LEVELS.get(word, "") if colon else ""
            self._say(level or "info", f"[{worker.name}] {rest if level else text}", worker.about)

    def _ended(self, worker: Worker) -> None:
        """The process has ended. What it still said on its link and its stderr comes first."""
        code = worker.process.wait()
        worker.link.drain()
        worker.link.close("")
        assert worker.process.stdout is not None
        if not worker.process.stdout.closed:
            self._listen(worker)
            self._loop.remove_reader(worker.process.stdout.fileno())
            worker.process.stdout.close()
        self._loop.remove_reader(worker.pidfd)
        os.close(worker.pidfd)
        del self._workers[worker.peer]
        reason = _reason(code, self._memory.ended(worker.peer) or worker.killed)
        self._exited(worker.peer, reason, worker.loading_error, "\n".join(worker.stderr))

    def close(self) -> None:
        """All of them have gone."""
        self._memory.close()


def arguments_of(spec: InstanceSpec, terms: Terms, link: int, group: str) -> list[str]:
    """The command line of a worker. `group`: the file that it writes itself into, to be in its control group."""
    found = ["--link", str(link), "--name", spec.name]
    if spec.cpus:
        found += ["--cpus", ",".join(map(str, spec.cpus))]
    if spec.threads:
        found += ["--threads", str(spec.threads)]
    if group:
        found += ["--group", group]
    if terms.environment:
        found += ["--environment", terms.environment, "--unpacked", terms.unpacked]
    return found


def worker_environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key in _PASSED_ON or key.startswith(_PASSED_ON_PREFIXES)}
    # A server does not tell others what it serves, unless it was set up to.
    return {"ORT_DISABLE_TELEMETRY": "1"} | kept | {"PYTHONUNBUFFERED": "1"}


def _reason(code: int, killed: str) -> str:
    """`killed`: why we have ended it ourselves."""
    if killed:
        return f"killed: {killed}"
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else str(-code)
    return f"signal {name}" + (", perhaps out of memory" if -code == signal.SIGKILL else "")

"""Worker processes: started as fresh interpreters, heard over their link, listened to on stderr, waited for.

Whether a worker should run is decided elsewhere; here it is only done.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from msgspec import Struct

from shmserve.broker.link import Link
from shmserve.broker.observability.log_throttle import Rate
from shmserve.broker.processes import children
from shmserve.broker.processes.cgroups import Groups
from shmserve.broker.processes.memory_limits import GPU_KNOBS, Memory
from shmserve.broker.processes.resources import NOTHING, Terms
from shmserve.broker.processes.zygote import Prepared, reap
from shmserve.core.effects import Spawn
from shmserve.core.policy import InstanceSpec
from shmserve.paths import python
from shmserve.protocol import codec
from shmserve.protocol.messages import WorkerReport
from shmserve.repo.gpus import VISIBLE
from shmserve.system.service_manager import VARIABLES

_LEVELS = {"verbose": "debug", "info": "info", "warning": "warning", "error": "error"}
"""How a line begins that has a level (workers.say), and what the log calls it. Other lines are what a model prints."""
REAP_S = 2.0
"""How often to look for processes that models have started and left."""
MAKING_S = 2.0
"""Who is to be killed and has no process yet waits for one so long."""
GRACE_S = 10.0
"""A worker whose link has ended has this long to end itself."""

_PASSED_ON = ("OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "ORT_", "CUDA_", "SHMSERVE_MODEL_")
"""How variables begin that a worker gets, beside those of every child."""
_NEVER = ("SHMSERVE_", *VARIABLES)
"""How those begin that are the server's alone: its settings, and what the service manager says to it."""

_codec = codec.Codec(WorkerReport)


class Worker(Struct, eq=False):
    """`pid` 0: it has not been made yet. `theirs`: the other ends of its link and output, as long as it may need them.
    `process`: it was started as a fresh interpreter."""

    peer: int
    name: str
    about: dict[str, Any]
    """For the log: model, version, instance."""
    link: Link
    output: children.Output
    words: list[str]
    memory: tuple[int, int]
    """How much it may have on the host, and on its GPU."""
    theirs: tuple[int, int] | None
    process: subprocess.Popen[bytes] | None = None
    pid: int = 0
    pidfd: int = -1
    loading_error: str = ""
    killed: str = ""


class Workers:
    """`exited(peer, pid, reason, loading_error, detail)` is called once for each, when its process has been reaped and
    all that it sent was delivered. Pid 0: it never had a process."""

    def __init__(
        self,
        loop: Any,
        deliver: Callable[[int, list[Any], list[int]], None],
        exited: Callable[[int, int, str, str, str], None],
        say: Callable[[str, str, dict[str, Any]], None],
        groups: Callable[[], Groups] | None = None,
        prepared: bool = False,
        rate: Rate | None = None,
        variables: Sequence[str] = (),
    ) -> None:
        """`groups` divides our control group, so that the kernel keeps workers to their limits of memory. `prepared`:
        they are made of a prepared process. `rate`: how much of each one's output is logged. `variables`: what more of
        our environment they get."""
        self._environment = partial(worker_environment, tuple(variables))
        self._loop = loop
        self._deliver = deliver
        self._exited = exited
        self._say = say
        self._rate = rate
        self._workers: dict[int, Worker] = {}
        self.gpus: Mapping[int, str] = {}
        """The uuids of the GPUs, by number: a worker sees its own, and no other."""
        self.others: Set[int] = frozenset()
        """Pids of children that somebody else waits for."""
        self.used_on_gpu: Callable[[int], int] = lambda pid: 0
        """How much memory a process has on GPUs, as far as is known."""
        self._memory = Memory(loop, self.kill, make=groups)
        self._gpu_memory = Memory(
            loop, self.kill, lambda pid: self.used_on_gpu(pid), what="GPU memory", knobs=GPU_KNOBS
        )
        self._prepared = Prepared(loop, self._made, say, self._environment) if prepared else None
        self._reaping = loop.call_later(REAP_S, self._reap) if prepared else None

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, peer: int) -> Worker | None:
        return self._workers.get(peer)

    def names(self) -> dict[int, str]:
        """Of the processes that run, by pid."""
        found = {
            worker.pid: f"{worker.name} of model '{worker.about['model']}'" for worker in list(self._workers.values())
        }
        if self._prepared is not None:
            found[self._prepared.pid] = "the process that workers are forked from"
        return found

    def spawn(self, effect: Spawn, terms: Terms = NOTHING) -> Worker:
        """Raises OSError if it cannot be started. It may be a moment before there is a process."""
        peer, spec = effect.peer, effect.instance
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        about = {"model": effect.model, "version": effect.version, "instance": spec.name}
        output = children.Output(self._loop, _LEVELS, partial(self._log, spec.name, about), self._rate)
        group = self._memory.group(peer, terms.memory)
        words = arguments_of(spec, terms, str(group.processes) if group is not None else "") + self._variables(spec)
        link = Link(ours, peer, _codec, self._deliver, self._link_ended, self._loop)
        ends = (theirs.detach(), output.written)
        limits = terms.memory, terms.gpu_memory if spec.kind == "KIND_GPU" else 0
        worker = Worker(peer, spec.name, about, link, output, words, limits, ends)
        self._workers[peer] = worker
        if self._prepared is None or not self._prepared.start(peer, words, *ends):
            try:
                self._start(worker)
            except OSError:
                self._forget(worker)
                self._memory.ended(peer)
                raise
        return worker

    def _variables(self, spec: InstanceSpec) -> list[str]:
        """What is in its environment beside the rest."""
        uuid = self.gpus.get(spec.device) if spec.kind == "KIND_GPU" else None
        return ["--variable", f"{VISIBLE}={uuid}"] if uuid is not None else []

    def _start(self, worker: Worker) -> None:
        """As a fresh interpreter."""
        assert worker.theirs is not None
        link, written = worker.theirs
        worker.process = subprocess.Popen(
            [*python(), "-m", "shmserve.workers.main", "--link", str(link), *worker.words],
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=written,
            pass_fds=[link],
            env=self._environment(),
            start_new_session=True,  # a terminal's Ctrl-C is for the broker, which stops its workers in order
        )
        self._begun(worker, worker.process.pid, os.pidfd_open(worker.process.pid))

    def _made(self, peer: int, pid: int, pidfd: int) -> None:
        """The prepared process has made a worker, or could not."""
        worker = self._workers[peer]
        if pid:
            self._begun(worker, pid, pidfd)
            return
        reason = _reason(0, worker.killed)
        try:
            if not worker.killed:
                self._start(worker)
                return
        except OSError as error:
            reason = f"cannot start a process: {error.strerror}"
        self._forget(worker)
        self._memory.ended(peer)
        self._exited(peer, 0, reason, "", "")

    def _begun(self, worker: Worker, pid: int, pidfd: int) -> None:
        worker.pid, worker.pidfd = pid, pidfd
        self._close_theirs(worker)
        for memory, limit in zip((self._memory, self._gpu_memory), worker.memory, strict=True):
            memory.started(worker.peer, pid, limit)
        self._loop.add_reader(pidfd, self._ended, worker)
        if worker.killed:  # meanwhile
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def kill(self, peer: int, reason: str) -> None:
        worker = self._workers.get(peer)
        if worker is not None and not worker.killed:
            worker.killed = reason
            if worker.pid:
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
            else:
                self._loop.call_later(MAKING_S, self._not_made, worker)

    def _not_made(self, worker: Worker) -> None:
        if worker.peer in self._workers and not worker.pid and self._prepared is not None:
            self._prepared.replace("does not respond")

    def _link_ended(self, peer: int, reason: str) -> None:
        """Usually the process is ending too, and tells more; one that does not end is no worker any more."""
        self._loop.call_later(GRACE_S, self.kill, peer, "it closed its connection and did not exit")

    def _log(self, name: str, about: dict[str, Any], level: str, text: str) -> None:
        self._say(level, f"[{name}] {text}", about)

    def _ended(self, worker: Worker) -> None:
        """The process has ended. What it still said on its link and its stderr comes first."""
        # What its model started goes too. Not reaped yet, so the number is still its own.
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it ended before it led a group
            os.killpg(worker.pid, signal.SIGKILL)
        code = _code(worker)
        worker.link.drain()
        worker.output.finish()
        self._loop.remove_reader(worker.pidfd)
        os.close(worker.pidfd)
        self._forget(worker)
        self._gpu_memory.ended(worker.peer)
        reason = _reason(code, self._memory.ended(worker.peer) or worker.killed)
        self._exited(worker.peer, worker.pid, reason, worker.loading_error, "\n".join(worker.output.tail))

    def _forget(self, worker: Worker) -> None:
        worker.link.close("")
        self._close_theirs(worker)
        worker.output.close()
        del self._workers[worker.peer]

    def _close_theirs(self, worker: Worker) -> None:
        for descriptor in worker.theirs or ():
            os.close(descriptor)
        worker.theirs = None

    def _reap(self) -> None:
        assert self._prepared is not None
        if not self._prepared.busy:
            reap({self._prepared.pid, *self.others, *(worker.pid for worker in self._workers.values())})
        self._reaping = self._loop.call_later(REAP_S, self._reap)

    def close(self) -> None:
        """All of them have gone."""
        self._memory.close()
        self._gpu_memory.close()
        if self._reaping is not None:
            self._reaping.cancel()
        if self._prepared is not None:
            self._prepared.close()


def _code(worker: Worker) -> int:
    """As Popen has it: below 0 is a signal."""
    if worker.process is not None:
        return worker.process.wait()
    try:
        found = os.waitid(os.P_PIDFD, worker.pidfd, os.WEXITED)
    except ChildProcessError:  # somebody else has taken what it ended with
        return 255
    assert found is not None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def arguments_of(spec: InstanceSpec, terms: Terms, group: str) -> list[str]:
    """The command line of a worker, without its link. `group`: the file that it writes itself into, to be in its
    control group."""
    found = ["--name", spec.name]
    if spec.cpus:
        found += ["--cpus", ",".join(map(str, spec.cpus))]
    if spec.threads:
        found += ["--threads", str(spec.threads)]
    if group:
        found += ["--group", group]
    if terms.environment:
        found += ["--environment", terms.environment, "--unpacked", terms.unpacked]
    return found


def worker_environment(more: Sequence[str] = ()) -> dict[str, str]:
    """`more`: names of further variables, or patterns such as HF_*."""
    given = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_NEVER) and any(fnmatchcase(name, pattern) for pattern in more)
    }
    # A server does not tell others what it serves, unless it was set up to.
    return {"ORT_DISABLE_TELEMETRY": "1"} | given | children.environment(*_PASSED_ON) | {"PYTHONUNBUFFERED": "1"}


def _reason(code: int, killed: str) -> str:
    """`killed`: why we have ended it ourselves."""
    if killed:
        return f"killed: {killed}"
    return children.ended_with(code) + (", perhaps out of memory" if -code == signal.SIGKILL else "")

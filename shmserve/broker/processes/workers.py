"""Starts worker processes, reads their links and output, and reaps them.

The core decides whether a worker should run; this module only carries out its decisions.
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
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from shmserve.broker.link import EagerFlow, PeerLink
from shmserve.broker.processes import children
from shmserve.broker.processes.cgroups import ControlGroups
from shmserve.broker.processes.memory_limits import GPU_SETTINGS, MemoryLimits
from shmserve.broker.processes.zygote import Zygote, reap
from shmserve.core.effects import Spawn
from shmserve.core.policy import InstanceSpec
from shmserve.paths import python
from shmserve.protocol import codec
from shmserve.protocol.worker_messages import WorkerReport
from shmserve.repo.compile import environment
from shmserve.repo.config.schema import ModelConfig
from shmserve.repo.gpus import VISIBLE
from shmserve.repo.parameters import GPU_MEMORY_LIMIT, MEMORY_LIMIT
from shmserve.system.service_manager import VARIABLES

_LEVELS = {"verbose": "debug", "info": "info", "warning": "warning", "error": "error"}
"""Prefix of a worker's log line (see workers.say) -> level in the log. Other lines were printed by the model."""
REAP_S = 2.0
"""Interval for reaping orphaned processes that models started."""
FORK_S = 2.0
"""Time for the zygote to fork a worker that is to be killed; then the zygote is replaced."""
LOAD_NICE = 5
"""How much a worker lowers its priority while it loads, once the server is ready, so that requests take precedence."""
GRACE_S = 10.0
"""Time for a worker whose link has ended to exit before it is killed."""

_INHERITED = ("OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "ORT_", "CUDA_", "SHMSERVE_MODEL_")
"""Prefixes of the environment variables that workers get besides those of every child."""
_NEVER = ("SHMSERVE_", *VARIABLES)
"""Prefixes of variables that workers never get: the server's settings, and the service manager's variables."""

_codec = codec.Codec(WorkerReport)


class WorkerResources(Struct, frozen=True):
    """`memory` and `gpu_memory`: limits in bytes on the host and on its GPU; 0: no limit. `environment`: the
    interpreter's environment; "": the server's own. `unpacked`: directory for unpacked environment archives."""

    memory: int = 0
    environment: str = ""
    unpacked: str = ""
    gpu_memory: int = 0


DEFAULTS = WorkerResources()


def resources_of(
    config: ModelConfig, folder: Path, defaults: WorkerResources, backend_folder: Path | None = None
) -> WorkerResources:
    """The resources of a worker of this model. `backend_folder`: directory of its backend, if not built in."""
    own, on_gpu = MEMORY_LIMIT.read(config), GPU_MEMORY_LIMIT.read(config)
    return WorkerResources(
        defaults.memory if own is None else own,
        environment(config, str(folder), backend_folder),
        defaults.unpacked,
        defaults.gpu_memory if on_gpu is None else on_gpu,
    )


class WorkerSettings(Struct, frozen=True):
    variables: Sequence[str] = ()
    """Names or patterns of further environment variables that workers get."""
    gpus: Mapping[int, str] = {}
    """GPU number -> UUID. A worker sees only its own GPU."""
    used_on_gpu: Callable[[int], int] = lambda pid: 0
    """GPU memory of a process in bytes, 0 if unknown."""
    busy_poll_ns: int = 0
    """Longest time for which a worker polls for orders before it sleeps."""
    is_ready: Callable[[], bool] = lambda: False
    """Returns whether the initial loading has finished. From then on, workers that load have a lower priority."""


class WorkerHost(Protocol):
    """Gets what a worker reports. `worker_exited` is called once, after the process was reaped and all its messages
    were delivered. Pid 0: its process was never started."""

    def deliver(self, peer: int, messages: list[Any], descriptors: list[int]) -> None: ...

    def worker_exited(self, peer: int, pid: int, reason: str, loading_error: str, detail: str) -> None: ...


class Worker(Struct, eq=False):
    """`pid` 0: not started yet. `child_ends`: the worker's ends of its link and output, open until it has inherited
    them. `process` is set if the worker was started as a fresh interpreter."""

    peer: int
    name: str
    host: WorkerHost
    log_fields: dict[str, Any]
    """For the log: model, version, instance."""
    link: PeerLink
    output: children.Output
    arguments: list[str]
    memory: tuple[int, int]
    """Limits in bytes: on the host, and on its GPU."""
    child_ends: tuple[int, int] | None
    process: subprocess.Popen[bytes] | None = None
    pid: int = 0
    pidfd: int = -1
    loading_error: str = ""
    killed: str = ""


class Workers:
    def __init__(
        self,
        loop: Any,
        log_record: Callable[[str, str, dict[str, Any]], None],
        settings: WorkerSettings,
        groups: ControlGroups | None,
        other_children: Set[int],
    ) -> None:
        """`groups`: control groups, with which the kernel enforces memory limits. `other_children`: a live set of the
        pids of children that are reaped elsewhere, such as gateways."""
        self._settings = settings
        self._environment = partial(worker_environment, tuple(settings.variables))
        self._loop = loop
        self._log_record = log_record
        self._workers: dict[int, Worker] = {}
        self._other_children = other_children
        self._memory = MemoryLimits(loop, self.kill, groups=groups)
        self._gpu_memory = MemoryLimits(loop, self.kill, settings.used_on_gpu, what="GPU memory", settings=GPU_SETTINGS)
        self._zygote = Zygote(loop, self._forked, log_record, self._environment)
        self._reaping = loop.call_later(REAP_S, self._reap)

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, peer: int) -> Worker | None:
        return self._workers.get(peer)

    def names(self) -> dict[int, str]:
        """Names of running processes by pid."""
        names = {
            worker.pid: f"{worker.name} of model '{worker.log_fields['model']}'"
            for worker in list(self._workers.values())
        }
        return names | {self._zygote.pid: "the process that workers are forked from"}

    def spawn(
        self, effect: Spawn, host: WorkerHost, resources: WorkerResources, folders: Mapping[Path, Path]
    ) -> Worker:
        """Starts a worker, whose process may follow later. `folders`: see children.Output. Raises OSError if it cannot
        be started."""
        peer, spec = effect.peer, effect.instance
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log_fields = {"model": effect.model, "version": effect.version, "instance": spec.name}
        output = children.Output(self._loop, _LEVELS, partial(self._log, spec.name, log_fields), folders)
        group = self._memory.group(peer, resources.memory)
        arguments = arguments_of(spec, resources, str(group.processes) if group is not None else "")
        arguments += self._variables(spec)
        nice = LOAD_NICE if self._settings.is_ready() and not effect.urgent else 0
        arguments += ["--busy-poll-ns", str(self._settings.busy_poll_ns), "--load-nice", str(nice)]
        link = PeerLink(ours, peer, _codec, partial(EagerFlow, deliver=host.deliver), self._link_ended, self._loop)
        child_ends = (theirs.detach(), output.write_end)
        limits = resources.memory, resources.gpu_memory if spec.kind == "KIND_GPU" else 0
        worker = Worker(peer, spec.name, host, log_fields, link, output, arguments, limits, child_ends)
        self._workers[peer] = worker
        if not self._zygote.start(peer, arguments, *child_ends):
            try:
                self._start(worker)
            except OSError:
                self._forget(worker)
                self._memory.ended(peer)
                raise
        return worker

    def _variables(self, spec: InstanceSpec) -> list[str]:
        """Arguments for environment variables specific to this worker."""
        uuid = self._settings.gpus.get(spec.device) if spec.kind == "KIND_GPU" else None
        return ["--variable", f"{VISIBLE}={uuid}"] if uuid is not None else []

    def _start(self, worker: Worker) -> None:
        """Starts the worker as a fresh interpreter."""
        assert worker.child_ends is not None
        link, written = worker.child_ends
        worker.process = subprocess.Popen(
            [*python(), "-m", "shmserve.workers.main", "--link", str(link), *worker.arguments],
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=written,
            pass_fds=[link],
            env=self._environment(),
            start_new_session=True,  # shields it from a terminal's Ctrl-C, as the broker stops workers in order
        )
        self._started(worker, worker.process.pid, os.pidfd_open(worker.process.pid))

    def _forked(self, peer: int, pid: int, pidfd: int) -> None:
        """Called when the zygote has forked a worker. If it failed (pid 0), starts a fresh interpreter."""
        worker = self._workers[peer]
        if pid:
            self._started(worker, pid, pidfd)
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
        worker.host.worker_exited(peer, 0, reason, "", "")

    def _started(self, worker: Worker, pid: int, pidfd: int) -> None:
        worker.pid, worker.pidfd = pid, pidfd
        self._close_child_ends(worker)
        for memory, limit in zip((self._memory, self._gpu_memory), worker.memory, strict=True):
            memory.started(worker.peer, pid, limit)
        self._loop.add_reader(pidfd, self._ended, worker)
        if worker.killed:  # `kill` was called before the process started
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def kill(self, peer: int, reason: str) -> None:
        worker = self._workers.get(peer)
        if worker is not None and not worker.killed:
            worker.killed = reason
            if worker.pid:
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
            else:
                self._loop.call_later(FORK_S, self._check_forked, worker)

    def _check_forked(self, worker: Worker) -> None:
        if worker.peer in self._workers and not worker.pid:
            self._zygote.replace("does not respond")

    def _link_ended(self, peer: int, reason: str) -> None:
        """Kills the process after GRACE_S. Usually it exits earlier by itself, which gives a better reason."""
        self._loop.call_later(GRACE_S, self.kill, peer, "it closed its connection and did not exit")

    def _log(self, name: str, log_fields: dict[str, Any], level: str, text: str) -> None:
        self._log_record(level, f"[{name}] {text}", log_fields)

    def _ended(self, worker: Worker) -> None:
        """Delivers the last messages and output of a process that has exited, then reports the exit."""
        # Kill processes that the model started. The worker has not been reaped, so no other group can have its pid.
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it exited before it became a group leader
            os.killpg(worker.pid, signal.SIGKILL)
        code = _exit_code(worker)
        worker.link.flow.drain()
        worker.output.finish()
        self._loop.remove_reader(worker.pidfd)
        os.close(worker.pidfd)
        self._forget(worker)
        self._gpu_memory.ended(worker.peer)
        reason = _reason(code, self._memory.ended(worker.peer) or worker.killed)
        tail = "\n".join(worker.output.tail)
        worker.host.worker_exited(worker.peer, worker.pid, reason, worker.loading_error, tail)

    def _forget(self, worker: Worker) -> None:
        worker.link.close("")
        self._close_child_ends(worker)
        worker.output.close()
        del self._workers[worker.peer]

    def _close_child_ends(self, worker: Worker) -> None:
        for descriptor in worker.child_ends or ():
            os.close(descriptor)
        worker.child_ends = None

    def _reap(self) -> None:
        if not self._zygote.busy:
            reap({self._zygote.pid, *self._other_children, *(worker.pid for worker in self._workers.values())})
        self._reaping = self._loop.call_later(REAP_S, self._reap)

    def close(self) -> None:
        """Called after all workers have exited."""
        self._memory.close()
        self._gpu_memory.close()
        self._reaping.cancel()
        self._zygote.close()


def _exit_code(worker: Worker) -> int:
    """Exit code as in Popen, negative for a signal."""
    if worker.process is not None:
        return worker.process.wait()
    try:
        status = os.waitid(os.P_PIDFD, worker.pidfd, os.WEXITED)
    except ChildProcessError:  # the process was reaped elsewhere, so its exit code is lost
        return 255
    assert status is not None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def arguments_of(spec: InstanceSpec, resources: WorkerResources, group: str) -> list[str]:
    """The command line of a worker, without its link. `group`: the cgroup.procs file to which the worker writes its pid
    to join its control group."""
    arguments = ["--name", spec.name]
    if spec.cpus:
        arguments += ["--cpus", ",".join(map(str, spec.cpus))]
    if spec.threads:
        arguments += ["--threads", str(spec.threads)]
    if group:
        arguments += ["--group", group]
    if resources.environment:
        arguments += ["--environment", resources.environment, "--unpacked", resources.unpacked]
    return arguments


def worker_environment(more: Sequence[str] = ()) -> dict[str, str]:
    """The environment of a worker. `more`: names or patterns, such as HF_*, of further variables."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_NEVER) and any(fnmatchcase(name, pattern) for pattern in more)
    }
    # Disable telemetry, which would reveal what is served, unless the environment enables it.
    return {"ORT_DISABLE_TELEMETRY": "1"} | variables | children.environment(*_INHERITED) | {"PYTHONUNBUFFERED": "1"}


def _reason(code: int, killed: str) -> str:
    """The reason for an exit. `killed`: why the broker killed the process, if it did."""
    if killed:
        return f"killed: {killed}"
    return children.describe_exit(code) + (", perhaps out of memory" if -code == signal.SIGKILL else "")

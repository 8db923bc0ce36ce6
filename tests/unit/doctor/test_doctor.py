"""The checks of the command, on a machine made of files below a folder, and the report."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shmserve.broker.processes import cgroups
from shmserve.clients.cli.commands.doctor import report
from shmserve.clients.cli.main import main
from shmserve.doctor import checks
from shmserve.doctor.machine import ERROR, INFO, OK, UNLIMITED, WARNING, Finding, Machine
from shmserve.extras import GATEWAY, NEEDED, install_command
from shmserve.protocol.messages import PACKET_BYTES
from shmserve.repo import gpus
from shmserve.repo.gpus import Gpu, Gpus
from shmserve.terminal.console import Screen
from shmserve.workers.backends.registry import BACKENDS
from tests import ROOT
from tests.support.cases import cases
from tests.support.commands import COMMAND
from tests.support.workers.gpu.harness import standins

GROUP = "service"
INSTALLED = {*NEEDED, *GATEWAY}


def machine(root: Path, **changes: Any) -> Machine:
    """A machine that lacks nothing. Its group of cgroup v2 is GROUP, which has no limit."""
    group = root / "sys" / "fs" / "cgroup"
    files = {
        "proc/meminfo": "MemTotal:       33554432 kB\nMemAvailable:   16777216 kB\n",
        "proc/self/cgroup": f"0::/{GROUP}\n",
        "proc/self/mounts": f"cgroup2 {group} cgroup2 rw 0 0\n",
        "proc/sys/net/core/wmem_max": "212992\n",
        f"sys/fs/cgroup/{GROUP}/cgroup.controllers": "cpu memory pids\n",
        "dev/shm/.keep": "",
    }
    for name, text in files.items():
        write(root, name, text)
    whole = Machine(
        root=root,
        environment={},
        python=(3, 12),
        implementation="CPython",
        release="6.1.0-17-amd64",
        cores=(0, 1, 2, 3),
        descriptors=lambda: 1 << 20,
        processes=lambda: 1 << 15,
        version=lambda package: "",
        has_module=INSTALLED.__contains__,
        is_free=lambda port: True,
        ports_of=lambda path: None,
    )
    return msgspec.structs.replace(whole, **changes)


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def only(findings: list[Finding]) -> Finding:
    (found,) = findings
    return found


OWN = f"sys/fs/cgroup/{GROUP}"


@cases(
    (checks.linux, {"release": "5.2.21-generic"}, {}, ERROR, "5.2.21-generic", "5.3"),
    (checks.linux, {"release": "5.3.0"}, {}, OK, "5.3.0", ""),
    (checks.linux, {"release": "10.0"}, {}, OK, "10.0", ""),
    (checks.memory, {}, {}, OK, "16.0 GiB available", ""),
    (checks.memory, {}, {f"{OWN}/memory.max": "max\n"}, OK, "16.0 GiB available", ""),
    (
        checks.memory,
        {},
        {"sys/fs/cgroup/memory.max": f"{512 << 20}\n"},  # of the group above its own
        WARNING,
        "16.0 GiB available, the control group allows 512 MiB",
        "MemoryMax=",
    ),
    (checks.memory, {}, {"proc/meminfo": "MemAvailable:    524288 kB\n"}, WARNING, "512 MiB available", ""),
    (checks.memory, {}, {"proc/meminfo": ""}, ERROR, "", ""),
    # 25600: 4096 connections, 16384 segments, 1024 of the broker, 4096 for files of models
    (checks.descriptors, {"descriptors": lambda: 25_599}, {}, WARNING, "25599", "LimitNOFILE=25600"),
    (checks.descriptors, {"descriptors": lambda: 25_600}, {}, OK, "25600", ""),
    (checks.descriptors, {"descriptors": lambda: UNLIMITED}, {}, OK, "no limit", ""),
    (checks.processes, {}, {}, OK, "", ""),
    (checks.processes, {}, {f"{OWN}/pids.max": "100\n"}, WARNING, "user 32768, control group 100", "TasksMax="),
    (checks.processes, {"processes": lambda: 512}, {}, WARNING, "", "ulimit -u 8192"),
    (checks.socket_buffers, {}, {"proc/sys/net/core/wmem_max": "98335\n"}, ERROR, "", ""),
    (checks.socket_buffers, {}, {"proc/sys/net/core/wmem_max": "98336\n"}, OK, "", ""),
    (checks.socket_buffers, {}, {"proc/sys/net/core/wmem_max": ""}, INFO, "", ""),
    (checks.cores, {}, {}, OK, "4 usable", ""),
    (checks.cores, {}, {f"{OWN}/cpu.max": "150000 100000\n"}, WARNING, "4 usable, a quota of 2", "--cpu-list 0-1"),
    (checks.cores, {"cores": (0, 1)}, {}, OK, "2 usable", ""),
)
def test_limits(
    check: Callable[[Machine], list[Finding]],
    changes: dict[str, Any],
    files: dict[str, str],
    state: str,
    found: str,
    fix: str,
    tmp_path: Path,
) -> None:
    """`found`: a part of what was found; `fix`: of what to do, or what is needed."""
    whole = machine(tmp_path, **changes)
    for name, text in files.items():
        write(tmp_path, name, text)
    finding = only(check(whole))
    assert finding.state == state
    assert found in finding.found
    assert fix in finding.fix + finding.needed
    assert bool(finding.fix) == (state in (WARNING, ERROR))


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = machine(tmp_path)
    for free, total, state, text in (
        (64 << 20, 64 << 20, WARNING, "64 MiB free of 64 MiB"),
        ((1 << 30) - 4096, 8 << 30, WARNING, "1023 MiB free of 8.0 GiB"),
        (1 << 30, 2 << 30, OK, "1.0 GiB free of 2.0 GiB"),
    ):
        status = SimpleNamespace(f_bavail=free // 4096, f_blocks=total // 4096, f_frsize=4096)
        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", lambda path, status=status: status)
            found = only(checks.shared_memory(whole))
        assert (found.state, found.found) == (state, text)
        assert ("--shm-size" in found.fix) == (state == WARNING)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        found = only(checks.shared_memory(whole))
    assert (found.state, "not writable" in found.found) == (ERROR, True)
    (tmp_path / "dev" / "shm" / ".keep").unlink()
    (tmp_path / "dev" / "shm").rmdir()
    found = only(checks.shared_memory(whole))
    assert (found.state, found.found) == (ERROR, "No such file or directory")
    assert found.fix.startswith("mount -t tmpfs")


def test_the_needed_socket_buffer_is_what_the_kernel_requires() -> None:
    """A packet of the largest size fits into a buffer of the needed size, and not into a smaller one."""
    for less, fits in ((0, True), (64, False)):
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with left, right:
            size = PACKET_BYTES // 2 + checks.OVERHEAD_BYTES
            left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size - less)
            if fits:
                assert left.send(bytes(PACKET_BYTES)) == PACKET_BYTES
            else:
                with pytest.raises(OSError, match="Message too long"):
                    left.send(bytes(PACKET_BYTES))


def test_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = machine(tmp_path)
    monkeypatch.setattr(cgroups, "_is_delegated", lambda top: True)
    assert only(checks.control_groups(whole)).state == OK
    write(tmp_path, f"{OWN}/cgroup.controllers", "cpu\n")
    found = only(checks.control_groups(whole))
    assert found.state == INFO
    assert "does not have the memory controller" in found.found
    assert "Delegate=memory" in found.fix
    write(tmp_path, "proc/self/mounts", "")
    assert only(checks.control_groups(whole)).found == "cgroup v2 is not mounted"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = Path(os.path.relpath(tmp_path)) / "run"  # a short path, whatever the name of tmp_path
    monkeypatch.setenv("SHMSERVE_RUNTIME_DIR", str(path))
    return path


def test_the_runtime_directory(tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> Finding:
        return only(checks.runtime_directory(machine(tmp_path)))

    assert found().state == OK
    assert not directory.exists(), "it can be created, and is not"
    directory.mkdir(mode=0o700)
    assert found().state == OK
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 4711)
        text = f"{directory} belongs to uid {directory.stat().st_uid}"
        assert (found().state, found().found) == (ERROR, text)
    directory.chmod(0o777)
    assert (found().state, found().fix) == (ERROR, f"chmod 700 {directory}")
    stat = os.stat

    def refused(path: Any, **options: Any) -> os.stat_result:
        if path == directory:
            raise PermissionError
        return stat(path, **options)

    with monkeypatch.context() as patch:  # it is below a folder that this user may not search
        patch.setattr(os, "stat", refused)
        patch.setattr(os, "access", lambda place, mode: False)
        result = found()
    assert (result.state, result.found) == (ERROR, f"{directory.parent} is not writable")


@pytest.mark.parametrize(("length", "state", "error"), [(107, OK, "No such file"), (108, ERROR, "path too long")])
def test_the_length_of_a_socket_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, state: str, error: str
) -> None:
    """The limit is that of the kernel."""
    path = "/tmp/" + "x" * (length - len("/tmp//broker.sock")) + "/broker.sock"
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(OSError, match=error):
        probe.connect(path)
    monkeypatch.setenv("SHMSERVE_RUNTIME_DIR", os.path.dirname(path))
    assert only(checks.runtime_directory(machine(tmp_path))).state == state


def test_ports(tmp_path: Path, directory: Path) -> None:
    def found(**changes: Any) -> list[tuple[str, str]]:
        return [(one.check, one.state) for one in checks.ports(machine(tmp_path, **changes))]

    http, grpc, metrics = ("port 8000 (http)", OK), ("port 8001 (grpc)", OK), ("port 8002 (metrics)", OK)
    assert found() == [http, grpc, metrics]
    assert found(environment={"SHMSERVE_HTTP_PORT": "9000"}) == [("port 9000 (http)", OK), grpc, metrics]
    used = machine(tmp_path, is_free=lambda port: port != 8001)
    assert [one.state for one in checks.ports(used)] == [OK, ERROR, OK]
    assert checks.ports(used)[1].fix.startswith("shmserve serve --grpc-port N")
    wrong = machine(tmp_path, environment={"SHMSERVE_GRPC_PORT": "70000"}, is_free=Machine().is_free)
    refused = checks.ports(wrong)[1]
    assert (refused.state, refused.found) == (ERROR, "not a port")
    assert refused.fix == "set SHMSERVE_GRPC_PORT to one up to 65535"
    # The ports of a running server, while another server has the default ones.
    place = tmp_path / "mine"
    runs = {"is_free": lambda port: False, "ports_of": {place: {"http": 9000}}.get, "runtime_dir": place}
    assert found(**runs) == [("port 9000 (http)", OK)]
    assert only(checks.runtime_directory(machine(tmp_path, **runs))).found == f"{place}, where a server runs"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert not Machine().is_free(port)
    assert Machine().is_free(port)


ONE_GPU = Gpus((Gpu(0, 0, "GPU-8f2c", "00000000:3B:00.0", "NVIDIA L4"),))


def test_python_and_packages(tmp_path: Path) -> None:
    for implementation, version, state in (
        ("CPython", (3, 9), ERROR),
        ("CPython", (3, 10), OK),
        ("CPython", (3, 14), OK),
        ("PyPy", (3, 11), ERROR),
    ):
        this = machine(tmp_path, implementation=implementation, python=version)
        assert only(checks.python(this)).state == state
    assert only(checks.packages(machine(tmp_path))).state == OK
    for missing, state in (("uvloop", ERROR), ("httptools", WARNING)):
        found = only(checks.packages(machine(tmp_path, has_module=(INSTALLED - {missing}).__contains__)))
        assert (found.state, found.found) == (state, f"missing: {missing}")
        assert found.fix == install_command("server")


def test_engines(tmp_path: Path) -> None:
    assert set(checks.DISTRIBUTIONS) == set(BACKENDS)
    assert all(BACKENDS[name].extra for name, packages in checks.DISTRIBUTIONS.items() if packages)
    installed = {"onnxruntime": "1.20.0", "nvidia-dali-cuda130": "2.1"}
    engines = checks.engines(machine(tmp_path, version=lambda name: installed.get(name, "")))
    found = {finding.check: finding for finding in engines}
    assert (found["backend onnxruntime"].found, found["backend dali"].state) == ("onnxruntime 1.20.0", OK)
    missing = found["backend pytorch"]
    assert (missing.state, missing.fix) == (INFO, install_command("torch"))
    assert "backend python" not in found
    assert found["backend tensorrt"].fix == f"in another environment, without onnxruntime: {install_command('gpu')}"
    both = checks.engines(machine(tmp_path, version=lambda name: "1.20"))
    (same,) = [finding for finding in both if finding.check == "backend onnxruntime"]
    assert (same.state, same.found) == (WARNING, "onnxruntime 1.20 and onnxruntime-gpu 1.20")


@cases(
    ({}, "", "", ""),
    ({"lost": 16}, ERROR, "the driver requires a reset", "reset it (nvidia-smi --gpu-reset -i 0000:3B:00.0)"),
    ({"action": 2}, ERROR, "the driver recommends a reboot", "reboot the machine"),
    ({"rows": [0, 1, 1, 0]}, WARNING, "defective memory is remapped at the next reset", "stop all programs on it"),
    ({"uncorrected": 3}, WARNING, "3 uncorrected memory errors", "nvidia-smi -q -d ECC -i 0000:3B:00.0"),
)
def test_health_of_gpus(
    state: dict[str, Any], level: str, found: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, checks.CONTROL, "")
    slices = [{"uuid": "MIG-01"}, {"uuid": "MIG-02"}]
    one, two = {"uuid": "GPU-1", "pci": "0000:3B:00.0"} | state, {"uuid": "GPU-2", "pci": "0000:5E:00.0", "mig": slices}
    monkeypatch.setenv("STANDIN_GPUS", json.dumps([{"uuid": "GPU-1", "pci": "0000:3B:00.0"}, two]))
    with standins():
        listed = gpus.discover({})
        monkeypatch.setattr(gpus, "discover", lambda environment, control: listed)
        monkeypatch.setenv("STANDIN_GPUS", json.dumps([one, two]))
        first, *rest = checks.gpus(machine(tmp_path, version=lambda name: ""))
    assert first.found == "0: Stand-in, 1: Stand-in, 2: Stand-in (2 MIG slices)"
    health = [finding for finding in rest if finding.check == "GPU 0"]
    assert [(finding.state, finding.found) for finding in health] == ([(level, found)] if level else [])
    assert all(fix in finding.fix for finding in health)
    assert not [finding for finding in rest if finding.check == "GPU 1, 2"]


def test_drivers_and_engines_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(checks.gpus(machine(tmp_path))).state == INFO
    write(tmp_path, checks.CONTROL, "")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", None)
        found = only(checks.gpus(machine(tmp_path)))
    assert (found.state, found.fix) == (WARNING, install_command("gpu"))
    assert "nvidia-ml-py" in found.found
    write(tmp_path, checks.DRIVER, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06\nGCC version: 12\n")
    monkeypatch.setattr(gpus, "discover", lambda environment, control: ONE_GPU)
    for version, providers, text in (
        ("", [], "onnxruntime-gpu is not installed: ONNX models run on the CPU"),
        ("1.20", ["CPUExecutionProvider"], "providers CPUExecutionProvider"),
        ("1.20", ["CUDAExecutionProvider", "CPUExecutionProvider"], ""),
    ):
        engine = SimpleNamespace(get_available_providers=lambda providers=providers: providers)
        monkeypatch.setitem(sys.modules, "onnxruntime", engine)
        driver, *rest = checks.gpus(machine(tmp_path, version=lambda name, version=version: version))
        assert driver.state == OK
        assert driver.found == "0: NVIDIA L4 (NVIDIA UNIX x86_64 Kernel Module  580.65.06)"
        assert [finding.found for finding in rest] == ([text] if text else [])
        assert all(finding.state == WARNING and finding.fix for finding in rest)


FINDINGS = [
    Finding("linux", OK, "6.1", "5.3"),
    Finding("cores", INFO, "2", "", "look"),
    Finding("descriptors", WARNING, "1024", "25600", "ulimit -Hn 25600"),
    Finding("port 8000", ERROR, "in use", "free", "shmserve serve --http-port N"),
]


def test_the_report() -> None:
    assert report(FINDINGS, Screen(False, io.StringIO())).splitlines() == [
        "check        state    found   needed",
        "linux        ok       6.1     5.3",
        "cores        info     2       -",
        "descriptors  warning  1024    25600",
        "port 8000    error    in use  free",
        "",
        "port 8000: shmserve serve --http-port N",
        "descriptors: ulimit -Hn 25600",
        "cores: look",
        "",
        "a server cannot run here: errors 1, warnings 1",
    ]


def test_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for findings, code in ((FINDINGS[:3], 0), (FINDINGS, 1)):
        monkeypatch.setattr("shmserve.clients.cli.commands.doctor.examine", lambda machine, found=findings: found)
        assert main(["doctor", "--json"]) == code
        document = json.loads(capsys.readouterr().out)
        assert document["can_serve"] is (code == 0)
        assert document["findings"][2] == {
            "check": "descriptors", "state": "warning", "found": "1024", "needed": "25600", "fix": "ulimit -Hn 25600",
        }  # fmt: skip


def test_every_finding_that_is_a_fault_has_a_fix() -> None:
    """Tested on this machine, whatever it lacks."""
    command = [*COMMAND, "doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    document = json.loads(done.stdout)
    assert done.returncode == (0 if document["can_serve"] else 1)
    for finding in document["findings"]:
        assert finding["found"]
        assert finding["state"] in (OK, INFO) or (finding["fix"] and finding["needed"]), finding
    assert {finding["check"] for finding in document["findings"]} > {"linux", "/dev/shm", "memory", "descriptors"}

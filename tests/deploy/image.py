"""The image, built by Podman from deploy/container/Dockerfile, without a network and without an image registry.

The base image is built from Debian's packages; wheels come from pip. Everything is in build/fleet.
"""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests import ROOT
from tests.deploy import programs
from tests.fleet.programs import PLACE, environment, find
from tests.support.system.apt import DEBIAN, run

BASE = "localhost/debian-python"
IMAGE = "localhost/shmserve"
SOURCES = ("LICENSE", "README.md", "pyproject.toml", "setup.cfg", "shmserve", "workers", "repo", "clients", "wheels")
"""The same files as in .dockerignore."""
BUILD_S = 900
RELEASE = Path("/etc/os-release")
CONTEXT = PLACE / "context"
CONFIGURATION = """
[containers]
seccomp_profile = "{unpacked}/usr/share/containers/seccomp.json"
[engine]
conmon_path = ["{conmon}"]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
[engine.runtimes]
runc = ["{runc}"]
[network]
network_config_dir = "{networks}"
"""


class Unavailable(Exception):
    """Containers cannot be built or run on this machine; the text says why."""


class Failed(Exception):
    """Podman works, but a command has failed."""


def podman(*words: str) -> list[str]:
    """A Podman command, with separate storage."""
    program = find("podman")
    if program is None:
        raise Unavailable("Podman is not installed; `make test-fleet` installs it")
    storage, runs = PLACE / "storage", PLACE / "runs"
    return [str(program), "--root", str(storage), "--runroot", str(runs), "--tmpdir", str(runs / "tmp"), *words]


@cache
def podman_environment() -> dict[str, str]:
    """The configuration is found through HOME and a variable, so that /etc stays unchanged."""
    unpacked, home = PLACE / "podman", PLACE / "home"
    folder = home / ".config" / "containers"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    paths = {name: unpacked / "usr" / place / name for name, place in (("conmon", "bin"), ("runc", "sbin"))}
    known = {name: path if path.exists() else shutil.which(name) for name, path in paths.items()}
    configuration = PLACE / "containers.conf"
    configuration.write_text(CONFIGURATION.format(unpacked=unpacked, networks=PLACE / "networks", **known))
    return environment("podman") | {"HOME": str(home), "CONTAINERS_CONF": str(configuration)}


def call(*words: str, timeout_s: float = BUILD_S) -> str:
    try:
        return run(*podman(*words), timeout_s=timeout_s, env=podman_environment())
    except subprocess.SubprocessError as error:
        raise Failed(f"podman {words[0]}: {error}") from error


@cache
def build() -> str:
    """The name of the image, which is built if its sources have changed. Raises Unavailable if this machine lacks
    something, Failed if the Dockerfile does not work.
    """
    try:
        _make_base()
        _make_context()
    except (Failed, subprocess.SubprocessError, OSError) as error:
        raise Unavailable(str(error)) from error
    name = f"{IMAGE}:{_digest()}"
    if call("images", "--quiet", name):
        return name
    call(
        *("build", "--isolation", "oci", "--network", "none", "--tag", name),
        *("--build-arg", f"BASE={BASE}", "--build-arg", "PIP_ARGS=--no-index --find-links=/src/wheels"),
        *("--file", str(CONTEXT / "deploy/container/Dockerfile"), str(CONTEXT)),
    )
    older = call("images", "--quiet", "--filter", f"reference={IMAGE}", "--filter", f"before={name}").split()
    for found in set(older):
        call("rmi", "--force", found)
    call("image", "prune", "--force")
    return name


def _make_base() -> None:
    """Makes the base: Debian with the Python of this machine's release, the same packages as in Python's official
    image."""
    if not call("images", "--quiet", BASE):
        mmdebstrap, tar = find("mmdebstrap"), PLACE / "base.tar"
        if mmdebstrap is None or not DEBIAN.is_file():
            raise Unavailable("the base image needs mmdebstrap and a machine with Debian's package lists")
        options = ("--variant=minbase", "--include=python3,python3-venv", "--dpkgopt=force-unsafe-io", "--quiet")
        run(str(mmdebstrap), *options, _release()["VERSION_CODENAME"], str(tar), str(DEBIAN), timeout_s=BUILD_S)
        call("import", str(tar), BASE)
        tar.unlink()
    version = call("run", "--rm", "--network", "none", *limits(), BASE, "python3", "--version").split()[1]
    if version.split(".")[:2] != [str(part) for part in sys.version_info[:2]]:
        raise Unavailable(f"the base has Python {version}, and pip gets wheels for {sys.version.split()[0]}")


def _digest() -> str:
    """A digest of all files that the Dockerfile may copy."""
    found = hashlib.sha256()
    for name in ("deploy/container", ".dockerignore", *SOURCES):
        for path in sorted([CONTEXT / name, *(CONTEXT / name).rglob("*")]):
            if path.is_file() and not path.is_symlink():
                found.update(f"{path.relative_to(CONTEXT)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _release() -> dict[str, str]:
    lines = (line.partition("=") for line in RELEASE.read_text().splitlines())
    return {key: value.strip('"') for key, _, value in lines}


def _make_context() -> None:
    """Makes the build context: the files of a fresh clone, and wheels."""
    requirements = hashlib.sha256((ROOT / "setup.cfg").read_bytes()).hexdigest()[:16]
    wheels = PLACE / f"wheels-{requirements}"
    if not wheels.exists():
        scratch = PLACE / "wheels.new"
        shutil.rmtree(scratch, ignore_errors=True)
        words = ("--dest", str(scratch), ".[server]", "setuptools>=77", "wheel")
        run(sys.executable, "-m", "pip", "download", *programs.PIP, *words, cwd=str(ROOT))
        scratch.rename(wheels)
    shutil.rmtree(CONTEXT, ignore_errors=True)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        if os.path.lexists(ROOT / name):
            (CONTEXT / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, CONTEXT / name, follow_symlinks=False)
    shutil.copytree(wheels, CONTEXT / "wheels", copy_function=os.link)


def limits(memory: str = "2g", cpus: str = "2") -> list[str]:
    """Resource limits. They include the number of processes, because Podman's default exceeds what root may set without
    CAP_SYS_RESOURCE."""
    wanted = {"nofile": (resource.RLIMIT_NOFILE, 65536), "nproc": (resource.RLIMIT_NPROC, 4096)}
    words = ["--memory", memory, "--cpus", cpus]
    for name, (kind, most) in wanted.items():
        allowed = resource.getrlimit(kind)[1]
        limit = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        words += ["--ulimit", f"{name}={limit}:{limit}"]
    return words

"""Settings of worker processes: a memory limit, a separate interpreter for a model (EXECUTION_ENV_PATH), cores, and the
number of threads."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tarfile
import venv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shmserve
from shmserve.errors import ModelFailed, ServeError
from shmserve.protocol import codec
from shmserve.protocol.worker_messages import Load, LoadFailed, WorkerReport
from shmserve.testing import Server
from shmserve.workers import bootstrap
from shmserve.workers.process.environment import NEEDED, command
from shmserve.workers.process.exit_codes import Exit
from tests import ROOT
from tests.support.cases import cases
from tests.support.commands import COMMAND
from tests.support.ensemble_models import config_text
from tests.support.launch import Launched
from tests.support.living import until
from tests.support.model_files import parameters, python_model, write_model
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.process

MODEL = python_model(
    """
    kind, _, value = x[0].decode().partition(" ")
    if kind == "hold":
        self.held.append(np.ones(int(value) << 20, np.uint8))
        if value != "1":
            select.select([], [], [])
    found = {"hold": "held", "prefix": sys.prefix, "variable": os.environ.get(value, ""), "path": str(sys.path),
             "only": getattr(self.only_here, "TEXT", "")}[kind]
    return self.respond(np.array([found], object))
    """,
    """
    self.held = []
    try:
        import only_here
        self.only_here = only_here
    except ImportError:
        self.only_here = None
    """,
)
CONFIG = config_text("python", "x:STRING:[1]", "y:STRING:[1]", "instance_group { count: 1 kind: KIND_CPU }")


class Place:
    def __init__(self, folder: Path, server: Server, client: shmserve.Client) -> None:
        self.folder, self.server, self.client = folder, server, client

    def write(self, name: str, count: int = 1, **values: str) -> Path:
        text = CONFIG.replace("count: 1", f"count: {count}") + parameters(**values)
        return write_model(self.folder / "models", name, text, MODEL)

    def ask(self, name: str, text: str) -> str:
        found = self.client.infer(name, {"x": np.array([text], object)}, timeout=PATIENCE_S)["y"][0]
        return found.decode() if isinstance(found, bytes) else str(found)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("processes")
    (folder / "models").mkdir()
    options = ("--model-control-mode", "explicit", "--cache-directory", str(folder / "cache"))
    with Server(folder / "models", *options) as server, shmserve.Client(server.url) as client:
        client.wait_ready(timeout=PATIENCE_S)
        yield Place(folder, server, client)


def test_only_the_worker_over_its_memory_limit_is_killed(place: Place) -> None:
    place.write("hungry", count=2, memory_limit_mb="250")
    place.write("modest")
    place.client.load("hungry")
    place.client.load("modest")
    assert place.ask("hungry", "hold 1") == "held"
    with pytest.raises(ModelFailed, match=r"killed: it uses ... MiB .*, limit 250 MiB") as found:
        place.ask("hungry", "hold 600")
    assert "(--instance-memory-limit, memory_limit_mb)" in str(found.value)
    assert place.ask("modest", "hold 1") == "held"
    assert place.ask("hungry", "hold 1") == "held", "the other instance, or the same after its restart"
    assert "hold 600" not in place.server.log
    assert "private memory, limit 250 MiB" in place.server.log
    place.client.unload("hungry")
    place.client.unload("modest")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("environments") / "venv"
    venv.create(made, symlinks=True, with_pip=False)
    (packages,) = (made / "lib").glob("python*/site-packages")
    (packages / "only_here.py").write_text('TEXT = "only here"\n')
    return made


def test_a_worker_uses_the_interpreter_of_its_environment(place: Place, environment: Path) -> None:
    place.write("own", count=2, EXECUTION_ENV_PATH=str(environment))
    place.client.load("own")
    assert place.ask("own", "prefix") == str(environment)
    assert place.ask("own", "only") == "only here"
    assert place.ask("own", "variable VIRTUAL_ENV") == str(environment)
    assert place.ask("own", "variable PATH").startswith(f"{environment}/bin:")
    assert place.ask("own", "variable PYTHONPATH") == ""
    ours = str(Path(np.__file__).parents[1])
    assert ours not in place.ask("own", "path"), "of our packages only those that a worker needs can be imported"
    place.client.unload("own")


def packed(path: Path, environment: Path) -> None:
    """An archive like those of conda-pack: it contains the interpreter itself, not a link."""
    folder = path.with_suffix(".folder")
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python3").write_text(f'#!/bin/sh\nexec {environment}/bin/python "$@"\n')
    (folder / "bin" / "python3").chmod(0o755)
    (folder / "conda-meta").mkdir()
    with tarfile.open(path, "w:gz") as file:
        file.add(folder, ".")


def test_an_archive_is_unpacked_once_for_all_instances_and_shmserve_run(place: Place, environment: Path) -> None:
    folder = place.write("packed", count=3, EXECUTION_ENV_PATH="$$TRITON_MODEL_DIRECTORY/env.tar.gz")
    packed(folder / "env.tar.gz", environment)
    place.client.load("packed")
    (made,) = [path for path in (place.folder / "cache" / "environments").iterdir() if path.is_dir()]
    assert place.ask("packed", "variable CONDA_PREFIX") == str(made / "root")
    assert place.ask("packed", "only") == "only here"
    until(place.client, lambda: "unpacking the archive" in place.server.log)  # it may be logged after the answers
    assert place.server.log.count("unpacking the archive") == 1
    place.client.unload("packed")
    done = shmserve_run(folder, "only", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outputs"]["y"]["data"] == ["only here"], done.stdout
    (folder / "1" / "model.py").write_text("import nothing_of_that_name\n")
    done = shmserve_run(folder, "only")
    assert done.returncode == 1
    assert "No module named 'nothing_of_that_name'" in done.stderr


def shmserve_run(folder: Path, what: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "run", str(folder), "--input", f"x={what}", *words]
    caches = os.environ | {"CACHE_DIRECTORY": str(folder.parent / "caches")}
    return subprocess.run(command, env=caches, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@cases(
    ("gone", "$$TRITON_MODEL_DIRECTORY/nowhere", "EXECUTION_ENV_PATH: there is no such directory or archive"),
    ("none", "$$TRITON_MODEL_DIRECTORY/1", "neither bin/python3 nor bin/python in it can be run; is it an"),
    ("file", "$$TRITON_MODEL_DIRECTORY/config.pbtxt", "the archive of EXECUTION_ENV_PATH cannot be read"),
    ("broken", "$$TRITON_MODEL_DIRECTORY/env", "EXECUTION_ENV_PATH: its python3 cannot be run: Exec format error"),
)
def test_an_environment_without_an_interpreter_is_reported(name: str, where: str, reason: str, place: Place) -> None:
    folder = place.write(name, EXECUTION_ENV_PATH=where)
    (folder / "env" / "bin").mkdir(parents=True)
    (folder / "env" / "bin" / "python3").write_text("no program")
    (folder / "env" / "bin" / "python3").chmod(0o755)
    with pytest.raises(ServeError) as found:
        place.client.load(name)
    assert reason in str(found.value)
    assert str(place.folder) not in str(found.value)


def first_message(environment: Path, suffix: str) -> tuple[LoadFailed, str, int]:
    """The first message, stderr and exit code of a worker's interpreter, with packages compiled for `suffix`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    script, count, sources, _, *rest = command(["--link", str(theirs.fileno())])
    with ours:
        ours.send(codec.encode([Load(1, "m", 1, "m_0", "/")]))
        with theirs:
            words = [str(environment / "bin/python"), "-I", script, count, sources, suffix, *rest]
            done = subprocess.run(
                words, pass_fds=[theirs.fileno()], capture_output=True, text=True, timeout=PATIENCE_S, check=False
            )
        (message,) = codec.Codec(WorkerReport).decode(ours.recv(65536))
    return message, done.stderr, done.returncode


def test_packages_that_an_interpreter_lacks_are_named(environment: Path) -> None:
    """For example an interpreter of another version, which cannot use this one's compiled packages."""
    message, said, code = first_message(environment, ".cpython-27-of-long-ago.so")
    version = ".".join(map(str, sys.version_info[:3]))
    lacking = ", ".join(f"{name}>={least}" for name, least in NEEDED.items())
    text = f"EXECUTION_ENV_PATH: it has Python {version} and lacks {lacking}: install that in it"
    assert message == LoadFailed("UNAVAILABLE", text)
    assert text in said
    assert code == Exit.LOAD_FAILED


@pytest.mark.parametrize(
    ("found", "fits"), [("1.26", True), ("1.26.4", True), ("2.0rc1", True), ("1.9", False), ("", False)]
)
def test_versions_of_packages_are_compared(found: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: found)
    assert (bootstrap.lack("numpy", "1.26") == "") is fits


def test_the_packages_that_an_interpreter_needs() -> None:
    """The server has them, and its requirements and the documentation name them."""
    assert [name for name, least in NEEDED.items() if bootstrap.lack(name, least)] == []
    required, page = (ROOT / "setup.cfg").read_text(), (ROOT / "docs" / "processes.md").read_text()
    for name, least in NEEDED.items():
        assert f"{name}>={least}\n" in required
        assert f"| `{name}` | {least} or later |\n" in page
    assert "| Python | {}.{} or later |".format(*bootstrap.MIN_PYTHON) in page
    assert os.path.exists(command([])[0])


CORE = min(os.sched_getaffinity(0))


VARIABLES = ("SHMSERVE_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "MKL_NUM_THREADS")


LOOK_CONFIG = config_text("python", "x:FP32:[1]", "y:STRING", "instance_group { count: 1 kind: KIND_CPU }")


LOOK = python_model(
    f"""
    square = np.ones((400, 400), np.float32)
    square @ square
    own = [*os.sched_getaffinity(0), len(os.listdir("/proc/self/task"))]
    return self.respond(np.array([*map(str, own), *(os.environ.get(name, "") for name in {VARIABLES})], object))
    """
)


@cases(
    ({}, ["1", "1", "1", "1", "1", ""]),
    (
        {"OMP_NUM_THREADS": "2,1", "OPENBLAS_NUM_THREADS": "1", "NUMEXPR_NUM_THREADS": "", "MKL_NUM_THREADS": "3"},
        ["1", "2", "2,1", "1", "2", "3"],
    ),
    ids=["of the instance", "variables of the environment take precedence"],
)
def test_cores_and_threads(
    variables: dict[str, str], threads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numpy reads the variables when it is imported; it has no other thread. MKL follows OpenMP unless its own variable
    is set, which torch prefers to OMP_NUM_THREADS."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    write_model(tmp_path / "models", "look", LOOK_CONFIG, LOOK)
    options = ("--host-policy", f"cpu,cpu-cores={CORE}")
    with (
        Launched(tmp_path / "models", tmp_path / "run", *options) as server,
        shmserve.Client(f"unix://{server.lane}") as client,
    ):
        client.wait_ready(timeout=PATIENCE_S)
        found = client.infer("look", {"x": np.ones(1, np.float32)}, timeout=PATIENCE_S)["y"]
    assert [word.decode() for word in found] == [str(CORE), *threads]

"""The installed package: a wheel built from a clean clone of HEAD, installed into an empty environment outside the
checkout.

Dependencies are not downloaded again: a .pth file makes those of this environment visible. A .pth file in a folder that
a .pth file names is not followed, so the editable install of the checkout is not visible.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from shmserve.repo.samples import EXAMPLES
from tests import ROOT
from tests.support.docs import pages
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("wheel")]

ENGINES = ("onnxruntime", "onnx", "nvidia", "torch", "tensorflow", "ai_edge_litert", "tensorrt", "openvino", "cupy")
SERVER_ONLY = ("google", "uvloop", "rich", "argcomplete", "hdrh", "hpack", "httptools", "jinja2", "re2", "textual")
CLIENT_PARTS = "clients dtypes errors paths protocol python_values session shm system transport version"
MODULES = """
import json, sys
old = set(sys.modules)
import shmserve
package = sorted(set(sys.modules) - old)
shmserve.Client
client = sorted(sys.modules)
shmserve.AsyncClient, shmserve.ServeError, shmserve.__version__
print(json.dumps({"file": shmserve.__file__, "package": package, "client": client, "all": sorted(sys.modules)}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command outside the checkout, without environment variables that refer to it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_"))}
    ended = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", place / "venv", cwd=place)
    found = place / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", found, "--quiet", "--disable-pip-version-check", "--no-input")
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=place)
    site = Path(run(found, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place).strip())
    (site / "dependencies.pth").write_text(
        "\n".join(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))
    )
    return found


def test_the_wheel_has_every_file(wheel: Path) -> None:
    packaged = set(zipfile.ZipFile(wheel).namelist())
    clone = wheel.parent / "clone"
    missing = set()
    for folder in ("shmserve", "workers", "repo", "clients"):
        for path in (clone / folder).rglob("*"):
            name = path.relative_to(clone).as_posix()
            if path.is_file() and not path.is_symlink() and not name.startswith("repo/examples/make_"):
                missing |= {f"shmserve/{name}".replace("shmserve/shmserve/", "shmserve/")} - packaged
    assert not missing
    assert "shmserve/py.typed" in packaged
    assert any(name.endswith("/LICENSE") for name in packaged)
    assert not [name for name in packaged if name.startswith(("tests/", "bench/", "workers/", "repo/", "clients/"))]


def test_importing_imports_no_more_than_is_used(python: Path, tmp_path: Path) -> None:
    found = json.loads(run(python, "-c", MODULES, cwd=tmp_path))
    package, client, all_ = (set(found[name]) for name in ("package", "client", "all"))
    assert Path(found["file"]).is_relative_to(python.parents[1])
    assert {name for name in package if name.startswith("shmserve")} == {"shmserve"}
    assert not {"numpy", "msgspec", "asyncio"} & package
    assert "shmserve.clients.client" in client
    assert not {"asyncio", "zmq", "ssl", "subprocess", "multiprocessing", "importlib.metadata"} & client
    assert not {name.partition(".")[0] for name in all_} & {*ENGINES, *SERVER_ONLY}
    assert {name.split(".")[1] for name in all_ if name.startswith("shmserve.")} == set(CLIENT_PARTS.split())


@pytest.fixture(scope="module")
def newcomer(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, str]]:
    """The source directory with a model.onnx, and a shell's variables. An empty environment is on the path, in which
    pip finds the dependencies installed; the ports are free.
    """
    place = tmp_path_factory.mktemp("newcomer")
    run(sys.executable, "-m", "venv", "--without-pip", place / "venv", cwd=place)
    programs, packages = place / "venv" / "bin", place / "packages"
    packages.mkdir()
    for folder in {sysconfig.get_path(name) for name in ("purelib", "platlib")}:
        for entry in Path(folder).iterdir():
            if not re.match(r"(__editable__)?.*shmserve|.*\.pth$", entry.name):
                (packages / entry.name).symlink_to(entry)
    site = run(programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place).strip()
    Path(site, "packages.pth").write_text(str(packages))
    (programs / "pip").write_text(f'#!/bin/sh\nexec "{programs}/python" -m pip "$@"\n')
    (programs / "pip").chmod(0o755)
    run("git", "clone", "--quiet", wheel.parent / "clone", place / "source", cwd=place)
    (place / "source" / "model.onnx").write_bytes((EXAMPLES / "mlp" / "1" / "model.onnx").read_bytes())
    ours = ("PYTHON", "VIRTUAL_", "SHMSERVE")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    ports = {f"SHMSERVE_{name}_PORT": "0" for name in ("HTTP", "GRPC", "METRICS")}
    path = f"{programs}{os.pathsep}{variables['PATH']}"
    return place / "source", variables | ports | {"PATH": path, "SHMSERVE_RUNTIME_DIR": str(place / "run")}


@contextmanager
def started(command: str, place: Path, variables: Mapping[str, str]) -> Iterator[str]:
    """Runs a server in the foreground, as in a terminal. Yields the address of its page once it is ready."""
    shell, pipe = ["sh", "-c", f"exec {command}"], subprocess.PIPE
    with subprocess.Popen(shell, cwd=place, env=variables, stderr=subprocess.STDOUT, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        log = ""
        try:
            while "ready: serving 1 of 1 models" not in log:
                line = process.stdout.readline()
                assert line, log
                log += line
            yield f"http://localhost:{re.findall(r'HTTP on 127.0.0.1, port ([0-9]+)', log)[0]}"
        finally:
            process.send_signal(signal.SIGINT)
            process.stdout.read()
    assert process.returncode == 0


def test_the_three_commands_of_the_readme(newcomer: tuple[Path, Mapping[str, str]]) -> None:
    block = next(block for block in pages.blocks((ROOT / "README.md").read_text(), "sh") if "pip install" in block)
    install, serve, infer = block.splitlines()

    def shell(line: str) -> str:
        ended = subprocess.run(
            ["sh", "-c", line], cwd=newcomer[0], env=newcomer[1], capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    shell(install)
    with started(serve, *newcomer) as address:
        answer = shell(infer)
        assert re.search(r"^y +FP32 +\[1, 10\] ", answer, re.MULTILINE), answer
        with urllib.request.urlopen(f"{address}/", timeout=PATIENCE_S) as found:
            page = found.read().decode()
        files = re.findall(r'(?:src|href)="(/?[\w/.-]+)"', page)
        assert len(files) > 1
        for file in files:
            with urllib.request.urlopen(f"{address}/{file.lstrip('/')}", timeout=PATIENCE_S) as found:
                assert found.read()

"""A copy of one suite to run: the checkout itself stays unchanged, and nothing outside the copy is written.

The scripts are unchanged, except that they find Triton's installation and models in the copy, and continue after a
failure: the original scripts end at the first failure, which would hide the rest.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.triton_qa.catalog import Suite

HERE = Path(__file__).parent
INSTALLED, DATA = "/opt/tritonserver", "/data/inferenceserver"
"""Where the scripts expect the server and the generated models."""
VERSION = "qa"
EXAMPLES = "docs/examples/model_repository"
UNVERSIONED = (
    "custom_models/*/config.pbtxt",
    "L0_*/*models*/*/config.pbtxt",
    "L0_backend_python/*/models/*/config.pbtxt",
)
"""Models whose version directory is empty, which git does not keep."""
TEXTS = {".sh", ".py", ".pbtxt", ".conf", ".txt"}
SILENT = "pip pip3 apt-get apt wget docker ldconfig nvidia-smi service nginx aws conda cmake make"
"""Commands that download, build or need something unavailable: they do nothing."""
PREAMBLE = """
kill() { local word; for word in "$@"; do [ "$word" = 0 ] && return 1; done; builtin kill "$@"; }
mkdir() { command mkdir -p "$@"; }
"""
"""A server that has not started has the process id 0, and `kill 0` would end the script itself. Version directories
already exist (`UNVERSIONED`), and scripts stop a chain of commands if they cannot create one.
"""
NATIVE_BACKENDS = "TRITON_QA_NATIVE_BACKENDS"
"""Environment variable: a directory with Triton's test backends as libraries, NAME/libtriton_NAME.so."""
_LIBRARY = re.compile(r'^default_model_filename: "libtriton_\w+\.so"\n', re.MULTILINE)
"""A C++ backend, which a Python one replaces."""
_OTHER_SUITES = "(cd ${TEST} && bash -ex test.sh)"
"""The script of L0_backend_python runs those in its subfolders, which are separate suites here."""
_STOPS = re.compile(r"^(\s*)(set -e(x|o pipefail)?|exit (1|\$RET))\s*$", re.MULTILINE)
_DOWNLOADS = re.compile(r"^(curl --proto '=https' .*|tar -xvf otelcol.*)$", re.MULTILINE)
"""The OpenTelemetry collector, which `otelcol.py` replaces."""
_RETURNS = re.compile(r"^if \[ \$RET -eq 1 \]; then\n(?:(?!fi$).*\n)*?\s+exit \$RET\nfi$", re.MULTILINE)
"""A script that ends after a failure stops its server first. L0_client_timeout does so between two groups of tests."""


@dataclass(frozen=True)
class Workplace:
    folder: Path

    @property
    def qa(self) -> Path:
        return self.folder / INSTALLED[1:] / "qa"

    @property
    def shims(self) -> Path:
        return self.folder / "shims"


def prepare(folder: Path, checkout: Path, suite: Suite, data: Path, python: Path) -> Workplace:
    """Empties `folder`. `python`: the Python of the tests' environment."""
    shutil.rmtree(folder, ignore_errors=True)
    place = Workplace(folder)
    shutil.copytree(checkout / "qa", place.qa)
    _lay_out(place, checkout, suite)
    collector = f"exec {shlex.quote(sys.executable)} {shlex.quote(str(HERE / 'otelcol.py'))}"
    _command(place.qa / suite.name / "otelcol", collector)
    for path in place.qa.rglob("*"):
        if path.suffix in TEXTS and path.is_file():
            _rewrite(path, place, data)
    _install(place, python)
    return place


def _lay_out(place: Workplace, checkout: Path, suite: Suite) -> None:
    """Adds what the build of Triton's test image adds: example models, and directories that git does not keep."""
    home = place.qa / suite.name
    for target, names in suite.layout.items():
        for entry in names:
            name, _, renamed = entry.partition(" as ")
            found = [path / name for path in (HERE / "parts", checkout / EXAMPLES, home / "models")]
            source = next((path for path in found if path.is_dir()), None)
            if source is None:
                raise SystemExit(f"the checkout has no {EXAMPLES}/{name}")
            shutil.copytree(source, home / target / (renamed or name), dirs_exist_ok=True)
    for pattern in UNVERSIONED:
        for config in place.qa.glob(pattern):
            if not any(path.is_dir() for path in config.parent.iterdir()):
                (config.parent / "1").mkdir()


def _rewrite(path: Path, place: Workplace, data: Path) -> None:
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        return
    changed = text.replace(INSTALLED, str(place.folder / INSTALLED[1:])).replace(f"{DATA}/${{REPO_VERSION}}", str(data))
    if path.suffix in (".sh", ".pbtxt"):
        changed = _LIBRARY.sub("", "\n".join(map(_on_cpu, changed.split("\n"))))
    if path.suffix == ".sh":
        changed = changed.replace(_OTHER_SUITES, ":")
        first, _, rest = changed.partition("\n")
        rest = rest.replace("--allow-sagemaker=true ", "")  # a server without this endpoint would not start
        changed = first + PREAMBLE + _STOPS.sub(r"\1:", _DOWNLOADS.sub(":", _RETURNS.sub(":", rest)))
    if changed != text:
        path.write_text(changed)


def _on_cpu(line: str) -> str:
    """Moves GPU instances to the CPU. Patterns that a script passes to `sed` stay unchanged."""
    return line if "sed " in line else line.replace("KIND_GPU", "KIND_CPU")


def _install(place: Workplace, python: Path) -> None:
    """Installs replacements for Triton's executable, its backends, and commands of the scripts."""
    server = place.folder / INSTALLED[1:]
    (server / "bin").mkdir(parents=True)
    shutil.copytree(HERE / "backends", server / "backends", ignore=shutil.ignore_patterns("__pycache__"))
    built = os.environ.get(NATIVE_BACKENDS, "")
    for folder in Path(built).iterdir() if built else ():  # Triton's own libraries instead of their stand-ins
        shutil.rmtree(server / "backends" / folder.name, ignore_errors=True)
        shutil.copytree(folder, server / "backends" / folder.name)
    run = f"exec {shlex.quote(sys.executable)}"
    _command(server / "bin" / "tritonserver", f'{run} {shlex.quote(str(HERE / "tritonserver.py"))} "$@"')
    place.shims.mkdir()
    for name in SILENT.split():
        _command(place.shims / name, "exit 0")
    _command(place.shims / "git", f'[ "$1" != clone ] || cp -r {shlex.quote(str(HERE / "parts" / "python_backend"))} .')
    for name in ("python", "python3"):
        _command(place.shims / name, f'exec {shlex.quote(str(python))} "$@"')
    _command(place.shims / "pytest", f'exec {shlex.quote(str(python))} -m pytest "$@"')


def _command(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)

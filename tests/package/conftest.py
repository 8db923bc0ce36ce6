"""The packages of HEAD, built once as for a release."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests import ROOT

TOOLS = ROOT / "build" / "release-env" / "bin" / "python"
"""The interpreter that has the tools of deploy/release/requirements.txt; `make test-package` creates it."""
BUILD_S = 240


def run(*command: str | Path, cwd: Path, variables: Mapping[str, str] | None = None, umask: int = -1) -> str:
    """Runs a command without the environment variables that refer to this checkout."""
    ours = ("PYTHON", "VIRTUAL_", "SHMSERVE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment | dict(variables or {}),
        umask=umask,
        capture_output=True,
        text=True,
        timeout=BUILD_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist, the wheels and SHA256SUMS of HEAD."""
    assert TOOLS.is_file(), f"{TOOLS.relative_to(ROOT)} is missing: run make test-package"
    folder = tmp_path_factory.mktemp("packages")
    run(TOOLS, "-m", "deploy.release.build", folder, cwd=ROOT)
    return folder


@pytest.fixture(scope="session")
def wheel(packages: Path) -> Path:
    (found,) = packages.glob("*-any.whl")
    return found

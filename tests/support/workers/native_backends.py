"""Backends in C and C++, compiled for tests."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest


def compiled(source: Path, target: Path, *flags: str, soname: str = "") -> Path:
    """Compiles a backend. `soname`: the library that it is linked with, instead of none. Skips without a compiler."""
    name = "c++" if source.suffix == ".cc" else "cc"
    compiler = shutil.which(name)
    if compiler is None:
        pytest.skip(f"{name} is not installed")
    target.parent.mkdir(parents=True, exist_ok=True)
    if soname:
        stub = target.parent / "stub.so"
        run([compiler, "-shared", f"-Wl,-soname,{soname}", "-o", str(stub), "-x", "c", "/dev/null"])
        flags = (*flags, "-Wl,--no-as-needed", str(stub))
    run([compiler, "-shared", "-fPIC", "-pthread", "-g", "-o", str(target), str(source), *flags])
    return target


def run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


def model(root: Path, name: str, library: Path, config: str, version: int = 1) -> None:
    """Writes a model with its own backend."""
    folder = root / name / str(version)
    folder.mkdir(parents=True)
    shutil.copy(library, folder)
    (root / name / "config.pbtxt").write_text(config)

"""The wheel for this platform: the wheel for all platforms, with the compiled shim of native backends."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from deploy.release.wheel_backend import write_wheel

SHIM = "shmserve/workers/backends/native/shim.so"
TAG = f"py3-none-manylinux_2_17_{os.uname().machine}"
"""The shim needs no Python, and of glibc nothing newer than 2.17."""
_ANY = "py3-none-any"
_COMPILER = "shmserve/workers/backends/native/compiler.py"


def platform_wheel(wheel: Path, target: Path) -> Path:
    """Writes the wheel to `target`. It depends only on the other wheel and the compiler."""
    made = target / wheel.name.replace(_ANY, TAG)
    with zipfile.ZipFile(wheel) as old:
        members = [(info, old.read(info)) for info in old.infolist() if not info.filename.endswith(".dist-info/RECORD")]
    for number, (info, data) in enumerate(members):
        if info.filename.endswith(".dist-info/WHEEL"):
            data = data.replace(_ANY.encode(), TAG.encode()).replace(b"Purelib: true", b"Purelib: false")
            members[number] = info, data
    shim = zipfile.ZipInfo(SHIM, members[0][0].date_time)
    write_wheel(made, [*members, (shim, _compiled(wheel))])
    return made


def _compiled(wheel: Path) -> bytes:
    """Compiles the sources in the wheel."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "shim.so"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        command = [sys.executable, str(Path(folder) / _COMPILER), str(target)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{done.stderr}\nthe shim of native backends cannot be compiled")
        return target.read_bytes()

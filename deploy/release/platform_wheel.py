"""The wheel for this platform: the wheel for all platforms, with the compiled shim of native backends."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SHIM = "shmserve/workers/backends/native/shim.so"
TAG = f"py3-none-manylinux_2_17_{os.uname().machine}"
"""The shim needs no Python, and of glibc nothing newer than 2.17."""
_ANY = "py3-none-any"
_COMPILER = "shmserve/workers/backends/native/compiler.py"


def platform_wheel(wheel: Path, target: Path) -> Path:
    """Writes the wheel to `target`. It depends only on the other wheel and the compiler."""
    path = target / wheel.name.replace(_ANY, TAG)
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        shim = zipfile.ZipInfo(SHIM, old.infolist()[0].date_time)
        shim.external_attr = 0o100644 << 16
        shim.compress_type = zipfile.ZIP_DEFLATED
        members = [(info, old.read(info)) for info in old.infolist()]
        rows = []
        for info, data in [*members, (shim, _compiled(wheel))]:
            if info.filename.endswith(".dist-info/RECORD"):
                record = info
                continue
            if info.filename.endswith(".dist-info/WHEEL"):
                data = data.replace(_ANY.encode(), TAG.encode()).replace(b"Purelib: true", b"Purelib: false")
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append((info.filename, f"sha256={digest}", len(data)))
            new.writestr(info, data)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*rows, (record.filename, "", "")])
        new.writestr(record, text.getvalue())
    return path


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

"""Files of packages in npm's registry."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path


def install(package: str, member: str, file: Path) -> str:
    """Downloads a file of a package, such as name@1.2.3, unless it is there. Returns why that failed, or ""."""
    if file.exists():
        return ""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        npm = ["npm", "pack", "--silent", package]
        packed = subprocess.run(npm, cwd=file.parent, check=True, capture_output=True, text=True, timeout=120)
        with tarfile.open(file.parent / packed.stdout.split()[-1]) as archive:
            content = archive.extractfile(f"package/{member}")
            assert content is not None
            file.write_bytes(content.read())
    except (OSError, subprocess.SubprocessError, tarfile.TarError, KeyError) as error:
        return str(error)
    return ""

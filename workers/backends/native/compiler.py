"""Compiles the shim: `python compiler.py TARGET`. Needs nothing but the sources beside it, so that a release can run it
without the packages of a server."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).with_name("shim")
SONAME = f"{'shmserve-native-shim-':-<64}"
"""The name under which the shim is linked. It is replaced by the one that a backend needs."""
COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    "-std=gnu11",
    "-O2",
    "-g",
    "-Wall",
    "-Wextra",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
    "-Wl,-z,defs",
    "-Wl,--build-id=none",
    f"-Wl,-soname,{SONAME}",
)


class CannotCompile(Exception):
    """There is no compiler, or it refuses the sources."""


def compile_shim(target: Path) -> None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise CannotCompile(f"no C compiler is installed ({', '.join(COMPILERS)})")
    sources = sorted(path.name for path in SOURCES.glob("*.c"))
    here = f"-ffile-prefix-map={SOURCES}=."  # the result does not depend on where the sources are
    command = [compiler, *FLAGS, here, "-o", str(target.absolute()), *sources]
    done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotCompile(f"{compiler} refuses the sources: {done.stderr.strip()[-1000:]}")


if __name__ == "__main__":
    compile_shim(Path(sys.argv[1]))

"""The compiled shim: the one that the installed package carries, else one compiled at first use and cached.

Invariant: a file in the cache is complete, and its name tells from which sources it was compiled.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path

from shmserve.errors import Unsupported
from shmserve.paths import cache_home, make_runtime_dir
from shmserve.system.files import new_file
from shmserve.workers.backends.native.compiler import FLAGS, SOURCES, CannotCompile, compile_shim

SHIPPED = Path(__file__).with_name("shim.so")


def shim() -> bytes:
    """Returns the compiled shim. Raises Unsupported if it can neither be found nor compiled."""
    if SHIPPED.is_file():
        return SHIPPED.read_bytes()
    cached = _cached()
    if cached is None:
        with tempfile.TemporaryDirectory(prefix="shmserve-native-") as folder:
            target = Path(folder) / "shim.so"
            _compile(target)
            return target.read_bytes()
    if not cached.is_file():
        with new_file(cached) as part:  # whoever is last wins; the contents are the same
            _compile(part)
    return cached.read_bytes()


def _compile(target: Path) -> None:
    try:
        compile_shim(target)
    except CannotCompile as error:
        raise Unsupported(
            "native backends need a compiled part, which this installation lacks: install shmserve from a wheel for "
            f"this platform, or install a C compiler. {error}"
        ) from None


def _cached() -> Path | None:
    """The file in the cache. None: there is no directory that only this user can write to."""
    digest = hashlib.sha256(repr((FLAGS, sys.maxsize, os.uname().machine)).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    folder = cache_home()
    if folder is None:
        return None
    try:
        make_runtime_dir(folder / "native")
    except OSError:
        return None
    return folder / "native" / f"{digest.hexdigest()[:32]}.so"

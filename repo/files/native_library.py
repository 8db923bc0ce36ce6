"""Whether a shared library can be a backend, by what it defines and needs. It is read, and not loaded."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from shmserve.repo.files.native_interface import BACKEND, FUNCTIONS, SERVER

if TYPE_CHECKING:
    from shmserve.repo.files.elf import SharedLibrary

EXECUTE = "TRITONBACKEND_ModelInstanceExecute"
SERVER_LIBRARY = "libtritonserver"
"""Triton's own library, whose place the server's takes. A wheel has it under a longer name."""
_BATCHER = "TRITONBACKEND_ModelBatchIncludeRequest"
_CACHE = Path("/etc/ld.so.cache")
_FOLDERS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")


def library_problem(library: SharedLibrary) -> str:
    """The reason why a library cannot be a backend here; "" if none is found."""
    if EXECUTE not in library.defined:
        return f"is not a backend: it does not define {EXECUTE}"
    if _BATCHER in library.defined:
        return f"has a batching strategy of its own ({_BATCHER}), which this server does not run"
    unknown = sorted(name for name in library.undefined - FUNCTIONS if name.startswith((BACKEND, SERVER)))
    if unknown:
        return f"needs functions that this server does not have: {', '.join(unknown)}"
    return ""


def missing_libraries(library: SharedLibrary, folder: Path) -> list[str]:
    """The libraries that a library in this directory is linked with, and that the dynamic linker would not find if it
    ran here with this environment. Libraries of libraries are not looked for."""
    folders = [re.sub(r"\$ORIGIN|\$\{ORIGIN\}", lambda _: str(folder), name) for name in library.run_path]
    folders += [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), *_FOLDERS]
    cache = _CACHE.read_bytes() if _CACHE.is_file() else b""

    def exists(name: str) -> bool:
        if "/" in name:
            return os.path.exists(name)
        if any(os.path.exists(os.path.join(place, name)) for place in folders if place):
            return True
        return re.search(rb"[/\0]" + re.escape(name.encode()) + rb"\0", cache) is not None

    return [name for name in library.needed if not name.startswith(SERVER_LIBRARY) and not exists(name)]

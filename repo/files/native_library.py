"""Whether a shared library can be a backend, by what it defines and needs."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shmserve.repo.files.elf import SharedLibrary

EXECUTE = "TRITONBACKEND_ModelInstanceExecute"
_BATCHER = "TRITONBACKEND_ModelBatchIncludeRequest"


def library_problem(library: SharedLibrary, known: Collection[str] | None = None) -> str:
    """The reason why a library cannot be a backend here; "" if none is found. `known`: the functions that the server
    provides, if they are known."""
    if EXECUTE not in library.defined:
        return f"is not a backend: it does not define {EXECUTE}"
    if _BATCHER in library.defined:
        return f"has a batching strategy of its own ({_BATCHER}), which this server does not run"
    unknown = sorted(name for name in library.undefined - frozenset(known or ()) if name.startswith("TRITON"))
    if known is not None and unknown:
        return f"needs functions that this server does not have: {', '.join(unknown)}"
    return ""

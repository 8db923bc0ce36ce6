"""Settings of the calling process: kernel attributes (prctl), and the C library's allocator."""

from __future__ import annotations

import ctypes

PDEATHSIG, NAME, CHILD_SUBREAPER, NO_NEW_PRIVS = 1, 15, 36, 38

_library = ctypes.CDLL(None, use_errno=True)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
KEEP_BYTES = 64 << 20
"""Freed memory to keep at the top of the heap."""
HEAP_BYTES = 1 << 20
"""Blocks up to this size are allocated on the heap: five of the largest packets."""
MODEL_HEAP_BYTES = 32 << 20
"""The same beside a model, whose images and batches are large. The C library accepts no more, and would by itself go up
to it."""


def prctl(option: int, value: int | bytes) -> int:
    """Changes an attribute of the calling process or thread. Returns 0 or the errno."""
    failed = _library.prctl(option, value, 0, 0, 0)
    return ctypes.get_errno() if failed else 0


def keep_freed_memory(heap_bytes: int = HEAP_BYTES) -> bool:
    """Makes the allocator keep freed memory. By default, it returns memory to the kernel after each packet and faults
    it in again, thousands of times per second. Call it only in the server's processes, never in those of users.

    Returns False, and changes nothing, if the C library has no mallopt (musl)."""
    mallopt = getattr(_library, "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_TRIM_THRESHOLD, KEEP_BYTES) and mallopt(_MMAP_THRESHOLD, heap_bytes))

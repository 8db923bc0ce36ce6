"""Configures the C library's allocator to keep freed memory.

By default it returns memory to the kernel after each packet and faults it in again, many thousand times a second. Only
for the server's own processes, never for processes of users.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
KEEP_BYTES = 64 << 20
"""Freed memory to keep at the top of the heap."""
HEAP_BYTES = 1 << 20
"""Blocks up to this size are allocated on the heap: five of the largest packets."""


def keep_freed_memory() -> bool:
    """False if the C library has no mallopt (musl); then nothing changes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_TRIM_THRESHOLD, KEEP_BYTES) and mallopt(_MMAP_THRESHOLD, HEAP_BYTES))

"""The C library's allocator, told to keep what a busy process takes and frees all the time.

By default it hands packets' worth of memory back to the kernel and fetches it again, page fault by page fault, many
thousand times a second. For processes of ours only, never in a user's.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
KEEP_BYTES = 64 << 20
"""Freed memory at the top of the heap that stays."""
HEAP_BYTES = 1 << 20
"""Blocks up to this size come from the heap: five of the largest packets."""


def keep_freed_memory() -> bool:
    """False where the C library has no such knob (musl); then nothing changes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_TRIM_THRESHOLD, KEEP_BYTES) and mallopt(_MMAP_THRESHOLD, HEAP_BYTES))

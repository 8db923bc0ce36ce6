"""prctl(2): changes kernel attributes of the calling process or thread."""

from __future__ import annotations

import ctypes

PDEATHSIG, NAME, CHILD_SUBREAPER, NO_NEW_PRIVS = 1, 15, 36, 38


def prctl(option: int, value: int | bytes) -> int:
    """Returns 0 or the errno."""
    failed = ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
    return ctypes.get_errno() if failed else 0

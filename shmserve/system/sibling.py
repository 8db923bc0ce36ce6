"""Forks siblings: copies of this process that are children of this process's parent.

fork() cannot do this, so `fork` calls clone() with CLONE_PARENT, and does for it what the C library's fork() does for a
process with one thread: the kernel writes the new thread id to where the library keeps it, and the list of robust
mutexes is registered again. Handlers of pthread_atfork() are not called.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from typing import NamedTuple

_PR_GET_TID_ADDRESS = 40
_CLONE_PARENT = 0x8000
_CLONE_CHILD_CLEARTID = 0x200000
_CLONE_CHILD_SETTID = 0x1000000
_FLAGS = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD


class _Calls(NamedTuple):
    """Numbers of system calls, and the position of the address of the thread id among the arguments of clone()."""

    clone: int
    set_robust_list: int
    get_robust_list: int
    tid_at: int


_CALLS = {"x86_64": _Calls(56, 273, 274, 3), "aarch64": _Calls(220, 99, 100, 4)}


class Siblings:
    """Make it in the main thread. Raises OSError if siblings cannot be forked on this machine."""

    def __init__(self) -> None:
        calls = _CALLS.get(platform.machine())
        if calls is None:
            raise OSError(0, f"unknown system calls of '{platform.machine()}'")
        library = ctypes.PyDLL(None, use_errno=True)  # keeps the GIL
        self._call = library.syscall
        self._call.restype = ctypes.c_long
        address, head, size = ctypes.c_ulong(), ctypes.c_ulong(), ctypes.c_ulong()
        self._check(library.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0))
        if ctypes.c_int.from_address(address.value).value != os.getpid():
            raise OSError(0, "the C library keeps its thread id elsewhere")
        get = ctypes.c_long(calls.get_robust_list)
        self._check(self._call(get, 0, ctypes.byref(head), ctypes.byref(size)))
        words = [calls.clone, _FLAGS, 0, 0, 0, 0]
        words[1 + calls.tid_at] = address.value
        self._clone = tuple(map(ctypes.c_ulong, words))
        self._set_robust_list = tuple(map(ctypes.c_ulong, (calls.set_robust_list, head.value, size.value)))

    def fork(self) -> int:
        """Returns 0 in the sibling, and its pid in this process, which must have one thread."""
        ctypes.pythonapi.PyOS_BeforeFork()
        pid = int(self._call(*self._clone))
        if pid:
            ctypes.pythonapi.PyOS_AfterFork_Parent()
            self._check(pid)
            return pid
        ctypes.pythonapi.PyOS_AfterFork_Child()
        self._check(self._call(*self._set_robust_list))
        return 0

    def _check(self, result: int) -> None:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

"""Forking a child of the parent."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from shmserve.system.sibling import Siblings

FORKS = """
import ctypes, os, sys, threading
from shmserve.system.sibling import Siblings
siblings, hooks = Siblings(), []
os.register_at_fork(before=lambda: hooks.append("before"), after_in_child=lambda: hooks.append("child"))
os.register_at_fork(after_in_parent=lambda: hooks.append("parent"))
pid = siblings.fork()
if not pid:
    thread = threading.Thread(target=lambda: hooks.append("thread"))
    thread.start()
    thread.join()
    kept = ctypes.c_ulong()
    ctypes.CDLL(None).prctl(40, ctypes.byref(kept), 0, 0, 0)
    hooks.append(ctypes.c_int.from_address(kept.value).value == threading.get_native_id() == os.getpid())
os.write(1, f"{pid} {os.getpid()} {os.getppid()} {hooks}\\n".encode())
"""


def test_a_sibling_is_a_complete_process_with_the_same_parent() -> None:
    """The C library knows its thread id, without which mutexes and the affinity of threads would be those of another
    process."""
    printed = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True).stdout
    forked, original = sorted((line.split(" ", 3) for line in printed.splitlines()), key=lambda words: int(words[0]))
    assert os.waitpid(int(original[0]), 0) == (int(forked[1]), 0)
    assert forked[2:] == [str(os.getpid()), "['before', 'child', 'thread', True]"]
    assert original[2:] == [str(os.getpid()), "['before', 'parent']"]


def test_machines_that_cannot_fork_siblings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        with pytest.raises(OSError, match="keeps its thread id elsewhere"):
            Siblings()
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    with pytest.raises(OSError, match="unknown system calls of 'vax'"):
        Siblings()

"""Values from /proc."""

from __future__ import annotations

import os
import subprocess
import threading

from shmserve.system import procfs
from tests.support.patience import PATIENCE_S


def test_children_of_all_threads_are_found() -> None:
    processes, started, seen = list[subprocess.Popen[bytes]](), threading.Event(), threading.Event()

    def start() -> None:
        processes.append(subprocess.Popen(["sleep", "infinity"]))
        started.set()
        seen.wait(PATIENCE_S)

    thread = threading.Thread(target=start)
    thread.start()
    assert started.wait(PATIENCE_S)
    found = procfs.children(os.getpid())
    seen.set()
    thread.join()
    (process,) = processes
    process.kill()
    process.wait()
    assert process.pid in found
    assert procfs.children(2**22 + 1) == []

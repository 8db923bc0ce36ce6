"""The leak check itself: each kind of leak is an error of the test that left it, and of no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import ROOT
from tests.support.patience import PATIENCE_S

CONFTEST = """
    pytest_plugins = ("tests.support.leaks",)

    def pytest_configure(config):
        config.addinivalue_line("markers", "process")

    def pytest_collection_modifyitems(items):
        for item in items:
            if item.path.name != "test_pure.py":
                item.add_marker("process")
"""
PURE = """
    import os

    kept = []

    def test_keeps():
        kept.append(os.memfd_create("kept"))

    def test_gives_back():
        os.close(kept.pop())

    def test_leaks():
        os.memfd_create("leaked")
"""
LEAKY = """
    import ctypes, mmap, os, select, socket, subprocess, sys, threading
    import pytest

    kept = []

    def test_descriptor():
        kept.append(os.memfd_create("kept"))

    def test_thread():
        kept.append(threading.Event())
        threading.Thread(target=kept[-1].wait, name="still-here", daemon=True).start()

    def test_grandchild():
        code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])"
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_zombie():
        pid = os.posix_spawn("/bin/true", ["true"], {})
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def test_name():
        with open("/proc/self/stat") as file:
            started = file.read().rpartition(")")[2].split()[19]
        path = f"/dev/shm/shmserve-{os.getpid()}-{started}-{os.getpid()}-test-leaks"
        os.close(os.open(path, os.O_CREAT))

    def test_mapping():
        descriptor = os.memfd_create("mapped")
        os.ftruncate(descriptor, 4096)
        kept.append(mmap.mmap(descriptor, 4096))
        os.close(descriptor)

    @pytest.fixture
    def leaky():
        yield
        kept.append(socket.socket())

    def test_fixture(leaky):
        pass

    @pytest.fixture(scope="module")
    def for_module():
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            yield process
            process.stdin.close()

    def test_honest(for_module):
        threading.Thread(target=lambda: None).start()

    def test_closed_after_the_test_by_grpc():
        descriptor, named, wait = os.memfd_create("closing"), threading.Event(), select.select

        def act():
            ctypes.CDLL(None).prctl(15, b"event_engine")
            named.set()
            threading.Event().wait()

        def close(*args):
            select.select = wait
            os.close(descriptor)
            return ()

        select.select = close
        threading.Thread(target=act, daemon=True).start()
        named.wait()
"""
SERVER = """
    import subprocess, sys

    workers = []
    for line in sys.stdin:
        if line == "start\\n":
            workers.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
            print(flush=True)
        else:
            workers.pop(0).communicate(b"end")
"""
REPLACED = """
    import select, subprocess, sys
    import pytest

    @pytest.fixture(scope="module")
    def server():
        pipe = subprocess.PIPE
        with subprocess.Popen([sys.executable, "server.py"], stdin=pipe, stdout=pipe, text=True, bufsize=1) as server:
            server.stdin.write("start\\n")
            server.stdout.readline()
            yield server
            server.stdin.write("end\\n")

    def test_a_worker_that_is_replaced_ends_during_the_check(server):
        server.stdin.write("start\\n")
        server.stdout.readline()
        wait = select.poll

        def poll():
            select.poll = wait
            server.stdin.write("end\\n")
            return wait()

        select.poll = poll
"""
LEFT = (
    "memfd:kept", "thread 'still-here'", "-c import signal; signal.pause()", "never waited for", "-test-leaks",
    "mapping of /memfd:mapped", "-> socket:[", "test_pure.py left behind:", "memfd:leaked",
)  # fmt: skip


@pytest.fixture
def checked(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pytest.RunResult]:
    """Runs files of tests with the leak check."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest(CONFTEST)

    def run(wait: float, timeout: float | None = None, **files: str) -> pytest.RunResult:
        pytester.makepyfile(**files)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-o", f"leaks_wait={wait}", timeout=timeout)

    return run


def test_a_leak_is_an_error_of_the_test_that_left_it(checked: Callable[..., pytest.RunResult]) -> None:
    """Tests without processes are checked by module."""
    result = checked(0.5, test_leaky=LEAKY, test_pure=PURE)
    result.assert_outcomes(passed=12, errors=8)
    text = result.stdout.str()
    assert [piece for piece in LEFT if piece not in text] == []
    assert "test_honest left behind" not in text
    assert "by_grpc left behind" not in text


def test_the_process_that_a_new_one_replaces_is_waited_for(checked: Callable[..., pytest.RunResult]) -> None:
    checked(3600, PATIENCE_S, server=SERVER, test_replaced=REPLACED).assert_outcomes(passed=1)

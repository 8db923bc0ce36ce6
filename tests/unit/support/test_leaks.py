"""The leak check itself: each kind of leak is an error of the test that left it, and of no other."""

from __future__ import annotations

import pytest

from tests import ROOT

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

    def test_honest():
        pass
"""

LEAKY = """
    import mmap, os, socket, subprocess, sys, threading
    import pytest

    kept, strange = [], []

    def test_descriptor():
        kept.append(os.memfd_create("kept"))

    def test_thread():
        kept.append(threading.Event())
        threading.Thread(target=kept[-1].wait, name="still-here", daemon=True).start()

    def test_child():
        kept.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=kept_pipe()[0]))

    def kept_pipe():
        ends = os.pipe()
        kept.append(ends)
        return ends

    def test_grandchild():
        code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])"
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_zombie():
        pid = os.posix_spawn("/bin/true", ["true"], {})
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def started(pid):
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]

    def create(pid, started):
        path = f"/dev/shm/shmserve-{pid}-{started}-{os.getpid()}-test-leaks"
        os.close(os.open(path, os.O_CREAT))
        return path

    def test_name():
        create(os.getpid(), started(os.getpid()))

    def test_name_of_a_stranger():
        strange.append(create(1, started(1)))

    def test_name_of_a_dead_stranger():
        strange.append(create(os.getpid(), 1))

    def test_removes_them():
        while strange:
            os.unlink(strange.pop())

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

    def test_honest_after_all_of_these():
        pass
"""

DRIVER = """
    import mmap, os, subprocess, sys, threading
    import pytest

    kept = []

    @pytest.fixture(scope="module")
    def device():
        kept.append(os.memfd_create("context"))

    @pytest.mark.gpu
    def test_of_a_driver(device):
        kept.append(threading.Event())
        threading.Thread(target=kept[-1].wait, daemon=True).start()
        kept.append(os.memfd_create("mapped"))
        os.ftruncate(kept[-1], 4096)
        kept.append(mmap.mmap(kept[-1], 4096))

    @pytest.mark.gpu
    def test_child():
        reader, writer = os.pipe()
        kept.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=reader))

    def test_without_the_mark():
        kept.append(os.memfd_create("unmarked"))
"""

HONEST = """
    import gc, os, socket, subprocess, sys, threading
    import pytest

    @pytest.fixture(scope="session")
    def for_all():
        ends = socket.socketpair()
        yield ends
        for end in ends:
            end.close()

    @pytest.fixture(scope="module")
    def for_module(for_all):
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            yield process
            process.stdin.close()

    @pytest.fixture
    def late(request):
        return request.getfixturevalue("for_module")

    def test_uses_module(late):
        assert late.poll() is None

    class TestClass:
        @pytest.fixture(scope="class")
        @classmethod
        def for_class(cls):
            with open(os.devnull) as file:
                yield file

        def test_one(self, for_class, for_all):
            assert not for_class.closed

        def test_two(self, for_class):
            assert not for_class.closed

    def test_cycle():
        ends = socket.socketpair()
        for end in ends:
            end.close()
        loop = [os.fdopen(os.dup(1), "wb", closefd=True)]
        loop[0].close()
        loop.append(loop)

    def test_thread_that_is_ending():
        threading.Thread(target=lambda: None).start()

    def test_orphan_that_is_ending():
        code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'pass'])"
        subprocess.run([sys.executable, "-c", code], check=True)
"""

WIDER = """
    import socket
    import pytest

    kept = []

    @pytest.fixture(scope="module")
    def for_module():
        kept.append(socket.socket())

    def test_first(for_module):
        pass

    def test_second(for_module):
        pass
"""


def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, *, wait: float, **tests: str) -> pytest.RunResult:
    """`wait`: seconds for threads and processes to end. Each that does not end costs that time."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(**tests)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-o", f"leaks_wait={wait}")


def test_a_leak_is_an_error_of_the_node_that_made_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests without processes are checked by module, and a module's fixture with its module."""
    tests = {"test_leaky": LEAKY, "test_pure": PURE, "test_driver": DRIVER, "test_wider": WIDER}
    result = run(pytester, monkeypatch, wait=0.5, **tests)
    result.assert_outcomes(passed=21, errors=12, warnings=2)
    text = result.stdout.str()
    for piece in (
        "test_descriptor left behind:",
        "memfd:kept",
        "thread 'still-here'",
        "-c input()",
        "-c import signal; signal.pause()",
        "never waited for",
        "-test-leaks",
        "mapping of /memfd:mapped",
        "test_fixture left behind:",
        "-> socket:[",
        "test_pure.py left behind:",
        "memfd:leaked",
        "test_child left behind:",
        "test_without_the_mark left behind:",
        "memfd:unmarked",
        "test_wider.py left behind:",
    ):
        assert piece in text
    assert "test_honest_after_all_of_these left behind" not in text
    assert "memfd:context" not in text, "what a driver keeps is no leak with the mark gpu"


def test_ending_threads_and_processes_are_not_leaks(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    run(pytester, monkeypatch, wait=60, test_honest=HONEST).assert_outcomes(passed=HONEST.count("def test_"))

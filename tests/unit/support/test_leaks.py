"""The leak check itself: each kind of leak is an error of the test that left it, and of no other."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterable

import pytest

from tests import ROOT
from tests.support import leaks

DEAD = """
    import os, subprocess, sys

    WORDS = "import os; print(os.getpid(), open('/proc/self/stat').read().rpartition(')')[2].split()[19])"

    def test_name_of_a_dead_one():
        pid, started = subprocess.check_output([sys.executable, "-c", WORDS], text=True).split()
        os.close(os.open(f"/dev/shm/shmserve-{pid}-{started}-test-leaks", os.O_CREAT))
"""
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

FORKS = """
    import _thread, os, threading
    import numpy as np

    _thread.start_new_thread(threading.Event().wait, ())  # to Python a native thread, and older than those to come

    def multiply():
        square = np.ones((512, 512))
        square @ square

    def test_fork_ends_the_threads_of_blas():
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)

    def test_blas_starts_others():
        multiply()
        assert "OPENBLAS_NUM_THREADS" not in os.environ
"""

SERVER = """
    import subprocess, sys, textwrap
    import pytest

    CODE = '''
    import subprocess, sys
    children = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)]
    print(flush=True)
    for line in sys.stdin:
        if line.strip() != "more":
            children[0].stdin.close()
            children.pop().wait()
        children.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        print(flush=True)
    for child in children:
        child.stdin.close()
        child.wait()
    '''

    @pytest.fixture(scope="module")
    def server():
        command, pipe = [sys.executable, "-c", textwrap.dedent(CODE)], subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
            process.stdout.readline()
            yield process
            process.stdin.close()

    def say(server, word):
        server.stdin.write(word)
        server.stdin.flush()
        server.stdout.readline()

    def test_another(server):
        say(server, b"another\\n")

    def test_one_more(server):
        say(server, b"more\\n")
"""


def run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, *, wait: float = 0.5, **tests: str
) -> pytest.RunResult:
    """`wait`: seconds for threads and processes to end. Short in tests where some do not end, because each costs that
    time."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(**tests)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-o", f"leaks_wait={wait}")


def test_each_kind_is_caught(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(pytester, monkeypatch, test_leaky=LEAKY)
    result.assert_outcomes(passed=12, errors=8)
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
    ):
        assert piece in text
    assert "test_honest_after_all_of_these left behind" not in text


def test_tests_without_processes_are_checked_together(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(pytester, monkeypatch, test_pure=PURE)
    result.assert_outcomes(passed=4, errors=1)
    result.stdout.fnmatch_lines(["*test_pure.py left behind:*", "*memfd:leaked*"])
    assert "memfd:kept" not in result.stdout.str()


def test_ending_threads_and_processes_are_not_leaks(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    run(pytester, monkeypatch, wait=60, test_honest=HONEST).assert_outcomes(passed=HONEST.count("def test_"))


def test_what_a_driver_keeps_is_not_a_leak_with_the_mark_gpu(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(pytester, monkeypatch, test_driver=DRIVER)
    result.assert_outcomes(passed=3, errors=2, warnings=2)
    text = result.stdout.str()
    assert "test_child left behind:\n" in text
    assert "test_without_the_mark left behind:\n" in text
    assert "memfd:unmarked" in text
    assert "memfd:context" not in text


def test_threads_that_blas_restarts_are_not_leaks(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    run(pytester, monkeypatch, test_forks=FORKS).assert_outcomes(passed=2)


def test_a_process_that_ends_after_it_was_listed() -> None:
    """A server waited for its child between the two listings: list again."""
    with subprocess.Popen(["true"]) as ended:
        stat = leaks._stat(str(ended.pid))
    assert stat is not None
    key = ("process", ended.pid, stat[2])
    assert leaks._is_ending(leaks.Thing("process", key, "child of 1", "gone"))
    own = leaks._stat(str(os.getpid()))
    assert own is not None
    assert not leaks._is_ending(leaks.Thing("process", ("process", os.getpid(), own[2]), "child of 1", "running"))


def test_a_thread_that_ends_while_things_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It closes its descriptor after the descriptors have been listed: list again."""
    held, go_on = os.memfd_create("held"), threading.Event()
    looks = iter(range(2))  # the thread still runs at the first look

    def close() -> None:
        go_on.wait()
        os.close(held)

    thread = threading.Thread(target=close)

    def listing(sort: Callable[[], Iterable[leaks.Thing]]) -> Callable[[], Iterable[leaks.Thing]]:
        def listed() -> Iterable[leaks.Thing]:
            yield from sort()
            if sort is leaks._descriptors and next(looks, 1):
                go_on.set()
                thread.join()

        return listed

    before = {key: thing for key, thing in leaks.snapshot().items() if "memfd:held" not in thing.text}
    thread.start()
    monkeypatch.setattr(leaks, "SORTS", [listing(sort) for sort in leaks.SORTS])
    assert leaks._settled(before, 60.0)[0] == []


def test_threads_that_ending_threads_start_are_awaited() -> None:
    """The way grpcio ends: its threads start the one that closes its descriptors."""
    before, go_on, ended = leaks.snapshot(), threading.Event(), threading.Event()
    held = os.memfd_create("held")

    def close() -> None:
        ended.wait()
        os.close(held)

    def start_another() -> None:
        go_on.wait()
        threading.Thread(target=close).start()

    threading.Thread(target=start_another).start()
    real_wait = leaks._wait

    def wait(things: list[leaks.Thing], seconds: float) -> None:
        (ended if go_on.is_set() else go_on).set()
        real_wait(things, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaks, "_wait", wait)
        try:
            assert leaks._settled(before, 60.0)[0] == []
        finally:
            ended.set()


def test_a_leak_is_an_error_of_the_node_that_made_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module's fixture is checked with its module. A server may restart a child, but not start one more."""
    result = run(pytester, monkeypatch, test_dead=DEAD, test_server=SERVER, test_wider=WIDER)
    result.assert_outcomes(passed=5, errors=3)
    result.stdout.fnmatch_lines(["*test_name_of_a_dead_one left behind:*"])
    result.stdout.fnmatch_lines(["*test_one_more left behind:*", "*process * -c input()*"])
    result.stdout.fnmatch_lines(["*test_wider.py left behind:*", "*-> socket:*"])

"""The leak check itself: each kind of leak is an error of the test that left it, and of no other."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEAD = """
    import os, subprocess, sys

    WORDS = "import os; print(os.getpid(), open('/proc/self/stat').read().rpartition(')')[2].split()[19])"

    def test_name_of_a_dead_one():
        pid, started = subprocess.check_output([sys.executable, "-c", WORDS], text=True).split()
        os.close(os.open(f"/dev/shm/shmserve-{pid}-{started}-test-leaks", os.O_CREAT))
        print(f"\\nleft /dev/shm/shmserve-{pid}-{started}-test-leaks")
"""
CONFTEST = 'pytest_plugins = ("tests.leaks",)'

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

    def test_name():
        with open("/dev/shm/shmserve-test-leaks", "w"):
            pass

    def test_name_of_a_stranger():
        with open("/proc/1/stat") as file:
            started = file.read().rpartition(")")[2].split()[19]
        path = f"/dev/shm/shmserve-1-{started}-test-leaks"
        os.close(os.open(path, os.O_CREAT))
        strange.append(path)

    def test_removes_it():
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


def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, *options: str, **tests: str) -> pytest.RunResult:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(**tests)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-o", "leaks_wait=0.5", *options)


def test_each_kind_is_caught(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(pytester, monkeypatch, test_leaky=LEAKY)
    result.assert_outcomes(passed=11, errors=8)
    text = result.stdout.str()
    for piece in (
        "test_descriptor left behind:",
        "memfd:kept",
        "thread 'still-here'",
        "-c input()",
        "-c import signal; signal.pause()",
        "never waited for",
        "/dev/shm/shmserve-test-leaks",
        "mapping of /memfd:mapped",
        "test_fixture left behind:",
        "-> socket:[",
    ):
        assert piece in text
    assert "test_honest_after_all_of_these left behind" not in text


def test_the_honest_pass_and_whoever_made_it_answers(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fixture of a module answers for itself, and a child that a server starts anew is no leak, but one more is."""
    files = {"test_dead": DEAD, "test_honest": HONEST, "test_server": SERVER, "test_wider": WIDER}
    result = run(pytester, monkeypatch, **files)
    result.assert_outcomes(passed=11, errors=3)
    result.stdout.fnmatch_lines(["*test_name_of_a_dead_one left behind:*"])
    result.stdout.fnmatch_lines(["*test_one_more left behind:*", "*process * -c input()*"])
    result.stdout.fnmatch_lines(["*test_wider.py left behind:*", "*-> socket:*"])


def test_names_of_the_dead_are_nobodys_where_there_are_others(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = run(pytester, monkeypatch, "-s", "-o", "leaks_alone=false", test_dead=DEAD)
    for line in beside.outlines:
        if line.startswith("left "):
            Path(line.split()[-1]).unlink(missing_ok=True)
    beside.assert_outcomes(passed=1)

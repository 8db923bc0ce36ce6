"""The broker's child processes: their output becomes log lines within limits, their exit codes become texts, and those
that cannot be started, for example because no descriptors are left, are reported or replaced."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import pytest

from shmserve.broker.observability.log_throttle import LINES
from shmserve.broker.processes import gateways, helper_process, zygote
from shmserve.broker.processes.children import LINE_BYTES, TAIL_LINES, Output, describe_exit, environment
from shmserve.broker.processes.gateways import Gateways, GatewaySettings
from shmserve.broker.processes.helper_process import HelperKind, HelperProcess
from shmserve.broker.processes.zygote import Zygote
from shmserve.workers.process import log
from tests.support.manual_loop import ManualLoop


class Child:
    """Writes to an Output; `take` returns what has been logged since the last call."""

    def __init__(self, folders: Mapping[Path, Path] = MappingProxyType({})) -> None:
        self.loop = ManualLoop()
        self._logged: list[tuple[str, str]] = []
        self.output = Output(self.loop, {"verbose": "debug", "error": "error"}, self._log, folders)
        self._end = os.fdopen(self.output.write_end, "wb", buffering=0)

    def _log(self, level: str, text: str) -> None:
        self._logged.append((level, text))

    def write(self, data: bytes) -> list[tuple[str, str]]:
        self._end.write(data)
        return self.read()

    def read(self) -> list[tuple[str, str]]:
        self.output.read()
        return self.take()

    def take(self) -> list[tuple[str, str]]:
        found, self._logged = self._logged, []
        return found

    def end(self) -> None:
        self._end.close()

    def close(self) -> None:
        self.end()
        self.output.close()


@pytest.fixture
def one() -> Iterator[Child]:
    with closing(Child()) as made:
        yield made


def test_lines_name_the_directories_of_the_owner() -> None:
    folders = {Path("/run/x/generation-1/m"): Path("/models/m"), Path("/run/x/generation-2/b"): Path("/b")}
    with closing(Child(folders)) as one:
        found = one.write(b'error:   File "/run/x/generation-1/m/1/model.py", line 3\n/run/x/generation-2/b/y\n')
        assert found == [("error", '  File "/models/m/1/model.py", line 3'), ("info", "/b/y")]
        assert one.output.last_line() == "/b/y"


def test_lines_and_their_levels(one: Child) -> None:
    assert one.read() == []
    assert one.write(b"verbose: one: more\nerror:no\nwarning: two\nhal") == [
        ("debug", "one: more"),
        ("info", "error:no"),
        ("info", "warning: two"),
    ]
    assert one.write(b"f\n" + b"x" * LINE_BYTES) == [("info", "half")]
    assert one.write(b"yz") == [("info", "x" * LINE_BYTES)], "a line without an end is cut"
    assert one.write(b"half\nerror: \x1b[2J\xff\r\nthe rest") == [("info", "half"), ("error", r"\x1b[2J\xff\r")]
    one.end()
    assert one.read() == [("info", "the rest")]
    assert one.loop.readers == {}
    assert one.read() == []
    assert one.output.tail[-2:] == [r"error: \x1b[2J\xff\r", "the rest"]
    assert one.output.last_line() == one.output.last_line("nothing: ") == "the rest"
    assert one.output.last_line("ha") == "half"


def test_internal_frames_are_removed_from_a_crash_report(one: Child) -> None:
    """They are only removed from a crash: a model may print any traceback."""
    ours = Path(log.__file__)
    printed = f'  File "{ours}", line 5, in say'
    lines = [
        "Current thread 0x00007f0000000000 (most recent call first):",
        '  File "/models/m/1/model.py", line 5 in execute',
        f'  File "{ours}", line 5 in say',
        f'  File "{ours.resolve()}", line 5 in say',
        '  File "<frozen runpy>", line 88 in _run_code',
        printed,
    ]
    text = "Fatal Python error: Segmentation fault"
    assert one.write(text.encode() + b"\n\n") == [("error", text), ("info", "")]
    found = one.write("".join(f"{line}\n" for line in lines).encode())
    assert [text for _, text in found] == [*lines[:2], printed]
    assert one.output.tail[-3:] == [*lines[:2], printed]


def test_repeats_are_counted(one: Child) -> None:
    assert one.write(b"a\n" * 1000) == [("info", "a")]
    assert one.write(b"a\nb\n") == [("warning", "last message repeated 1,000 times"), ("info", "b")]
    assert one.write(b"b\n") == []
    one.loop.fire()
    assert one.take() == [("warning", "last message repeated 1 time")]
    assert one.write(b"b\n") == [], "still the same line"
    assert len(one.loop.timers) == 1


@pytest.mark.parametrize(("width", "logged", "dropped"), [(3, LINES, 800), (9999, 104, 896)])
def test_lines_over_a_limit_are_dropped_and_counted(one: Child, width: int, logged: int, dropped: int) -> None:
    lines = [b"%0*d\n" % (width, number) for number in range(1000)]
    found = [entry for line in lines for entry in one.write(line)]
    assert found == [("info", f"{number:0{width}}"[:LINE_BYTES]) for number in range(logged)]
    one.loop.fire()
    ((level, notice),) = one.take()
    assert level == "warning"
    assert notice.startswith(f"{dropped} lines (")
    assert notice.endswith("of output were dropped; the limit is 200 lines or 1.0 MiB per second")
    assert one.output.tail[-1].endswith("999"[:width]) is (width < LINE_BYTES)
    assert one.write(b"new\n") == [("info", "new")]
    assert one.loop.timers == []


def test_the_last_lines_of_a_child_are_logged_over_the_limit(one: Child) -> None:
    assert len(one.write(b"".join(b"%d\n" % number for number in range(LINES + 99)) + b"half a line")) == LINES
    one.output.finish()  # a process that the child has started keeps the pipe open, so there is no end of file
    (_, notice), *rest = one.take()
    assert notice.startswith("100 lines")
    kept = [("info", str(number)) for number in range(LINES + 100 - TAIL_LINES, LINES + 99)]
    assert rest == [*kept, ("info", "half a line")]


def test_exit_statuses_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [describe_exit(status) for status in (3, -signal.SIGSEGV, -1000)]
    assert found == ["exit code 3", "signal SIGSEGV", "signal 1000"]
    for name in ("TZ", "SSL_CERT_FILE", "SOME_SECRET"):
        monkeypatch.setenv(name, "x")
    assert {"TZ", "SSL_CERT_FILE"} <= set(environment("SSL_", "OPENSSL_"))
    assert "SSL_CERT_FILE" not in environment()
    assert "SOME_SECRET" not in environment("SSL_")


def fail(*_: Any, **__: Any) -> NoReturn:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _program(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gateways, helper_process, zygote):
        monkeypatch.setattr(module, "python", lambda: ["/bin/true"])


@pytest.mark.parametrize("call", ["os.pipe2", "subprocess.Popen", "os.pidfd_open"])
def test_a_gateway_that_cannot_be_started_is_reported(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, failures = ManualLoop(), list[Any]()
    settings = GatewaySettings(1, ())
    all_gateways = Gateways(loop, settings, "ipc://x", 0.0, fail, lambda *failure: failures.append(failure), fail)
    before = descriptors()
    monkeypatch.setattr(call, fail)
    all_gateways.start()
    assert failures == [(1, "cannot start the gateway: cannot start a process: Too many open files")]
    assert (descriptors(), loop.readers, loop.timers, all_gateways.pids) == (before, {}, [], set())


@pytest.mark.parametrize("call", ["socket.socketpair", "os.pipe2", "subprocess.Popen", "os.pidfd_open"])
def test_a_helper_that_cannot_be_started_is_started_later(
    call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop, pids, started = ManualLoop(), set[int](), list[bool]()
    kind = HelperKind("module", "label", "measures", socket.SOCK_STREAM)
    helper = HelperProcess(loop, kind, pids, [], lambda: started.append(True), fail, lambda: None)
    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(call, fail)
        helper.start()
    assert "the process that measures cannot be started: Too many open files; starting it again in 0 s" in caplog.text
    assert (descriptors(), loop.readers, pids, started) == (before, {}, set(), [])
    loop.fire()
    assert (len(pids), started) == (1, [True])
    helper.close()
    assert (descriptors(), loop.readers, pids) == (before, {}, set())


@pytest.mark.parametrize("call", ["socket.socketpair", "subprocess.Popen"])
def test_workers_are_new_interpreters_without_a_zygote(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, logged = ManualLoop(), list[Any]()
    forks = Zygote(loop, fail, lambda *record: logged.append(record), dict)
    before = descriptors()
    monkeypatch.setattr(zygote, "_become_subreaper", lambda: None)
    monkeypatch.setattr(call, fail)
    assert not forks.start(1, [], 0, 1)
    assert logged == [("info", "starting workers as new interpreters: cannot start a process: Too many open files", {})]
    assert (descriptors(), loop.readers) == (before, {})


def test_a_forked_worker_whose_descriptor_is_lost_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, done = ManualLoop(), list[Any]()
    forks = Zygote(loop, lambda *result: done.append(result), fail, dict)
    worker = subprocess.Popen(["sleep", "infinity"])
    start, reports = socket.socketpair, list[socket.socket]()

    def socketpair(*kind: int) -> tuple[socket.socket, socket.socket]:
        ours, theirs = start(*kind)
        reports.append(theirs.dup())
        return ours, theirs

    monkeypatch.setattr(zygote, "_become_subreaper", lambda: None)
    monkeypatch.setattr(socket, "socketpair", socketpair)
    assert forks.start(7, [], 0, 1)
    reports[0].send(str(worker.pid).encode())
    (read,) = loop.readers.values()
    read()
    assert (done, worker.wait()) == ([(7, 0, -1)], -signal.SIGKILL)
    forks.close()
    reports[0].close()

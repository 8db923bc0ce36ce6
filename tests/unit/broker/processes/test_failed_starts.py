"""Processes that cannot be started, for example because no descriptors are left."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
from typing import Any, NoReturn

import pytest

from shmserve.broker.processes import gateways, helper_process, zygote
from shmserve.broker.processes.gateways import Gateways, GatewaySettings
from shmserve.broker.processes.helper_process import HelperKind, HelperProcess
from shmserve.broker.processes.zygote import Zygote
from tests.support.manual_loop import ManualLoop


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
    assert descriptors() == before


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

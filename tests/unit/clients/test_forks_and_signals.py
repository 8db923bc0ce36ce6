"""The client for threads in processes that fork or end, or are interrupted by signals."""

from __future__ import annotations

import dis
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.clients.shared_link import SharedLink
from shmserve.protocol.messages import Bye, Hello
from tests.support.broker.fake_broker import FakeBroker, echo
from tests.support.clients.client_faces import await_leader
from tests.support.patience import PATIENCE_S

X = np.arange(4, dtype=np.float32)


def in_child(job: Callable[[], Any]) -> int:
    pid = os.fork()
    if not pid:
        try:
            job()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_connects_for_itself(client: shmserve.Client, broker: FakeBroker) -> None:
    own = client.empty((100, 100))
    own[:] = 1
    result = client.infer("echo", {"x": own})
    waiting = client.submit("hold", {"x": X})
    peer, infer, frames = broker.next_parked()

    def child() -> None:
        nonlocal result, own
        with pytest.raises(shmserve.ConnectionLost, match="by the parent process"):
            waiting.result()
        assert (client.infer("echo", {"x": own, "y": result["x"]})["y"] == 1).all()
        result, own = None, None  # type: ignore[assignment]
        gc.collect()
        client.flush()
        mine = client.empty((100, 100))
        mine[:] = 7
        assert (client.infer("echo", {"x": mine})["x"] == 7).all()
        client.close()

    assert in_child(child) == 0
    assert (own == 1).all(), "the child has not written into the parent's memory"
    assert (result["x"] == 1).all()
    assert broker.wait_for(Bye)
    assert len(broker.held_handles) == 1, "the child has returned nothing of the parent's"
    broker.do(lambda: echo(broker, peer, infer, frames))
    np.testing.assert_array_equal(waiting.result(PATIENCE_S)["x"], X)
    assert client.infer("echo", {"x": own})["x"].shape == (100, 100)


def test_the_end_of_a_parent_is_detected_while_its_child_runs(broker: FakeBroker) -> None:
    """The child must not keep the parent's connection open."""
    stop, alive = os.pipe(), os.pipe()

    def parent() -> None:
        client = shmserve.Client(broker.lane, name="parent")
        client.live()
        if not os.fork():
            os.write(alive[1], b"1")
            os.read(stop[0], 1)
            os._exit(0)
        os.read(alive[0], 1)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(parent) == -signal.SIGKILL
    assert broker.wait_for(Hello).name == "parent"
    with shmserve.Client(broker.lane) as client:
        while len(broker.peers) > 1:  # its end of file is in the broker's queue by the time of this answer
            client.live()
    os.write(stop[1], b"1")
    os.waitpid(-1, 0)
    for descriptor in (*stop, *alive):
        os.close(descriptor)


def test_a_callback_may_fork(client: shmserve.Client, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child leaves the callback and ends; the parent's reader thread continues."""
    children: list[int] = []
    answered = threading.Event()

    def fork(future: Any) -> None:
        children.append(os.fork())
        if children[0]:
            answered.set()

    def read(link: SharedLink, reader: Any) -> None:
        try:
            original(link, reader)
        finally:
            if children[:1] == [0]:
                os._exit(1 if sys.exc_info()[0] else 0)

    original = SharedLink.read
    monkeypatch.setattr(SharedLink, "read", read)
    client.submit("echo", {"x": X}).add_done_callback(fork)
    assert answered.wait(PATIENCE_S)
    assert os.waitpid(children[0], 0)[1] == 0
    future = client.submit("echo", {"x": X})
    future.add_done_callback(lambda future: None)
    np.testing.assert_array_equal(future.result(PATIENCE_S)["x"], X)


def test_a_client_dropped_without_close_leaves_nothing_behind(broker: FakeBroker) -> None:
    client = shmserve.Client(broker.lane)
    client.infer("echo", {"x": np.zeros(10_000)})
    del client
    gc.collect()


def test_clients_survive_ctrl_c(client: shmserve.Client, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        await_leader(client)
        os.kill(os.getpid(), signal.SIGINT)
        while not ended.wait(0.05):
            if not caught.is_set():  # it came just before the system call, where Python does not check for signals
                os.kill(os.getpid(), signal.SIGINT)

    def dropped(unraisable: Any) -> None:
        """pyzmq frees its frames where nothing can be raised: the user presses Ctrl-C again."""
        assert unraisable.exc_type is KeyboardInterrupt
        caught.clear()

    def once(number: int, frame: FrameType | None) -> None:
        if not caught.is_set():
            caught.set()
            raise KeyboardInterrupt

    caught, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(sys, "unraisablehook", dropped)
    thread = threading.Thread(target=interrupt)
    future = client.submit("hold", {"x": X})
    before = signal.signal(signal.SIGINT, once)
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            thread.start()
            future.result()
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
    np.testing.assert_array_equal(client.infer("echo", {"x": X})["x"], X)
    while not future.done():
        peer, infer, frames = broker.next_parked()
        if not peer.closed:  # over ZeroMQ the broker may not know yet, and answers both
            broker.do(lambda peer=peer, infer=infer, frames=frames: echo(broker, peer, infer, frames))  # type: ignore[misc]
        client.live()
    np.testing.assert_array_equal(future.result(PATIENCE_S)["x"], X)


@pytest.mark.parametrize("reader", [False, True], ids=["alone", "beside_the_reader_thread"])
def test_a_client_survives_an_interrupt_at_any_point(broker: FakeBroker, reader: bool) -> None:
    """KeyboardInterrupt at every point where the interpreter checks for signals during a call: the client can still be
    closed."""
    number = 0
    while True:
        client = shmserve.Client(broker.lane)
        client.live()
        if reader:
            client.submit("hold", {"x": X}).add_done_callback(lambda future: None)
        interrupt = _Interrupt(number)
        try:
            gc.disable()  # finalizers of other clients would also be interrupted
            sys.settrace(interrupt.call)
            try:
                client.infer("echo", {"x": X})
            finally:
                sys.settrace(None)
                gc.enable()
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            client.close()
        number += 1
    assert number > 20


class _Interrupt:
    """A trace function that raises KeyboardInterrupt at one of the places where the interpreter runs signal handlers:
    at the start of a function and after each call."""

    def __init__(self, number: int) -> None:
        self._left = number

    def call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if f"{os.sep}shmserve{os.sep}clients{os.sep}" not in frame.f_code.co_filename:
            return None
        self._check()
        frame.f_trace_opcodes = True
        called = False

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal called
            if event == "opcode":
                if called:
                    self._check()
                called = dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("CALL")
            return step

        return step

    def _check(self) -> None:
        if self._left == 0:
            sys.settrace(None)
            self._left = -1
            raise KeyboardInterrupt
        self._left -= 1

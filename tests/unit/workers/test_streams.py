"""Streams in the worker, with the model's threads interleaved in the worst way."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from shmserve.protocol.messages import Options, Tensor
from shmserve.protocol.worker_messages import BUFFER_BYTES, Row, Work
from shmserve.workers.backends.native.server_calls import ServerCalls
from shmserve.workers.model_calls.answer import Response, triton_number
from shmserve.workers.model_calls.calls import OutgoingCalls
from shmserve.workers.model_calls.pending import CallResponse, Pending
from shmserve.workers.model_calls.probes import ReadinessCalls
from shmserve.workers.model_calls.responses import OpenResponses
from shmserve.workers.model_calls.stream import ResponseSender
from tests.support.patience import PATIENCE_S

WINDOW = 2


TENSOR = Tensor("y", "FP32", (1,), bytes(4))


class Eager(asyncio.SelectorEventLoop):
    """A loop whose thread is faster than the calling one: callbacks run before the call returns."""

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        handle = self.call_soon(callback, *args, context=context)
        self.turn()
        return handle

    def turn(self, count: int = 2) -> None:
        for _ in range(count):
            self.call_soon(self.stop)
            self.run_forever()


@pytest.fixture
def loop() -> Iterator[Eager]:
    loop = Eager()
    yield loop
    loop.close()


def test_a_cancelled_coroutine_does_not_resume_when_the_window_opens(loop: Eager) -> None:
    streams = OpenResponses(decoupled=True)
    said: list[Row] = []
    streams.connect(
        said.append, lambda _: None, lambda work, _: Row(work.request, (TENSOR,)), lambda _: None, lambda: None
    )
    stream = streams.begin(Work(1, 1, (), None, "internal", Options(window=WINDOW)))
    streams.turn.release()
    passed = 0
    seen: list[bool] = []

    async def model() -> None:
        nonlocal passed
        try:
            while True:
                await streams.send_soon(stream, Response(), False, loop)
                passed += 1
                for _ in range(4):
                    await asyncio.sleep(0)
        finally:
            seen.append(stream.cancelled)

    task = loop.create_task(model())
    stream.abort = task.cancel
    loop.turn(20)
    assert (passed, len(said), len(stream.kept)) == (WINDOW, WINDOW, 1)
    streams.turn.acquire()
    streams.cancel([1])
    streams.turn.release()
    loop.turn()
    assert task.cancelled()
    assert (passed, len(said)) == (WINDOW, WINDOW)
    assert seen == [True], "the model asks is_cancelled() when it ends"
    end(streams)


def test_responses_that_were_announced_are_sent_together() -> None:
    streams, opened, packets = sending(3)
    streams.turn.release()
    send_announced = streams.announce()
    for stream in opened:
        streams.send_soon(stream, Response([1]), False, None)  # type: ignore[list-item]
    assert packets == []
    send_announced()
    streams.send_soon(opened[0], Response([2]), True, None)  # type: ignore[list-item]
    assert [[row.request for row in packet] for packet in packets] == [[0, 1, 2], [0]]
    end(streams)


def test_a_model_whose_caller_does_not_read_waits_only_beside_large_responses() -> None:
    unread = threading.Event()
    streams, (stream,), packets = sending(1, lambda _: unread.set())
    stream.room = 0
    half = Tensor("y", "FP32", (BUFFER_BYTES // 10,), bytes(BUFFER_BYTES // 10 * 4))

    def model() -> None:
        for _ in range(3):
            streams.send(stream, Response([half]), False)  # type: ignore[list-item]

    thread = threading.Thread(target=model)
    thread.start()
    streams.turn.release()
    assert unread.wait(PATIENCE_S)
    with streams.turn:
        kept = len(stream.kept)
    end(streams)
    thread.join()
    assert (kept, [[row.error is not None for row in packet] for packet in packets]) == (2, [[True]])


def end(streams: OpenResponses) -> None:
    streams.turn.acquire()
    streams.stop(linked=True)
    streams.close()


def sending(
    count: int, report: Callable[[object], None] = lambda _: None
) -> tuple[OpenResponses, list[ResponseSender], list[list[Row]]]:
    """With this number of requests: their streams, and the packets that have been sent."""
    streams = OpenResponses(decoupled=True)
    queued: list[Row] = []
    packets: list[list[Row]] = []

    def flush() -> None:
        if queued:
            packets.append(queued.copy())
        queued.clear()

    def row(work: Work, response: Any) -> Row:
        return Row(work.request, tuple(response.outputs))

    streams.connect(queued.append, report, row, lambda _: None, flush)
    return streams, [streams.begin(Work(number, 1, (), None, "internal")) for number in range(count)], packets


def test_what_waiting_threads_send_together_is_complete_and_in_order() -> None:
    streams, opened, packets = sending(8)

    def model(stream: ResponseSender) -> None:
        for index in range(50):
            streams.send_soon(stream, Response([index]), index == 49, None)  # type: ignore[list-item]

    threads = [threading.Thread(target=model, args=(stream,)) for stream in opened]
    for thread in threads:
        thread.start()
    streams.turn.release()
    for thread in threads:
        thread.join()
    sent: list[tuple[int, Any]] = [(row.request, row.outputs[0]) for packet in packets for row in packet]
    assert {number: [index for request, index in sent if request == number] for number in range(8)} == {
        number: list(range(50)) for number in range(8)
    }
    end(streams)


def test_a_coroutine_waits_for_a_call_after_a_thread_could_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, pending = OpenResponses(decoupled=False), Pending(1, 0)
    here, there = socket.socketpair()
    reader = Mock(side_effect=lambda: pending.answered(CallResponse(), True))
    calls = OutgoingCalls(Mock(deferred=deque()), Mock(), Mock(), here.fileno(), reader)
    calls.connect(streams)
    streams.turn.release()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="can't start new thread"):
            asyncio.run(calls.wait_soon(pending, lambda: pending.over, coroutines=False))
    there.send(b"a reply")
    asyncio.run(calls.wait_soon(pending, lambda: pending.over, coroutines=False))
    for thread in threading.enumerate():
        if thread.name == "calls":
            thread.join()
    end(streams)
    here.close()
    there.close()


def test_a_native_backend_gets_an_error_for_a_call_that_needs_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    host, memory = Mock(), ctypes.create_string_buffer(1)
    text = (ctypes.addressof(memory), 0)
    words = array("Q", (*text, 0, *text, 0, 0, 0, 0, *text, 0, 0, 0))
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    infer = ServerCalls(host, Mock(), list).callbacks["infer"]
    assert infer(1, words.buffer_info()[0], len(words)) == -1
    host.host_refuse.assert_called_once_with(triton_number("UNAVAILABLE"), b"can't start new thread")


def test_a_model_is_asked_whether_it_is_ready_after_a_thread_could_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[bool] = []
    probes = ReadinessCalls(lambda: True)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        probes.add(reports.append)
    probes.add(reports.append)
    for thread in threading.enumerate():
        if thread.name == "is_ready":
            thread.join()
    assert reports == [True]

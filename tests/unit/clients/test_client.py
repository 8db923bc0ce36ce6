"""What only the client for threads has: futures of the standard library, threads that read for each other, forks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dis
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.clients.transport.shared_reader import SharedLink
from shmserve.protocol.messages import Bye, Cancel, Goodbye, Hello, Infer, Reply, Return
from shmserve.session.memory import FLUSH_BYTES
from tests.support.broker.fake_broker import MODELS, FakeBroker, Peer, echo

as_completed: Callable[..., Iterator[Any]] = concurrent.futures.as_completed
X = np.arange(4, dtype=np.float32)


def run_all(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Each in a thread of its own; what they return, or the first error."""
    pool = concurrent.futures.ThreadPoolExecutor(len(jobs))
    futures = [pool.submit(job) for job in jobs]
    _, hanging = concurrent.futures.wait(futures, timeout=60)
    pool.shutdown(wait=not hanging)
    return [future.result(0) for future in futures]


# ------------------------------------------------------------------------------------------------ threads


def test_threads_share_a_client(client: shmserve.Client) -> None:
    def work(thread: int) -> Callable[[], int]:
        def run() -> int:
            right = 0
            size = 5 if thread % 2 else 2000  # inline, and in shared memory
            for number in range(200):
                x = np.full(size, thread * 1000 + number, np.float64)
                right += bool((client.infer("echo", {"x": x})["x"] == x).all())
            return right

        return run

    assert run_all([work(thread) for thread in range(8)]) == [200] * 8


def test_threads_wait_for_each_others_futures(client: shmserve.Client) -> None:
    futures = [client.submit("echo", {"x": X + number}) for number in range(100)]

    def collect(start: int) -> Callable[[], list[float]]:
        return lambda: [float(future.result(30)["x"][0]) for future in futures[start:] + futures[:start]]

    for start, found in enumerate(run_all([collect(start) for start in range(4)])):
        expected = [float(number) for number in range(100)]
        assert found == expected[start:] + expected[:start]


def test_a_follower_leads_when_the_leader_has_its_answer(client: shmserve.Client, broker: FakeBroker) -> None:
    first, second = client.submit("hold", {"x": X}), client.submit("hold", {"x": X + 1})
    waiting = threading.Barrier(3)

    def wait(future: Any) -> Callable[[], Any]:
        def run() -> Any:
            waiting.wait()
            return future.result(30)["x"]

        return run

    def answer() -> None:
        waiting.wait()
        broker.answer()
        broker.answer()

    results = run_all([wait(first), wait(second), answer])
    np.testing.assert_array_equal(results[0], X)
    np.testing.assert_array_equal(results[1], X + 1)


def test_each_thread_keeps_its_own_deadline(client: shmserve.Client, broker: FakeBroker) -> None:
    long = client.submit("hold", {"x": X})

    def short() -> str:
        with pytest.raises(shmserve.DeadlineExceeded) as caught:
            client.infer("hold", {"x": X}, timeout=0.05)
        return str(caught.value)

    def patient() -> Any:
        return long.result(60)["x"]

    def release() -> None:
        assert broker.wait_for(Cancel)
        broker.answer()

    found = run_all([patient, short, release])
    np.testing.assert_array_equal(found[0], X)
    assert "timeout of 0.05 s" in found[1]


def test_close_ends_the_waiting_of_others(client: shmserve.Client, broker: FakeBroker) -> None:
    futures = [client.submit("hold", {"x": X}) for _ in range(3)]
    broker.parked.get(timeout=20)

    def wait(future: Any) -> Callable[[], str]:
        def run() -> str:
            with pytest.raises(shmserve.Cancelled) as caught:
                future.result()
            return str(caught.value)

        return run

    found = run_all([*[wait(future) for future in futures], client.close, client.close])
    assert found[:3] == ["the client was closed before the response arrived"] * 3
    with pytest.raises(shmserve.Unavailable, match="the client is closed"):
        client.submit("echo", {"x": X})


def test_the_link_ends_while_threads_wait(client: shmserve.Client, broker: FakeBroker) -> None:
    futures = [client.submit("hold", {"x": X + number}) for number in range(3)]
    peer, _, _ = broker.parked.get(timeout=20)
    refused = Goodbye("UNAVAILABLE", "the server stops")

    def wait(future: Any) -> Callable[[], None]:
        def run() -> None:
            with pytest.raises(shmserve.Unavailable, match="the server stops"):
                future.result(30)

        return run

    def end() -> None:
        broker.do(lambda: peer.send(refused))

    run_all([*[wait(future) for future in futures], end])


# ------------------------------------------------------------------------------------------------ futures


def test_result_times_out_and_the_request_goes_on(client: shmserve.Client, broker: FakeBroker) -> None:
    future = client.submit("hold", {"x": X})
    with pytest.raises(concurrent.futures.TimeoutError):
        future.result(0.02)
    with pytest.raises(concurrent.futures.TimeoutError):
        future.exception(0.02)
    assert not future.done()
    assert not future.running()
    assert "pending" in repr(future)
    broker.answer()
    np.testing.assert_array_equal(future.result(20)["x"], X)
    assert future.exception() is None
    assert future.done()


def test_done_alone_brings_the_answer(client: shmserve.Client, broker: FakeBroker) -> None:
    """Nobody else reads: done() does."""
    future = client.submit("hold", {"x": X})
    broker.answer()
    client.live()  # its answer comes behind that of the future
    assert future.done()
    other = client.submit("hold", {"x": X}, timeout=0.01)
    while not other.done():
        pass
    assert isinstance(other.exception(), shmserve.DeadlineExceeded)


def test_errors_of_futures(client: shmserve.Client) -> None:
    future = client.submit("nope", {})
    assert isinstance(future.exception(), shmserve.NotFound)
    for _ in range(2):
        with pytest.raises(shmserve.NotFound):
            future.result()


def test_concurrent_futures_wait_and_as_completed(client: shmserve.Client, broker: FakeBroker) -> None:
    slow = client.submit("hold", {"x": X})
    quick = [client.submit("echo", {"x": X + number}) for number in range(20)]
    done, pending = concurrent.futures.wait([slow, *quick], timeout=20, return_when=concurrent.futures.FIRST_COMPLETED)
    assert slow in pending
    assert done
    done, _ = concurrent.futures.wait(quick, timeout=20)
    assert done == set(quick)
    broker.answer()
    seen = {float(future.result()["x"][0]) for future in as_completed([slow, *quick], timeout=20)}
    assert seen == {float(number) for number in range(20)}
    failing = [client.submit("nope", {}), client.submit("echo", {"x": X})]
    done, _ = concurrent.futures.wait(failing, timeout=20, return_when=concurrent.futures.FIRST_EXCEPTION)
    assert failing[0] in done
    held = client.submit("hold", {"x": X})
    waiting = as_completed([held], timeout=20)
    assert held.cancel()
    assert next(waiting).cancelled()


def test_asyncio_wrap_future(client: shmserve.Client) -> None:
    async def main() -> list[float]:
        futures = [asyncio.wrap_future(client.submit("echo", {"x": X + number})) for number in range(30)]
        return [float(result["x"][0]) for result in await asyncio.gather(*futures)]

    assert asyncio.run(main()) == [float(number) for number in range(30)]


def test_dropping_a_future_does_not_cancel(client: shmserve.Client, broker: FakeBroker) -> None:
    client.submit("echo", {"x": X})
    gc.collect()
    client.live()
    assert [request.model for request in broker.requests] == ["echo"]


def test_results_that_nobody_asks_for_are_given_back(client: shmserve.Client, broker: FakeBroker) -> None:
    future = client.submit("echo", {"x": np.zeros(10_000)})
    client.live()
    client.live()
    del future
    client.flush()
    assert broker.wait_for(Return)
    assert broker.held_handles == []


class Collecting:
    """A socket of a link. Whenever it is read, the collector runs, as it may."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)

    def recv(self, *arguments: Any) -> Any:
        gc.collect()
        return self._found.recv(*arguments)

    def recvmsg_into(self, *arguments: Any) -> Any:
        gc.collect()
        return self._found.recvmsg_into(*arguments)


def test_the_collector_may_run_in_the_midst_of_reading(client: shmserve.Client, broker: FakeBroker) -> None:
    cycle: list[Any] = [client.infer("echo", {"x": np.zeros(FLUSH_BYTES)})]
    cycle.append(cycle)
    link: Any = client._link._link
    link._socket = link._sock = found = Collecting(getattr(link, "_socket", None) or link._sock)
    link._recvmsg_into = found.recvmsg_into
    del cycle
    asking = threading.Thread(target=client.live, daemon=True)
    asking.start()
    asking.join(20)
    assert not asking.is_alive(), "giving it back has waited for the very thread that does so"
    client.flush()
    assert broker.wait_for(Return)
    assert broker.held_handles == []


# ------------------------------------------------------------------------------------------------ packets


def infers(packets: list[list[Any]]) -> list[int]:
    return [count for packet in packets if (count := sum(isinstance(message, Infer) for message in packet))]


def test_requests_go_at_once_unless_results_wait(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    parked: list[tuple[Peer, Infer]] = []

    def in_batches(broker: FakeBroker, peer: Peer, infer: Infer, frames: list[bytes]) -> None:
        """All answers of eight requests in one packet, as a batch of a model gives them."""
        parked.append((peer, infer))
        if len(parked) == 8:
            messages: list[Any] = []
            for _, request in parked:
                (tensor,) = request.inputs
                messages.append(Reply(request.request, 1, (tensor,)))
            parked.clear()
            peer.send(*messages)

    monkeypatch.setitem(MODELS, "batch", in_batches)
    with shmserve.Client(broker.lane) as client:
        futures = [client.submit("batch", {"x": X + number}) for number in range(8)]
        assert futures[0].result()["x"][0] == 0
        assert infers(broker.packets) == [1] * 8
        for number in range(8):
            assert futures[number].result()["x"][0] == number
            futures[number] = client.submit("batch", {"x": X + number + 8})
        assert futures[0].result()["x"][0] == 8
        assert infers(broker.packets)[8:] == [8], "the loop that collects and submits fills packets"
        for number in range(1, 8):
            assert futures[number].result()["x"][0] == number + 8


def test_what_is_buffered_is_sent_by_any_other_call(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    def pair(broker: FakeBroker, peer: Peer, infer: Infer, frames: list[bytes]) -> None:
        """Nothing, but at the second time two answers in one packet."""
        broker.parked.put((peer, infer, frames))
        if infer.request % 2 == 0:
            found = [broker.parked.get()[1] for _ in range(2)]
            peer.send(*[Reply(one.request, 1, one.inputs) for one in found])

    monkeypatch.setitem(MODELS, "pair", pair)

    def buffered(client: shmserve.Client) -> Any:
        first, second = client.submit("pair", {"x": X}), client.submit("pair", {"x": X})
        first.result()
        count = len(broker.requests)
        future = client.submit("echo", {"x": X})
        assert len(broker.requests) == count
        assert not second.cancelled()
        return future, second

    for send in (
        lambda client, future: future.done(),
        lambda client, future: client.flush(),
        lambda client, future: client.live(),
        lambda client, future: future.result(),
        lambda client, future: future.add_done_callback(lambda _: None),
        lambda client, future: concurrent.futures.wait([future], timeout=20),
    ):
        with shmserve.Client(broker.lane) as client:
            future, second = buffered(client)
            send(client, future)
            np.testing.assert_array_equal(future.result(20)["x"], X)
            second.result()


# ------------------------------------------------------------------------------------------------ processes


def in_child(job: Callable[[], Any]) -> int:
    """Runs it in a forked child; its exit code."""
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
    peer, infer, frames = broker.parked.get(timeout=20)

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
    np.testing.assert_array_equal(waiting.result(20)["x"], X)
    assert client.infer("echo", {"x": own})["x"].shape == (100, 100)


def test_the_death_of_the_parent_is_seen_although_a_child_lives(broker: FakeBroker) -> None:
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
        while len(broker.peers) > 1:  # its end of file is in the broker's queue, at the latest with this answer
            client.live()
    os.write(stop[1], b"1")
    os.waitpid(-1, 0)
    for descriptor in (*stop, *alive):
        os.close(descriptor)


def test_a_callback_may_fork(client: shmserve.Client, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child leaves the callback and ends; the reader thread of the parent reads on."""
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
    assert answered.wait(20)
    assert os.waitpid(children[0], 0)[1] == 0
    future = client.submit("echo", {"x": X})
    future.add_done_callback(lambda future: None)
    np.testing.assert_array_equal(future.result(20)["x"], X)


def test_a_client_that_is_only_dropped_leaves_nothing(broker: FakeBroker) -> None:
    client = shmserve.Client(broker.lane)
    client.infer("echo", {"x": np.zeros(10_000)})
    del client
    gc.collect()


def test_interrupted_by_a_signal(client: shmserve.Client, broker: FakeBroker) -> None:
    """Ctrl-C while waiting: the client can be used afterwards, and the request is not lost."""

    def interrupt() -> None:
        while not client._link._leading:
            pass
        os.kill(os.getpid(), signal.SIGINT)
        while not caught.wait(0.05):  # it came in the moment before the system call, where Python does not look for it
            os.kill(os.getpid(), signal.SIGINT)

    def once(number: int, frame: FrameType | None) -> None:
        if not caught.is_set():
            caught.set()
            raise KeyboardInterrupt

    caught = threading.Event()
    thread = threading.Thread(target=interrupt)
    future = client.submit("hold", {"x": X})
    before = signal.signal(signal.SIGINT, once)
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            thread.start()
            future.result()
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    np.testing.assert_array_equal(client.infer("echo", {"x": X})["x"], X)
    while not future.done():
        peer, infer, frames = broker.parked.get(timeout=20)
        if not peer.closed:  # over ZeroMQ the broker may not know yet, and answers both
            broker.do(lambda peer=peer, infer=infer, frames=frames: echo(broker, peer, infer, frames))  # type: ignore[misc]
        client.live()
    np.testing.assert_array_equal(future.result(20)["x"], X)


@pytest.mark.parametrize("reader", [False, True], ids=["alone", "beside_the_reader_thread"])
def test_interrupted_anywhere(broker: FakeBroker, reader: bool) -> None:
    """KeyboardInterrupt, wherever the interpreter looks for signals during a call: the client can still be closed."""
    number = 0
    while True:
        client = shmserve.Client(broker.lane)
        client.live()
        if reader:
            client.submit("hold", {"x": X}).add_done_callback(lambda future: None)
        interrupt = _Interrupt(number)
        try:
            gc.disable()  # finalizers of other clients would be interrupted too
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

"""The client for threads: threads that read for each other, its futures and its reader thread, which requests share a
packet, and invalid arguments of both clients."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import math
import queue
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.errors import InvalidRequest
from shmserve.protocol.messages import Cancel, Infer, Reply, Return
from shmserve.session.memory import FLUSH_BYTES
from shmserve.transport.lane import Lane
from shmserve.transport.zmq import ZmqLink
from tests.support.broker.fake_broker import MODELS, FakeBroker, Peer
from tests.support.clients.client_faces import FACES, await_leader
from tests.support.patience import PATIENCE_S

X = np.arange(4, dtype=np.float32)


def run_all(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Runs each job in a separate thread. Returns their results, or raises the first error."""
    pool = concurrent.futures.ThreadPoolExecutor(len(jobs))
    futures = [pool.submit(job) for job in jobs]
    _, hanging = concurrent.futures.wait(futures, timeout=PATIENCE_S)
    pool.shutdown(wait=not hanging)
    return [future.result(0) for future in futures]


def test_threads_share_a_client(client: shmserve.Client) -> None:
    def work(thread: int) -> int:
        size = 5 if thread % 2 else 2000  # inline, and in shared memory
        inputs = [np.full(size, thread * 1000 + number, np.float64) for number in range(200)]
        return sum(bool((client.infer("echo", {"x": x})["x"] == x).all()) for x in inputs)

    assert run_all([partial(work, thread) for thread in range(8)]) == [200] * 8


def test_threads_wait_for_each_others_futures(client: shmserve.Client) -> None:
    futures = [client.submit("echo", {"x": X + number}) for number in range(100)]

    def collect(start: int) -> list[float]:
        found = [float(future.result(PATIENCE_S)["x"][0]) for future in futures[start:] + futures[:start]]
        return found[100 - start :] + found[: 100 - start]

    expected = [float(number) for number in range(100)]
    assert run_all([partial(collect, start) for start in range(4)]) == [expected] * 4


def test_another_thread_reads_once_the_leader_has_its_answer(client: shmserve.Client, broker: FakeBroker) -> None:
    first, second = client.submit("hold", {"x": X}), client.submit("hold", {"x": X + 1})
    waiting = threading.Barrier(3)

    def wait(future: Any) -> Any:
        waiting.wait()
        return future.result(PATIENCE_S)["x"]

    def answer() -> None:
        waiting.wait()
        broker.answer()
        broker.answer()

    results = run_all([partial(wait, first), partial(wait, second), answer])
    np.testing.assert_array_equal(results[0], X)
    np.testing.assert_array_equal(results[1], X + 1)


def test_each_thread_keeps_its_own_deadline(client: shmserve.Client, broker: FakeBroker) -> None:
    long = client.submit("hold", {"x": X})

    def short() -> str:
        with pytest.raises(shmserve.DeadlineExceeded) as caught:
            client.infer("hold", {"x": X}, timeout=0.05)
        return str(caught.value)

    def release() -> None:
        assert broker.wait_for(Cancel)
        broker.answer()

    found = run_all([partial(long.result, 60), short, release])
    np.testing.assert_array_equal(found[0]["x"], X)
    assert "timeout of 0.05 s" in found[1]


def test_close_wakes_threads_that_wait_for_results(client: shmserve.Client, broker: FakeBroker) -> None:
    futures = [client.submit("hold", {"x": X}) for _ in range(3)]
    broker.next_parked()

    errors = run_all([*[future.exception for future in futures], client.close, client.close])[:3]
    assert [type(error) for error in errors] == [shmserve.Cancelled] * 3
    assert {str(error) for error in errors} == {"the client was closed before the response arrived"}
    with pytest.raises(shmserve.Unavailable, match="the client is closed"):
        client.submit("echo", {"x": X})


def infers(packets: list[list[Any]]) -> list[int]:
    return [count for packet in packets if (count := sum(isinstance(message, Infer) for message in packet))]


def test_requests_go_at_once_unless_results_are_unread(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    parked: list[tuple[Peer, Infer]] = []

    def in_batches(broker: FakeBroker, peer: Peer, infer: Infer, frames: list[bytes]) -> None:
        """Sends the answers to eight requests in one packet, as for a batch of a model."""
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


def test_buffered_requests_are_sent_by_any_other_call(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    def pair(broker: FakeBroker, peer: Peer, infer: Infer, frames: list[bytes]) -> None:
        """Sends nothing at first, then two answers in one packet."""
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
        lambda client, future: concurrent.futures.wait([future], timeout=PATIENCE_S),
    ):
        with shmserve.Client(broker.lane) as client:
            future, second = buffered(client)
            send(client, future)
            np.testing.assert_array_equal(future.result(PATIENCE_S)["x"], X)
            second.result()


as_completed: Callable[..., Iterator[Any]] = concurrent.futures.as_completed


def test_a_timeout_of_result_does_not_end_the_request(client: shmserve.Client, broker: FakeBroker) -> None:
    future = client.submit("hold", {"x": X})
    with pytest.raises(concurrent.futures.TimeoutError):
        future.result(0.02)
    with pytest.raises(concurrent.futures.TimeoutError):
        future.exception(0.02)
    assert not future.done()
    assert not future.running()
    assert "pending" in repr(future)
    broker.answer()
    np.testing.assert_array_equal(future.result(PATIENCE_S)["x"], X)
    assert future.exception() is None
    assert future.done()


def test_done_reads_the_answer(client: shmserve.Client, broker: FakeBroker) -> None:
    """No other thread reads, so done() does."""
    future = client.submit("hold", {"x": X})
    broker.answer()
    client.live()  # its answer arrives after that of the future
    assert future.done()
    other = client.submit("hold", {"x": X}, timeout=0.01)
    while not other.done():
        pass
    assert isinstance(other.exception(), shmserve.DeadlineExceeded)
    garbled = client.submit("garble", {})
    assert isinstance(garbled.exception(), shmserve.Internal), "found out when the answer is decoded"
    for _ in range(2):
        with pytest.raises(shmserve.DeadlineExceeded):
            other.result()


def test_futures_of_the_standard_library_wait_for_them(client: shmserve.Client, broker: FakeBroker) -> None:
    slow = client.submit("hold", {"x": X})
    quick = [client.submit("echo", {"x": X + number}) for number in range(20)]
    done, pending = concurrent.futures.wait(
        [slow, *quick], timeout=PATIENCE_S, return_when=concurrent.futures.FIRST_COMPLETED
    )
    assert slow in pending
    assert done
    done, _ = concurrent.futures.wait(quick, timeout=PATIENCE_S)
    assert done == set(quick)
    broker.answer()
    seen = {float(future.result()["x"][0]) for future in as_completed([slow, *quick], timeout=PATIENCE_S)}
    assert seen == {float(number) for number in range(20)}
    failing = [client.submit("nope", {}), client.submit("echo", {"x": X})]
    done, _ = concurrent.futures.wait(failing, timeout=PATIENCE_S, return_when=concurrent.futures.FIRST_EXCEPTION)
    assert failing[0] in done
    held = client.submit("hold", {"x": X})
    waiting = as_completed([held], timeout=PATIENCE_S)
    assert held.cancel()
    assert next(waiting).cancelled()

    async def main() -> list[float]:
        futures = [asyncio.wrap_future(client.submit("echo", {"x": X + number})) for number in range(30)]
        return [float(result["x"][0]) for result in await asyncio.gather(*futures)]

    assert asyncio.run(main()) == [float(number) for number in range(30)]


def test_unread_results_of_dropped_futures_are_returned(client: shmserve.Client, broker: FakeBroker) -> None:
    future = client.submit("echo", {"x": np.zeros(10_000)})
    client.live()
    client.live()
    del future
    client.flush()
    assert broker.wait_for(Return)
    assert broker.held_handles == []
    client.submit("echo", {"x": X})  # it is not cancelled if nobody keeps its future
    gc.collect()
    client.live()
    assert len(broker.requests) == 2


class Collecting:
    """A socket of a link. The garbage collector runs at each read, as it may at any time."""

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


def test_the_garbage_collector_may_run_during_a_read(client: shmserve.Client, broker: FakeBroker) -> None:
    cycle: list[Any] = [client.infer("echo", {"x": np.zeros(FLUSH_BYTES)})]
    cycle.append(cycle)
    link: Any = client._link._link  # noqa: SLF001 - the collector must run in the middle of a read
    (name,) = {"_socket", "_sock"} & set(dir(link))
    found = Collecting(getattr(link, name))
    for attribute, value in ((name, found), ("_recvmsg_into", found.recvmsg_into)):
        setattr(link, attribute, value)
    del cycle
    asking = threading.Thread(target=client.live, daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    assert not asking.is_alive(), "giving it back has waited for the very thread that does so"
    client.flush()
    assert broker.wait_for(Return)
    assert broker.held_handles == []


def test_callbacks_run_once_and_their_errors_are_logged(
    client: shmserve.Client, broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    called: queue.SimpleQueue[Any] = queue.SimpleQueue()
    future = client.submit("hold", {"x": X})
    future.add_done_callback(lambda _: 1 // 0)
    future.add_done_callback(called.put)
    broker.answer()
    assert called.get(timeout=PATIENCE_S) is future
    np.testing.assert_array_equal(future.result()["x"], X)
    assert "ZeroDivisionError" in caplog.text
    future.add_done_callback(called.put)
    assert called.get(timeout=0) is future, "at once, as it is done"

    def again(found: Any) -> None:
        """A callback may use the client."""
        called.put(client.infer("echo", {"x": X + 1})["x"][0])

    client.submit("echo", {"x": X}).add_done_callback(again)
    assert called.get(timeout=PATIENCE_S) == 1
    client.submit("nope", {}).add_done_callback(called.put)
    assert isinstance(called.get(timeout=PATIENCE_S).exception(), shmserve.NotFound)
    cancelled = client.submit("hold", {"x": X})
    cancelled.add_done_callback(called.put)
    assert cancelled.cancel()
    assert called.get(timeout=PATIENCE_S).cancelled()


def test_a_deadline_is_kept_while_the_reader_waits_or_is_about_to(
    client: shmserve.Client, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits without a limit; then it has released the lock, and does not wait yet."""
    called: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.submit("hold", {"x": X}).add_done_callback(called.put)
    client.submit("hold", {"x": X}, timeout=0.02).add_done_callback(called.put)
    assert isinstance(called.get(timeout=PATIENCE_S).exception(), shmserve.DeadlineExceeded)
    about, go = threading.Event(), threading.Event()

    def pausing(kind: Any) -> Any:
        real = kind.receive_or_event

        def receive(*arguments: Any) -> Any:
            about.set()
            assert go.wait(PATIENCE_S)
            return real(*arguments)

        return receive

    for kind in (Lane, ZmqLink):
        monkeypatch.setattr(kind, "receive_or_event", pausing(kind))
    client.submit("hold", {"x": X}).add_done_callback(lambda _: None)
    assert about.wait(PATIENCE_S)
    client.submit("hold", {"x": X}, timeout=0.02).add_done_callback(called.put)
    go.set()
    assert isinstance(called.get(timeout=PATIENCE_S).exception(), shmserve.DeadlineExceeded)


def test_a_deadline_is_kept_while_another_thread_reads(client: shmserve.Client, broker: FakeBroker) -> None:
    asked = client.submit("hold", {"x": X})
    waiting = threading.Thread(target=asked.result)
    waiting.start()
    await_leader(client)
    client.submit("hold", {"x": X}).add_done_callback(lambda _: None)
    while not client._link._gates:  # noqa: SLF001 - until the reader is a follower
        assert waiting.is_alive()
    called: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.submit("hold", {"x": X}, timeout=0.02).add_done_callback(called.put)
    assert isinstance(called.get(timeout=PATIENCE_S).exception(), shmserve.DeadlineExceeded)
    broker.answer()
    waiting.join()


def test_the_reader_thread_starts_with_the_first_callback(client: shmserve.Client) -> None:
    before = set(threading.enumerate())
    client.infer("echo", {"x": X})
    futures = [client.submit("echo", {"x": X}) for _ in range(50)]
    assert [future.result()["x"].size for future in futures] == [4] * 50
    assert set(threading.enumerate()) <= before
    called: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(3):
        client.submit("echo", {"x": X}).add_done_callback(called.put)
        called.get(timeout=PATIENCE_S)
        assert len(set(threading.enumerate()) - before) == 1
        assert client.infer("echo", {"x": X})["x"].size == 4
    client.close()
    assert set(threading.enumerate()) <= before


NAN = math.nan
INVALID_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"timeout": -1}, "timeout=-1 must be a number of seconds above 0"),
    ({"timeout": 0}, "timeout=0 must be a number of seconds above 0"),
    ({"timeout": "5"}, "timeout='5' must be a number of seconds above 0"),
    ({"reconnect_timeout": -0.5}, "reconnect_timeout=-0.5 must be a number of seconds, at least 0"),
    ({"reconnect_timeout": None}, "reconnect_timeout=None must be a number of seconds, at least 0"),
    ({"memory_bytes": -1}, "memory_bytes=-1 must be a whole number of bytes above 0"),
    ({"memory_bytes": 1e9}, "memory_bytes=1000000000.0 must be a whole number of bytes above 0"),
    ({"name": "n" * 129}, f"client name '{'n' * 40}...' has 129 characters; the limit is 128"),
]
VALID_SETTINGS = [
    {"timeout": 0.001}, {"timeout": math.inf}, {"timeout": None}, {"reconnect_timeout": 0},
    {"reconnect_timeout": math.inf}, {"memory_bytes": 1}, {"name": "n" * 128},
]  # fmt: skip


@pytest.mark.parametrize("make", [shmserve.Client, shmserve.AsyncClient])
@pytest.mark.parametrize(("settings", "problem"), INVALID_SETTINGS, ids=lambda value: str(value)[:40])
def test_an_invalid_setting_is_refused(
    make: Callable[..., object], settings: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{re.escape(problem)}$"):
        make(runtime_dir=tmp_path, **settings)


@pytest.mark.parametrize("settings", VALID_SETTINGS, ids=lambda value: str(value)[:40])
def test_a_setting_at_its_bound_is_accepted(settings: dict[str, Any], tmp_path: Path) -> None:
    shmserve.Client(runtime_dir=tmp_path, **settings).close()
    asyncio.run(shmserve.AsyncClient(runtime_dir=tmp_path, **settings).close())


@pytest.mark.parametrize("timeout", [-1, NAN, "5"])
def test_calls_refuse_an_invalid_timeout_before_they_connect(timeout: Any, tmp_path: Path) -> None:
    problem = re.escape(f"timeout={timeout!r} must be a number of seconds, at least 0")
    for face in FACES.values():
        with face(f"unix://{tmp_path}/lane.sock") as client:
            for call, arguments in ((client.wait_ready, ()), (client.unload, ("m",))):
                with pytest.raises(InvalidRequest, match=problem):
                    call(*arguments, timeout=timeout)

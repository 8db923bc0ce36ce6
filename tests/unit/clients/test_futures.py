"""Futures of the client for threads: results, callbacks, and results without a reader."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.protocol.messages import Return
from shmserve.session.memory import FLUSH_BYTES
from tests.support.broker.fake_broker import FakeBroker

as_completed: Callable[..., Iterator[Any]] = concurrent.futures.as_completed
X = np.arange(4, dtype=np.float32)


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
    np.testing.assert_array_equal(future.result(20)["x"], X)
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
    for _ in range(2):
        with pytest.raises(shmserve.DeadlineExceeded):
            other.result()


def test_futures_of_the_standard_library_wait_for_them(client: shmserve.Client, broker: FakeBroker) -> None:
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
    asking.join(20)
    assert not asking.is_alive(), "giving it back has waited for the very thread that does so"
    client.flush()
    assert broker.wait_for(Return)
    assert broker.held_handles == []

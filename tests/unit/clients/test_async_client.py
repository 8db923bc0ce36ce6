"""Behaviour specific to the asyncio client: cancelled tasks, timers, and changing event loops."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest
import uvloop

import shmserve
from shmserve.protocol.messages import Bye, Cancel, Infer, Lease, LeaseEnd
from tests.support.broker.fake_broker import FakeBroker
from tests.support.clients.client_faces import FACES
from tests.support.patience import PATIENCE_S

assert FACES, "its import makes the pipe of uvloop before any test is watched"
X = np.arange(4, dtype=np.float32)
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    loop = request.param()
    yield loop.run_until_complete
    loop.close()


@pytest.fixture(params=["lane", "ipc"])
def url(request: pytest.FixtureRequest, broker: FakeBroker) -> str:
    return str(getattr(broker, request.param))


async def told(broker: FakeBroker, kind: type) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, broker.wait_for, kind)


def test_all_request_methods_have_the_same_arguments() -> None:
    def arguments(function: Callable[..., Any]) -> list[Any]:
        return [(one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()]

    expected = arguments(shmserve.Client.infer)
    for client in (shmserve.Client, shmserve.AsyncClient):
        assert arguments(client.infer) == arguments(client.submit) == expected
        assert [one for one in arguments(client.stream) if one[0] != "window"] == expected


def test_cancelling_a_task_cancels_its_request(run: Run, url: str, broker: FakeBroker) -> None:
    async def main() -> None:
        async with shmserve.AsyncClient(url) as client:
            await client.live()
            task = asyncio.ensure_future(client.infer("hold", {"x": X}))
            _, infer, _ = await asyncio.get_running_loop().run_in_executor(None, broker.parked.get)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await told(broker, Cancel)).request == infer.request
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.infer("hold", {"x": X}), 0.02)
            assert await told(broker, Cancel)
        await asyncio.get_running_loop().shutdown_default_executor()

    run(main())


def test_each_of_many_requests_has_its_own_deadline(run: Run, url: str) -> None:
    async def main() -> None:
        async with shmserve.AsyncClient(url) as client:
            late = [client.infer("hold", {"x": X}, timeout=timeout) for timeout in (0.05, 0.01, 0.03, 0.01)]
            found = await asyncio.gather(*late, return_exceptions=True)
            assert [type(error) for error in found] == [shmserve.DeadlineExceeded] * 4

    run(main())


def test_requests_of_one_turn_share_a_packet(run: Run, broker: FakeBroker) -> None:
    async def main() -> None:
        async with shmserve.AsyncClient(broker.lane) as client:
            await client.live()
            await asyncio.gather(*[client.infer("echo", {"x": X}) for _ in range(20)])

    run(main())
    counts = [sum(isinstance(message, Infer) for message in packet) for packet in broker.packets]
    assert [count for count in counts if count] == [20]


def test_a_packet_that_a_lease_leaves_unanswered_is_sent_again(run: Run, broker: FakeBroker) -> None:
    """Also if more requests wait for the lease, whose worker closed it at that moment."""
    theirs, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    async def main() -> None:
        async with shmserve.AsyncClient(broker.lane) as client:
            await client.live()
            (peer,) = broker.peers.values()
            lease = Lease(5, "echo", 1, rows=8, default=True, batch=8)
            broker.do(lambda: peer.send(lease, descriptors=(theirs.fileno(),)))
            await client.live()
            first = client.submit("echo", {"x": X})
            await asyncio.get_running_loop().sock_recv(worker, 1)
            second = client.submit("echo", {"x": X})
            await client.live()
            worker.close()
            await client.live()
            broker.do(lambda: peer.send(LeaseEnd(5)))
            results = await asyncio.wait_for(asyncio.gather(first, second), PATIENCE_S)
            assert [result["x"].tolist() for result in results] == [X.tolist()] * 2

    worker.setblocking(False)
    try:
        run(main())
    finally:
        theirs.close()
        worker.close()


def test_a_client_continues_in_a_new_loop_after_its_own_was_closed(url: str) -> None:
    client = shmserve.AsyncClient(url)

    async def main() -> Any:
        return (await client.infer("echo", {"x": X}))["x"].tolist()

    async def unanswered() -> Any:
        future = client.submit("hold", {"x": X})
        await main()
        return future

    assert asyncio.run(main()) == X.tolist()
    future = asyncio.run(unanswered())
    assert asyncio.run(main()) == X.tolist()
    with pytest.raises(shmserve.ConnectionLost, match="the event loop was closed before"):
        future.result()
    asyncio.run(client.close())


def test_two_loops_at_once_are_refused(url: str) -> None:
    client = shmserve.AsyncClient(url)
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    first.run_until_complete(client.live())
    with pytest.raises(RuntimeError, match="belongs to another event loop"):
        second.run_until_complete(client.live())
    first.run_until_complete(client.close())
    first.close()
    second.close()


def test_a_forked_child_connects_for_itself(url: str, broker: FakeBroker) -> None:
    loop = asyncio.new_event_loop()
    client = shmserve.AsyncClient(url)
    result = loop.run_until_complete(client.infer("echo", {"x": np.ones(10_000)}))

    async def again() -> None:
        found = await client.infer("echo", {"x": result["x"]})
        assert (found["x"] == 1).all()
        await client.close()

    pid = os.fork()
    if not pid:
        asyncio.set_event_loop(None)
        asyncio.new_event_loop().run_until_complete(again())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert broker.wait_for(Bye)
    assert len(broker.held_handles) == 1
    loop.run_until_complete(again())
    loop.close()


def test_closing_while_connecting(run: Run, broker: FakeBroker) -> None:
    async def main() -> None:
        client = shmserve.AsyncClient(broker.lane)
        await client.live()  # so that it tries for long
        broker.stop()
        future = client.submit("echo", {"x": X})
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(future), 0.02)
        await client.close()
        with pytest.raises(shmserve.Cancelled):
            await future

    run(main())


def test_results_are_released_without_the_garbage_collector(run: Run, broker: FakeBroker) -> None:
    async def main() -> None:
        async with shmserve.AsyncClient(broker.lane) as client:
            x = np.zeros(10_000)
            for _ in range(3):
                await client.infer("echo", {"x": x})
            await client.live()

    gc.disable()
    try:
        run(main())
        assert broker.wait_for(Bye)
        assert broker.held_handles == []
    finally:
        gc.enable()

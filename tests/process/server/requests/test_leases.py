"""A client that sends one request at a time is lent an instance. Results, errors and statistics are the same as through
the broker, whichever side ends the lease."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import operator
import os
import select
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

import shmserve
from shmserve.core.service.lending import ALONE
from shmserve.shm.lease_log import RECORDS
from shmserve.testing import Server
from tests.support.clients.client_faces import FACES
from tests.support.ensemble_models import config_text
from tests.support.living import pids, until
from tests.support.model_files import python_model, write_model
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.process

MORE = "max_batch_size: 8 dynamic_batching { }"
COMMANDS = """
command = x[0, 0]
if command == -1:
    raise ValueError("not today")
if command == -2:
    os.kill(os.getpid(), signal.SIGKILL)
if command == -3:
    while not os.path.exists("{flags}/go"):
        select.select([], [], [], 0.01)
"""
MODEL = COMMANDS + "return self.respond(x * 2)\n"
LARGE = "return self.respond(np.stack([x[:, 0], x.sum(axis=1)], axis=1))\n"
FAIL, DIE, STICK = -1.0, -2.0, -3.0


def inputs(first: float = 1.0, rows: int = 1, width: int = 2) -> dict[str, Any]:
    return {"x": np.full((rows, width), first, np.float32)}


class Leases:
    """`flags`: where the model waits for the file `go`."""

    def __init__(self, server: Server, flags: Path) -> None:
        self.server = server
        self.flags = flags

    def counts(self, model: str = "m", since: tuple[int, ...] = (0,) * 4) -> tuple[int, ...]:
        """Successful requests, rows, batches and failed requests."""
        with self.server.client() as client:
            (found,) = client.statistics(model)["model_stats"]
        stats = found["inference_stats"]
        rows, batches = found["inference_count"], found["execution_count"]
        counts = (stats["success"]["count"], rows, batches, stats["fail"]["count"])
        return tuple(map(operator.sub, counts, since))


@pytest.fixture(scope="module")
def leases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Leases]:
    repository, flags = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("flags")
    source = python_model(MODEL.format(flags=flags))
    write_model(repository, "m", config_text("python", "x:FP32:[2]", "y:FP32:[2]", MORE), source)
    write_model(repository, "large", config_text("python", "x:FP32:[-1]", "y:FP32:[2]", MORE), python_model(LARGE))
    write_model(repository, "identity", config_text("identity", "x:FP32:[2]", "y:FP32:[2]", MORE))
    with Server(repository, "--exit-timeout-secs", "5", gateway=True) as server:
        yield Leases(server, flags)
    assert "internal error" not in server.log.lower()


def link_of(client: Any) -> Any:
    """Private, as what is asked of it: nothing public shows whether a request went over a lease."""
    return getattr(client, "client", client)._link  # noqa: SLF001 - whether a lease exists is invisible


def models(client: Any) -> set[str]:
    return {model for model, _ in link_of(client).session._leased_models}  # noqa: SLF001 - whether a lease exists is invisible


def borrow(client: Any, model: str = "m", width: int = 2) -> int:
    for count in range(1, 4096):
        assert client.infer(model, inputs(width=width))["y"].tolist()[0][0] in (1.0, 2.0)
        if model in models(client):
            return count
    raise AssertionError("the client got no lease")


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_response_and_a_lane_packet_in_the_same_event_loop_iteration(
    leases: Leases, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Both arrive before the same iteration of the event loop, the packet first. The lease continues, and its socket is
    still watched."""

    def await_input(descriptor: int) -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(PATIENCE_S * 1000)

    async def main() -> None:
        async with shmserve.AsyncClient(leases.server.url) as client:
            for _ in range(4096):
                await client.infer("m", inputs())
                if "m" in models(client):
                    break
            link = link_of(client)
            lane, lease = link._link.descriptors()  # noqa: SLF001 - the descriptors of a lease are invisible
            answer = asyncio.ensure_future(client.infer("m", inputs(STICK)))
            await asyncio.sleep(0)
            link.flush()
            question = asyncio.ensure_future(client.live())
            await asyncio.sleep(0)
            link.flush()
            await_input(lane)
            (leases.flags / "go").touch()
            await_input(lease)
            await asyncio.gather(answer, question)
            assert "m" in models(client)
            await asyncio.wait_for(client.infer("m", inputs()), PATIENCE_S)

    loop = new_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
        (leases.flags / "go").unlink(missing_ok=True)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("model", ["m", "identity"])
def test_requests_over_a_lease_are_counted_like_all_others(leases: Leases, face: str, model: str) -> None:
    before = leases.counts(model)
    with FACES[face](leases.server.url) as client:
        sent = borrow(client, model)
        rows = 0
        for number in range(600):  # more than the log of a lease can hold
            size = 1 + number % 8
            result = client.infer(model, inputs(number + 1.0, size))["y"]
            factor = 2 if model == "m" else 1
            assert (result.shape, result[0, 0]) == ((size, 2), factor * (number + 1))
            rows += size
        assert model in models(client)
        assert leases.counts(model, before) == (sent + 600, sent + rows, sent + 600, 0)


WIDE = 50_000
"""Number of elements of an input of 200 KB."""


@pytest.mark.parametrize("face", FACES)
def test_inputs_in_shared_memory_are_sent_over_a_lease(leases: Leases, face: str) -> None:
    """Each input reuses the memory of the previous one; small inputs are in between. The log has room for all, even if
    the broker does not run meanwhile."""
    before, count = leases.counts("large"), RECORDS // 2
    with FACES[face](leases.server.url) as client:
        sent = borrow(client, "large", WIDE)
        for number in range(count):
            width = (WIDE, 2, WIDE // 2)[number % 3]
            result = client.infer("large", inputs(number + 1.0, 2, width))["y"]
            assert result.tolist() == [[number + 1, (number + 1) * width]] * 2
            assert "large" in models(client), "the lease has ended"
        assert link_of(client).session.memory.used == 0
        assert leases.counts("large", before) == (sent + count, sent + 2 * count, sent + count, 0)


def test_errors_and_crashes_of_a_leased_worker(leases: Leases) -> None:
    with leases.server.client() as client:
        borrow(client)
        before = leases.counts()
        with pytest.raises(shmserve.ModelFailed, match="not today"):
            client.infer("m", inputs(FAIL))
        assert "m" in models(client)
        with pytest.raises(shmserve.ModelFailed, match=r"ended while it ran this request alone \(signal SIGKILL"):
            client.infer("m", inputs(DIE))
        assert leases.counts(since=before)[3] == 2
        borrow(client)
        for pid in pids(client, "m").values():
            os.kill(pid, signal.SIGKILL)
        assert client.infer("m", inputs(3))["y"][0, 0] == 6
        assert leases.counts(since=before)[3] == 2
        borrow(client)


def test_clients_of_a_gateway_share_its_lease(leases: Leases) -> None:
    """Small inputs in JSON, then large ones in binary, whose bodies are received in shared memory."""
    callers = [http.client.HTTPConnection(leases.server.endpoints["http"]) for _ in range(2)]

    def ask(number: int, width: int = 2) -> None:
        caller = callers[number % 2]
        tensor = {"name": "x", "shape": [1, width], "datatype": "FP32", "parameters": {"binary_data_size": 4 * width}}
        head = json.dumps({"inputs": [tensor]}).encode()
        body = head + np.full(width, number, np.float32).tobytes()
        caller.request("POST", "/v2/models/large/infer", body, {"Inference-Header-Content-Length": str(len(head))})
        answer = caller.getresponse()
        found = json.loads(answer.read())
        assert answer.status == 200, found
        assert found["outputs"][0]["data"] == [number, number * width]

    def ask_often(first: int) -> None:
        for number in range(first, 200, 2):
            ask(number)

    with contextlib.ExitStack() as stack:
        for caller in callers:
            stack.enter_context(contextlib.closing(caller))
        observer = stack.enter_context(leases.server.client())
        until(observer, lambda: "\nshmserve_leases 0\n" in observer.metrics())  # those of earlier tests have ended
        before, sent = leases.counts("large"), 0
        for width in (2, WIDE):
            count = leased = 0
            while leased < 20:  # in a row: a request in a new segment goes to the broker
                leased = leased + 1 if "\nshmserve_leases 1\n" in observer.metrics() else 0
                ask(count, width)
                count += 1
                assert count < 4096, "the gateway got no lease, or lost it"
            observer.infer("large", inputs())  # this ends the lease
            until(observer, lambda: "\nshmserve_leases 0\n" in observer.metrics())
            sent += count + 1
        for number in range(ALONE):
            ask(number)
        for pid in pids(observer, "large").values():
            os.kill(pid, signal.SIGKILL)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(ask_often, range(2)))
        assert leases.counts("large", before)[0] == sent + ALONE + 200


def test_a_forked_child_has_no_lease(leases: Leases) -> None:
    with leases.server.client() as client:
        borrow(client)
        child = os.fork()
        if child == 0:
            ok = False
            try:
                ok = not models(client) and client.infer("m", inputs(5))["y"][0, 0] == 10
            finally:
                os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert client.infer("m", inputs(6))["y"][0, 0] == 12


# ------------------------------------------------------------------------------------ several requests in flight

CALLERS, EACH = 8, 150


def together(leases: Leases, ask: Callable[[shmserve.AsyncClient, int], Any]) -> None:
    """Runs CALLERS coroutines of one client, which each ask EACH times, and then until the client has a lease."""

    async def main() -> None:
        async with shmserve.AsyncClient(leases.server.url) as client:

            async def call(first: int) -> None:
                for number in range(first, 100_000 * CALLERS, CALLERS):
                    if number >= EACH * CALLERS and "m" in models(client):
                        return
                    await ask(client, number)
                raise AssertionError("the client got no lease")

            await asyncio.gather(*map(call, range(CALLERS)))

    asyncio.run(main())


async def ask_doubled(client: shmserve.AsyncClient, number: int, rows: int = 1) -> None:
    found = (await client.infer("m", inputs(number % 1000 + 3.0, rows)))["y"]
    assert found.tolist() == [[2 * (number % 1000 + 3.0)] * 2] * rows


def test_requests_in_flight_at_the_same_time_share_a_lease(leases: Leases) -> None:
    """Most are run in batches, and all are counted once."""
    before, sent = leases.counts(), []

    async def ask(client: shmserve.AsyncClient, number: int) -> None:
        sent.append(rows := 1 + number % 3)
        await ask_doubled(client, number, rows)

    together(leases, ask)
    success, rows, batches, failed = leases.counts(since=before)
    assert (success, rows, failed) == (len(sent), sum(sent), 0)
    assert batches < success


def test_a_worker_that_dies_with_a_batch_of_leased_requests_costs_only_the_one_that_killed_it(leases: Leases) -> None:
    failures: list[BaseException] = []
    sent = 0

    async def ask(client: shmserve.AsyncClient, number: int) -> None:
        nonlocal sent
        sent += 1
        if "m" not in models(client) or failures or number % CALLERS != 3:
            await ask_doubled(client, number)
            return
        try:
            await client.infer("m", inputs(DIE))
        except shmserve.ModelFailed as error:
            failures.append(error)

    before = leases.counts()
    together(leases, ask)
    (failure,) = failures
    assert "ended while it ran this request alone (signal SIGKILL" in str(failure)
    assert leases.counts(since=before)[0] == sent - 1


def test_a_lease_of_several_requests_ends_for_others(leases: Leases) -> None:
    """Both are answered, and requests that have waited for the lease are not lost."""

    async def ask(client: shmserve.AsyncClient, number: int) -> None:
        await ask_doubled(client, number)
        if "m" in models(client) and number % 50 == 0:
            with leases.server.client() as other:
                assert other.infer("m", inputs(7))["y"][0, 0] == 14

    together(leases, ask)

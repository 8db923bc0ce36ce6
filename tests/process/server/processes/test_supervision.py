"""Workers that crash or hang: only the request that is responsible fails, with the real signal in its error.

A restart rescues requests that are queued behind a hanging one, and an unload can be forced.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.errors import DeadlineExceeded, ModelFailed, Unavailable
from shmserve.testing import Server
from tests.support.ensemble_models import config_text
from tests.support.living import until
from tests.support.model_files import parameters, python_model, write_model
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.process

MODEL = python_model(
    """
    if (x == 13).any():
        print("thirteen is more than I can bear")
        os.kill(os.getpid(), signal.SIGSEGV)
    if (x == 99).any():
        threading.Event().wait()
    return self.respond(x * 2)
    """
)
BATCHES = "dynamic_batching { max_queue_delay_microseconds: 50000 preferred_batch_size: 16 }"
CONFIG = config_text("python", "x:FP32:[1]", "y:FP32:[1]", f"max_batch_size: 16 {BATCHES}")


def write(repository: Path, name: str, more: str = "", count: int = 1) -> Path:
    return write_model(repository, name, CONFIG + f"instance_group {{ count: {count} kind: KIND_CPU }} {more}", MODEL)


def write_models(repository: Path) -> None:
    write(repository, "frail")
    write(repository, "pair", count=2)
    write(repository, "slow", parameters(execution_limit_secs="0.5"))


@pytest.fixture
def server(server: Server) -> Iterator[Server]:
    """Waits for all workers at the end: the leak check of a later test would report a worker that restarts."""
    yield server
    with server.client() as client:
        ours = ("frail", "pair", "slow")
        until(client, lambda: all(is_complete(one) for one in client.models() if one["name"] in ours), "all are ready")


def is_complete(entry: dict[str, Any]) -> bool:
    return entry["state"] == "READY" and all(instance["state"] == "ready" for instance in entry["instances"])


def ask(client: shmserve.Client, name: str, values: list[int]) -> list[float | str]:
    """The answers to one batch: a number, or a code and a text."""
    futures = [client.submit(name, {"x": np.full((1, 1), value, np.float32)}) for value in values]
    found: list[float | str] = []
    for future in futures:
        try:
            found.append(float(future.result(PATIENCE_S)["y"][0, 0]))
        except shmserve.ServeError as error:
            found.append(f"{error.code}: {error}")
    return found


@pytest.mark.parametrize(("name", "link"), [("frail", "lane"), ("pair", "zmq")])
def test_only_the_crashing_request_fails(server: Server, name: str, link: str) -> None:
    with shmserve.Client(server.url if link == "lane" else server.zmq_url) as client:
        values = [1, 2, 3, 13, 5, 6, 7, 8]
        found = ask(client, name, values)
        culprit = found[3]
        assert [answer for answer in found if answer is not culprit] == [2.0 * value for value in values if value != 13]
        assert isinstance(culprit, str)
        assert culprit.startswith(f"MODEL_FAILED: model '{name}' version 1: the worker process of instance '{name}_0_")
        assert "signal SIGSEGV" in culprit
        assert client.infer(name, {"x": np.ones((1, 1), np.float32)})["y"] == 2


def test_a_worker_that_hangs_is_killed(client: shmserve.Client) -> None:
    first, hanging, last = ask(client, "slow", [1, 99, 2])
    assert (first, last) == (2.0, 4.0)
    assert "it has run one batch for more than 0.5 s" in str(hanging)


ONE = {"x": np.ones((1, 1), np.float32)}
REQUESTS = 20
HANGING = """
if os.path.exists("{flag}"):
    os.remove("{flag}")
    while True:
        pass
return self.respond(x)
"""
HANGING_CONFIG = config_text("python", "x:FP32:[1]", "y:FP32:[1]", "max_batch_size: 4 dynamic_batching { }")


class Hung:
    def __init__(self, server: Server, flag: Path) -> None:
        self.server = server
        self.flag = flag

    def hang(self, client: shmserve.Client) -> list[shmserve.Future]:
        """Submits requests: the first hangs, the others are queued."""
        self.flag.touch()
        first = client.submit("m", ONE)
        until(client, lambda: not self.flag.exists())
        futures = [first, *(client.submit("m", ONE) for _ in range(REQUESTS - 1))]
        until(client, lambda: self.counts(client) == (REQUESTS - 1, 1))
        return futures

    def counts(self, client: shmserve.Client) -> tuple[int, int]:
        (entry,) = client.models()
        return entry["queued"], entry["in_flight"]


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hung]:
    folder = tmp_path_factory.mktemp("hung")
    write_model(folder / "models", "m", HANGING_CONFIG, python_model(HANGING.format(flag=folder / "hang")))
    options = ("--model-control-mode", "explicit", "--load-model", "m", "--exit-timeout-secs", "1")
    with Server(folder / "models", *options) as server:
        yield Hung(server, folder / "hang")


def test_a_restart_rescues_queued_requests(hung: Hung) -> None:
    with hung.server.client() as client:
        first, *others = hung.hang(client)
        client.restart("m", instance="m_0_0")
        for future in others:
            assert future.result(PATIENCE_S)["y"] == 1
        text = r"restarted while it ran .* not finish within 1 s \(--exit-timeout-secs\)"
        with pytest.raises(ModelFailed, match=text):
            first.result(PATIENCE_S)
        until(client, lambda: len(client.models()[0]["instances"]) == 1)
        assert hung.counts(client) == (0, 0)


def test_an_unload_reports_what_it_waits_for_and_can_be_forced(hung: Hung) -> None:
    with hung.server.client() as client:
        futures = hung.hang(client)
        until(client, lambda: client.models()[0]["instances"][0]["busy_seconds"])
        pending = r"1 request\(s\) in flight and 19 queued, instance 'm_0_0' is busy .* unload --force m"
        with pytest.raises(DeadlineExceeded, match=pending):
            client.unload("m", timeout=0.1)
        client.unload("m", force=True)
        for future in futures:
            with pytest.raises(Unavailable, match="unloaded by force"):
                future.result(PATIENCE_S)
        client.load("m")
        assert client.infer("m", ONE)["y"] == 1

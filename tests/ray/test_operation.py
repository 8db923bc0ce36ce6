"""Operation of the application: rolling updates, models on demand, autoscaling."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.ray.cluster import kill_server
from tests.ray.load import WAYS, Load, over_handle, over_http, write_times
from tests.support.model_files import parameters
from tests.support.patience import CLUSTER_PATIENCE_S

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("ray")]
MODELS = 6


@pytest.fixture
def deployed(place: Any) -> Iterator[Any]:
    """A function that deploys the application with these arguments, until the test ends."""
    from ray import serve

    from shmserve.ray import app

    yield lambda **arguments: serve.run(app({"cpus": 0.1, **arguments}))
    serve.delete("default")


def test_a_rolling_update_loses_no_request(place: Any, deployed: Any, tmp_path: Path) -> None:
    for revision, factor in (("r1", 2.0), ("r2", 3.0)):
        write_times(tmp_path / revision, "twice", factor)
    models = str(tmp_path / "{revision}")
    deployed(models=models, revision="r1", replicas=2)
    with Load(place, factors=(2.0, 3.0)) as load:
        load.until_served_by(2)
        assert set(load.factors) == {2.0}
        deployed(models=models, revision="r2", replicas=2)
        of_first = load.factors[2.0]
        load.until_more(200)
        assert load.factors[2.0] <= of_first + 6, "only requests that were in flight are answered by the first revision"
    assert not load.failed


def test_models_on_demand_settle_on_their_replicas(place: Any, deployed: Any, tmp_path: Path) -> None:
    """Three replicas have memory for two models each. Six models are soon awake at the same time: none is started again
    in a round of requests. With more models, some must sleep."""
    for number in range(MODELS + 3):
        write_times(tmp_path, f"m{number}", number + 2.0, 0.0, parameters(memory_mb="60"))
    deployed(models=str(tmp_path), replicas=3, multiplexed=True, options="--model-memory-budget 150MiB")
    with over_http(place) as send:
        rounds: list[list[int]] = []
        until = time.monotonic() + CLUSTER_PATIENCE_S
        while len(rounds) < 2 or rounds[-1] != rounds[-2]:  # ingresses learn from each other's choices by reports
            assert time.monotonic() < until, f"the processes of the models changed in each round: {rounds}"
            answers = [send(f"m{number}", 5.0) for number in range(MODELS)]
            assert [value for value, _ in answers] == [5.0 * (number + 2) for number in range(MODELS)]
            rounds.append([pid for _, pid in answers])
        for number in range(MODELS + 3):
            assert send(f"m{number}", 7.0)[0] == 7.0 * (number + 2)
    with over_handle(place) as send:
        assert send("m1", 3.0)[0] == 9.0


def test_models_on_demand_are_loaded_again_after_a_crash(place: Any, deployed: Any, tmp_path: Path) -> None:
    """The restarted server has no models until a request needs one."""
    write_times(tmp_path, "twice")
    deployed(models=str(tmp_path), replicas=1, multiplexed=True)
    for way in WAYS.values():
        with way(place) as send:
            value, pid = send("twice", 1.0)
            assert value == 2.0
            kill_server(pid)
            value, other = send("twice", 2.0)
            assert value == 4.0
            assert other != pid


def test_a_growing_queue_adds_a_replica(place: Any, deployed: Any, tmp_path: Path) -> None:
    """One instance that takes 50 ms per request, and six callers that wait for it."""
    write_times(tmp_path, "slow", 2.0, 0.05)
    faster = {"upscale_delay_s": 1.0, "look_back_period_s": 4.0}
    deployed(models=str(tmp_path), replicas=1, max_replicas=2, queue_ms=20, autoscaling=faster)
    pids: set[int] = set()
    enough, errors = threading.Event(), []

    def call() -> None:
        try:
            with over_handle(place) as send:
                while not enough.is_set():
                    pids.add(send("slow", 1.0)[1])
                    if len(pids) == 2:
                        enough.set()
        except BaseException as error:
            errors.append(error)
            enough.set()

    with ExitStack() as stack:
        for _ in range(6):
            caller = threading.Thread(target=call)
            caller.start()
            stack.callback(caller.join)
        stack.callback(enough.set)
        assert enough.wait(CLUSTER_PATIENCE_S), "no second replica has answered"
    assert not errors

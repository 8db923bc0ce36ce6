"""Models that go to sleep when they are idle: their processes end, and start again for a request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shmserve
from tests.support.living import ONE, answer, generation, identity, renew, until
from tests.support.model_files import parameters
from tests.support.shared_server import SharedServer

pytestmark = pytest.mark.process

SLEEPS = parameters(idle_unload_secs="0.05")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    identity(root, "plain", SLEEPS)
    generation(root, "sleeper", 1, SLEEPS)
    return root


@pytest.fixture
def client(shared_server: SharedServer, models: Path) -> Iterator[shmserve.Client]:
    with shared_server.serving(models) as server, server.client() as made:
        yield made


def entry(client: shmserve.Client, name: str) -> dict[str, Any]:
    (found,) = (entry for entry in client.models() if entry["name"] == name)
    return found


def fall_asleep(client: shmserve.Client, name: str) -> None:
    """Waits until all processes of the model have ended."""
    until(client, lambda: all(one["state"] == "asleep" for one in entry(client, name)["instances"]))


def test_a_request_wakes_a_sleeping_model(client: shmserve.Client) -> None:
    fall_asleep(client, "plain")
    found = entry(client, "plain")
    assert (found["state"], found["asleep"], found["degraded"], found["reason"]) == ("READY", True, False, "")
    assert found["instances"][0]["pid"] == 0
    assert client.ready("plain")
    assert client.metadata("plain")["inputs"][0]["name"] == "x"
    assert entry(client, "plain")["asleep"], "questions do not wake it"
    before = client.statistics("plain")["model_stats"][0]["inference_count"]
    assert (client.infer("plain", {"x": ONE})["y"] == ONE).all()
    assert client.statistics("plain")["model_stats"][0]["inference_count"] == before + 1


def test_a_woken_model_has_the_generation_that_was_loaded(client: shmserve.Client, models: Path) -> None:
    """Not the repository's current state."""
    assert answer(client, "sleeper") == 1
    fall_asleep(client, "sleeper")
    renew(models / "sleeper", 2)
    assert answer(client, "sleeper") == 1
    fall_asleep(client, "sleeper")
    client.load("sleeper")
    assert answer(client, "sleeper") == 2
    fall_asleep(client, "sleeper")
    client.unload("sleeper")
    assert entry(client, "sleeper")["state"] != "READY"
    client.load("sleeper")
    assert answer(client, "sleeper") == 2

"""Models that go to sleep when they are idle: their processes end, and start again for a request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shmserve
from tests.support.living import answer, generation, renew, until
from tests.support.model_files import parameters
from tests.support.shared_server import SharedServer

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    generation(root, "sleeper", 1, parameters(idle_unload_secs="0.05"))
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


def test_a_request_wakes_a_sleeping_model_as_it_was_loaded(client: shmserve.Client, models: Path) -> None:
    """Not as the repository has it now."""
    assert answer(client, "sleeper") == 1
    fall_asleep(client, "sleeper")
    found = entry(client, "sleeper")
    assert (found["state"], found["asleep"], found["degraded"], found["reason"]) == ("READY", True, False, "")
    assert found["instances"][0]["pid"] == 0
    assert client.ready("sleeper")
    assert client.metadata("sleeper")["inputs"][0]["name"] == "x"
    assert entry(client, "sleeper")["asleep"], "questions do not wake it"
    renew(models / "sleeper", 2)
    assert answer(client, "sleeper") == 1
    assert client.statistics("sleeper")["model_stats"][0]["inference_count"] == 2
    fall_asleep(client, "sleeper")
    client.load("sleeper")
    assert answer(client, "sleeper") == 2
    fall_asleep(client, "sleeper")
    client.unload("sleeper")
    assert entry(client, "sleeper")["state"] != "READY"
    client.load("sleeper")
    assert answer(client, "sleeper") == 2

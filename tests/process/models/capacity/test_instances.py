"""Instances of models: passive ones, numbers that follow the load, and models that sleep."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import shmserve
from shmserve.testing import Server
from tests.support import living
from tests.support.living import ONE, PYTHON, answer, generation, group, index, pids, renew, until
from tests.support.model_files import parameters, python_model, write_model
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.process

SOURCE = python_model("return self.respond(np.ones_like(x) * os.getpid())")


def instances(client: shmserve.Client, model: str) -> dict[str, dict[str, object]]:
    (entry,) = index(client, model).values()
    return {instance["name"]: instance for instance in entry["instances"]}


def responding_pids(client: shmserve.Client, model: str) -> set[float]:
    """The pids that respond to many concurrent requests."""
    futures = [client.submit(model, {"x": living.ONE}) for _ in range(40)]
    return {future.result(PATIENCE_S)["y"][0, 0].item() for future in futures}


def test_passive_instances(root: Path, client: shmserve.Client) -> None:
    """Passive instances are loaded but get no requests. Changing the setting does not restart them."""
    config = 'instance_group [ {{ name: "works" kind: KIND_CPU }}, {{ name: "waits" kind: KIND_CPU {} }} ]\n'
    write_model(root, "two", living.PYTHON + config.format("passive: true"), SOURCE)
    client.load("two")
    found = instances(client, "two")
    assert {name: (entry["passive"], entry["state"]) for name, entry in found.items()} == {
        "works_0": (False, "ready"),
        "waits_0": (True, "ready"),
    }
    assert responding_pids(client, "two") == {found["works_0"]["pid"]}
    living.write(root / "two" / "config.pbtxt", living.PYTHON + config.format(""))
    client.load("two")
    after = instances(client, "two")
    assert after["works_0"]["pid"] == found["works_0"]["pid"]
    assert after["waits_0"]["passive"] is False
    assert responding_pids(client, "two") == {entry["pid"] for entry in after.values()}
    living.identity(root, "idle", "instance_group [ { kind: KIND_CPU passive: true } ]\n")
    client.load("idle")
    assert not client.ready("idle")
    with pytest.raises(shmserve.DeadlineExceeded):
        client.infer("idle", {"x": living.ONE}, timeout=0.1)


WAITS = """
os.read(self.gate, 1)
return self.respond(x)
"""


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[int]:
    os.mkfifo(tmp_path / "gate")
    descriptor = os.open(tmp_path / "gate", os.O_RDWR)
    yield descriptor
    os.close(descriptor)


def test_instances_follow_the_queue_up_and_down(
    server: Server, root: Path, client: shmserve.Client, tmp_path: Path, gate: int
) -> None:
    """The processes of what the simulator and the scenarios decide."""
    given = parameters(max_instances="3", scale_up_queue_ms="5", scale_down_secs="0.3")
    source = python_model(WAITS, f"self.gate = os.open({str(tmp_path / 'gate')!r}, os.O_RDWR)")
    write_model(root, "scaled", PYTHON + group(1) + given, source)

    def await_size(count: int) -> dict[str, int]:
        """Waits until this many processes exist and all others have ended. Returns the pids of the instances."""

        def found() -> list[str]:
            return [one["state"] for one in index(client, "scaled")["scaled/1"]["instances"]]

        until(client, lambda: found() == ["ready"] * count)
        return pids(client, "scaled")

    def scales() -> dict[str, int]:
        lines = re.findall(r"\nshmserve_model_scale_total\{(.*)\} (\d+)", client.metrics())
        return {re.sub(r'.*direction="(\w+)".*', r"\1", labels): int(n) for labels, n in lines if '"scaled"' in labels}

    client.load("scaled")
    for _ in range(2):
        (first,) = await_size(1).items()
        futures = [client.submit("scaled", {"x": ONE}) for _ in range(20)]
        there = await_size(3)
        assert sorted(there) == ["1 scaled_0_0", "1 scaled_0_1", "1 scaled_0_2"]
        assert first in there.items(), "the first one was not restarted"
        assert index(client, "scaled")["scaled/1"]["scaled"] == [1, 3]
        os.write(gate, b"." * len(futures))
        assert all((future.result()["y"] == ONE).all() for future in futures)
    await_size(1)
    assert scales() == {"up": 4, "down": 4}
    assert "gets one more instance, 'scaled_0_2' (3 of at most 3): requests waited" in server.log
    text = "needs one instance less, so 'scaled_0_2' leaves (2 remain, of at least 1): fewer were enough for"
    assert text in server.log


def fall_asleep(client: shmserve.Client, name: str) -> None:
    """Waits until all processes of the model have ended."""
    until(client, lambda: all(one["state"] == "asleep" for one in index(client)[f"{name}/1"]["instances"]))


def test_a_request_wakes_a_sleeping_model_as_it_was_loaded(root: Path, client: shmserve.Client) -> None:
    """Not as the repository has it now."""
    folder = generation(root, "sleeper", 1, parameters(idle_unload_secs="0.05"))
    client.load("sleeper")
    assert answer(client, "sleeper") == 1
    fall_asleep(client, "sleeper")
    found = index(client)["sleeper/1"]
    assert (found["state"], found["asleep"], found["degraded"], found["reason"]) == ("READY", True, False, "")
    assert found["instances"][0]["pid"] == 0
    assert client.ready("sleeper")
    assert client.metadata("sleeper")["inputs"][0]["name"] == "x"
    assert index(client)["sleeper/1"]["asleep"], "questions do not wake it"
    renew(folder, 2)
    assert answer(client, "sleeper") == 1
    assert client.statistics("sleeper")["model_stats"][0]["inference_count"] == 2
    fall_asleep(client, "sleeper")
    client.load("sleeper")
    assert answer(client, "sleeper") == 2
    fall_asleep(client, "sleeper")
    client.unload("sleeper")
    assert not client.ready("sleeper")
    client.load("sleeper")
    assert answer(client, "sleeper") == 2

"""The instances of a model: which of them serve, and the cores on which they run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import shmserve
from shmserve.testing import Server
from tests.support import living
from tests.support.living import identity, index
from tests.support.model_files import python_model

pytestmark = pytest.mark.process

OURS = sorted(os.sched_getaffinity(0))
SOURCE = python_model("return self.respond(np.ones_like(x) * os.getpid())")
OPTIONS = ("--host-policy", f"first,cpu-cores={OURS[0]}", "--host-policy", f"last,cpu-cores={OURS[-1]}")


def write_model(root: Path, name: str, config: str = "") -> Path:
    """A model that responds with its pid."""
    folder = identity(root, name)
    configure(folder, config)
    living.write(folder / "1" / "model.py", SOURCE)
    return folder


def configure(folder: Path, config: str) -> None:
    living.write(folder / "config.pbtxt", living.PYTHON + config)


def instances(client: shmserve.Client, model: str) -> dict[str, dict[str, object]]:
    (entry,) = index(client, model).values()
    return {instance["name"]: instance for instance in entry["instances"]}


def responding_pids(client: shmserve.Client, model: str) -> set[float]:
    """The pids that respond to many concurrent requests."""
    futures = [client.submit(model, {"x": living.ONE}) for _ in range(40)]
    return {future.result(living.PATIENCE_S)["y"][0, 0].item() for future in futures}


def test_passive_instances(root: Path, client: shmserve.Client) -> None:
    """Passive instances are loaded but get no requests. Changing the setting does not restart them."""
    config = 'instance_group [ {{ name: "works" kind: KIND_CPU }}, {{ name: "waits" kind: KIND_CPU {} }} ]\n'
    folder = write_model(root, "two", config.format("passive: true"))
    client.load("two")
    found = instances(client, "two")
    assert {name: (entry["passive"], entry["state"]) for name, entry in found.items()} == {
        "works_0": (False, "ready"),
        "waits_0": (True, "ready"),
    }
    assert responding_pids(client, "two") == {found["works_0"]["pid"]}
    configure(folder, config.format(""))
    client.load("two")
    after = instances(client, "two")
    assert after["works_0"]["pid"] == found["works_0"]["pid"]
    assert after["waits_0"]["passive"] is False
    assert responding_pids(client, "two") == {entry["pid"] for entry in after.values()}
    write_model(root, "idle", "instance_group [ { kind: KIND_CPU passive: true } ]\n")
    client.load("idle")
    assert not client.ready("idle")
    with pytest.raises(shmserve.DeadlineExceeded):
        client.infer("idle", {"x": living.ONE}, timeout=0.1)


def test_host_policies(server: Server, root: Path, client: shmserve.Client) -> None:
    group = 'instance_group [ {{ kind: KIND_CPU host_policy: "{}" }} ]\n'
    policies = {"first": [OURS[0]], "last": [OURS[-1]], "unknown": OURS}
    for name, cores in policies.items():
        write_model(root, name, group.format(name))
        warnings = client.load(name)["warnings"]
        assert any("unknown host policy 'unknown'" in text for text in warnings) is (name == "unknown")
        assert all(found == cores for found in cores_of(instances(client, name)[f"{name}_0_0"]["pid"]))
    write_model(root, "free")
    client.load("free")
    assert all(found == OURS for found in cores_of(instances(client, "free")["free_0_0"]["pid"]))
    if len(OURS) > 1:
        configure(root / "first", group.format("last"))
        client.load("first")
        assert all(found == [OURS[-1]] for found in cores_of(instances(client, "first")["first_0_0"]["pid"]))
    assert server.log.count("unknown host policy 'unknown'") == 1


def cores_of(pid: object) -> list[list[int]]:
    """The cores of each thread of a process."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/status"):
        text = next(line for line in path.read_text().splitlines() if line.startswith("Cpus_allowed_list:"))
        ranges = [part.split("-") for part in text.split()[1].split(",")]
        found.append([core for part in ranges for core in range(int(part[0]), int(part[-1]) + 1)])
    assert found
    return found

"""Passive instances, and the cores of a host policy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import shmserve
from shmserve.testing import Server
from tests.support import living
from tests.support.living import index
from tests.support.model_files import python_model, write_model

pytestmark = pytest.mark.process

OURS = sorted(os.sched_getaffinity(0))
SOURCE = python_model("return self.respond(np.ones_like(x) * os.getpid())")
OPTIONS = ("--host-policy", f"last,cpu-cores={OURS[-1]}")


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


def test_host_policies(server: Server, root: Path, client: shmserve.Client) -> None:
    for name, cores in {"last": [OURS[-1]], "unknown": OURS}.items():
        living.identity(root, name, f'instance_group [ {{ kind: KIND_CPU host_policy: "{name}" }} ]\n')
        warnings = client.load(name)["warnings"]
        assert any("unknown host policy 'unknown'" in text for text in warnings) is (name == "unknown")
        pid = instances(client, name)[f"{name}_0_0"]["pid"]
        assert isinstance(pid, int)
        assert sorted(os.sched_getaffinity(pid)) == cores
    assert server.log.count("unknown host policy 'unknown'") == 1

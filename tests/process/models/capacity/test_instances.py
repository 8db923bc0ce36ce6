"""The instances of a model: load order, which instances serve, and the cores on which they run."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

import shmserve
from shmserve.testing import Server
from tests.support import living
from tests.support.living import answer, identity, index, states, until
from tests.support.model_files import parameters, python_model

pytestmark = pytest.mark.process

OURS = sorted(os.sched_getaffinity(0))
JOURNAL = python_model(
    "return self.respond(np.ones_like(x) * os.getpid())",
    """
    paths = {key: entry["string_value"] for key, entry in json.loads(args["model_config"])["parameters"].items()}
    name = args["model_instance_name"] + "." + args["model_version"]
    with open(paths["journal"], "a", buffering=1) as journal:
        journal.write(f"begin {name}\\n")
        if "gate" in paths:
            open(paths["gate"]).read()
        journal.write(f"end {name}\\n")
    """,
)
OPTIONS = ("--host-policy", f"first,cpu-cores={OURS[0]}", "--host-policy", f"last,cpu-cores={OURS[-1]}")


def write_journaling(root: Path, name: str, config: str = "", *versions: int, gate: bool = False) -> Path:
    """A model that responds with its pid. With a gate, each instance keeps loading until its gate is opened."""
    folder = identity(root, name, config, *versions)
    if gate:
        os.mkfifo(gate_of(root, name))
    configure(folder, config)
    for version in versions or (1,):
        living.write(folder / str(version) / "model.py", JOURNAL)
    return folder


def configure(folder: Path, config: str) -> None:
    """Paths are passed as parameters, because a model is loaded from a copy of its folder."""
    root = folder.parent
    paths = {"journal": str(root.parent / "journal")}
    if gate_of(root, folder.name).exists():
        paths["gate"] = str(gate_of(root, folder.name))
    living.write(folder / "config.pbtxt", living.PYTHON + config + parameters(**paths))


def gate_of(root: Path, name: str) -> Path:
    return root.parent / f"{name}.gate"


def journal(root: Path) -> list[str]:
    path = root.parent / "journal"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def turns(root: Path) -> list[str]:
    """The instances in load order. Fails if two have loaded at the same time."""
    lines = journal(root)
    names = [line.removeprefix("begin ") for line in lines[::2]]
    assert lines == [line for name in names for line in (f"begin {name}", f"end {name}")]
    return names


def open_gate(gate: Path) -> None:
    """Waits until an instance is at the gate, and opens the gate."""
    os.close(os.open(gate, os.O_WRONLY))


# ------------------------------------------------------------------------------------------------ one at a time


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """The repository of a server that a test starts itself."""
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def test_instances_load_one_at_a_time(empty: Path) -> None:
    """In the order of --load-model, then in the order of the load calls."""
    for name in ("c", "a", "b"):
        write_journaling(empty, name, living.group(2))
    write_journaling(empty, "later", living.policy("all { }"), 1, 3, 2)
    write_journaling(empty, "first", gate=True)
    options = ["--model-control-mode", "explicit", "--model-load-thread-count", "1"]
    chosen = [option for name in ("b", "c", "a") for option in ("--load-model", name)]
    with Server(empty, *options, *chosen) as server, server.client() as client:
        assert [name.split("_")[0] for name in turns(empty)] == ["b", "b", "c", "c", "a", "a"]
        threads = [threading.Thread(target=_load, args=(server, name)) for name in ("first", "later")]
        threads[0].start()
        until(client, lambda: journal(empty)[-1] == "begin first_0_0.1")
        threads[1].start()
        until(client, lambda: states(client, "later") == dict.fromkeys("123", "LOADING"))
        waiting = [instance for entry in index(client, "later").values() for instance in entry["instances"]]
        assert {instance["pid"] for instance in waiting} == {0}, "these instances wait"
        assert answer(client, "a") > 0, "loaded models are served meanwhile"
        client.unload("c")
        open_gate(gate_of(empty, "first"))
        for thread in threads:
            thread.join(living.PATIENCE_S)
        assert turns(empty)[6:] == ["first_0_0.1", "later_0_0.1", "later_0_0.2", "later_0_0.3"]
        assert states(client, "later") == dict.fromkeys("123", "READY")


def _load(server: Server, name: str) -> None:
    with server.client() as client:
        client.load(name)


# ------------------------------------------------------------------------------------------------ which, and where


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
    folder = write_journaling(root, "two", config.format("passive: true"))
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
    write_journaling(root, "idle", "instance_group [ { kind: KIND_CPU passive: true } ]\n")
    client.load("idle")
    assert not client.ready("idle")
    with pytest.raises(shmserve.DeadlineExceeded):
        client.infer("idle", {"x": living.ONE}, timeout=0.1)


def test_host_policies(server: Server, root: Path, client: shmserve.Client) -> None:
    group = 'instance_group [ {{ kind: KIND_CPU host_policy: "{}" }} ]\n'
    policies = {"first": [OURS[0]], "last": [OURS[-1]], "unknown": OURS}
    for name, cores in policies.items():
        write_journaling(root, name, group.format(name))
        warnings = client.load(name)["warnings"]
        assert any("unknown host policy 'unknown'" in text for text in warnings) is (name == "unknown")
        assert all(found == cores for found in cores_of(instances(client, name)[f"{name}_0_0"]["pid"]))
    write_journaling(root, "free")
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

"""The processes of a model: in what order they load, which of them serve, and on which cores they run.

The oracles are files that models write while they load, and /proc.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import shmserve
from shmserve.testing import Server
from tests.support import living
from tests.support.living import answer, identity, index, states, until

pytestmark = pytest.mark.process

OURS = sorted(os.sched_getaffinity(0))
JOURNAL = """
import json
import os
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.paths = json.loads(args["model_config"])["parameters"]
        name = args["model_instance_name"] + "." + args["model_version"]
        self.note("begin " + name)
        if "gate" in self.paths:
            with open(self.paths["gate"]["string_value"]) as file:
                file.read()
        self.note("end " + name)

    def note(self, text):
        with open(self.paths["journal"]["string_value"], "a") as file:
            file.write(text + "\\n")

    def execute(self, requests):
        ones = [np.ones_like(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()) for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", one * os.getpid())]) for one in ones]
"""


def journalist(root: Path, name: str, config: str = "", *versions: int, gate: bool = False) -> Path:
    """A model that answers with its pid. With a gate, an instance loads until the gate has been opened and closed."""
    folder = identity(root, name, config, *versions)
    if gate:
        os.mkfifo(gate_of(root, name))
    configure(folder, config)
    for version in versions or (1,):
        living.write(folder / str(version) / "model.py", JOURNAL)
    return folder


def configure(folder: Path, config: str) -> None:
    """Paths are parameters: what the model loads from is a copy of its folder, wherever the server keeps that."""
    root = folder.parent
    paths = {"journal": root.parent / "journal", "gate": gate_of(root, folder.name)}
    for key, path in paths.items():
        if key == "journal" or path.exists():
            config += f'parameters {{ key: "{key}" value: {{ string_value: "{path}" }} }}\n'
    living.write(folder / "config.pbtxt", living.PYTHON + config)


def gate_of(root: Path, name: str) -> Path:
    return root.parent / f"{name}.gate"


def journal(root: Path) -> list[str]:
    path = root.parent / "journal"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def turns(root: Path) -> list[str]:
    """Who has loaded, one after the other; fails if two did at the same time."""
    lines = journal(root)
    names = [line.removeprefix("begin ") for line in lines[::2]]
    assert lines == [line for name in names for line in (f"begin {name}", f"end {name}")]
    return names


def opened(gate: Path) -> None:
    """Waits until an instance stands before the gate, and lets it pass."""
    os.close(os.open(gate, os.O_WRONLY))


# ------------------------------------------------------------------------------------------------ one at a time


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def test_one_at_a_time(root: Path) -> None:
    """As they are named at the start, then as they are asked for, and never two at once."""
    for name in ("c", "a", "b"):
        journalist(root, name, living.group(2))
    journalist(root, "later", living.policy("all { }"), 1, 3, 2)
    journalist(root, "first", gate=True)
    options = ["--model-control-mode", "explicit", "--model-load-thread-count", "1"]
    chosen = [option for name in ("b", "c", "a") for option in ("--load-model", name)]
    with Server(root, *options, *chosen) as server, server.client() as client:
        assert [name.split("_")[0] for name in turns(root)] == ["b", "b", "c", "c", "a", "a"]
        threads = [threading.Thread(target=_load, args=(server, name)) for name in ("first", "later")]
        threads[0].start()
        until(client, lambda: journal(root)[-1] == "begin first_0_0.1")
        threads[1].start()
        until(client, lambda: states(client, "later") == dict.fromkeys("123", "LOADING"))
        waiting = [instance for entry in index(client, "later").values() for instance in entry["instances"]]
        assert {instance["pid"] for instance in waiting} == {0}, "they wait for their turn"
        assert answer(client, "a") > 0, "the others are served meanwhile"
        client.unload("c")
        opened(gate_of(root, "first"))
        for thread in threads:
            thread.join(living.PATIENCE_S)
        assert turns(root)[6:] == ["first_0_0.1", "later_0_0.1", "later_0_0.2", "later_0_0.3"]
        assert states(client, "later") == dict.fromkeys("123", "READY")


def _load(server: Server, name: str) -> None:
    with server.client() as client:
        client.load(name)


def test_several_at_a_time(root: Path) -> None:
    """Each waits until the others have begun, which they can only do together."""
    names = ["a", "b", "c"]
    for name in names:
        journalist(root, name, gate=True)
    journalist(root, "d")
    options = ["--model-control-mode", "explicit", "--model-load-thread-count", "3"]
    with Server(root, *options) as server, server.client() as client:
        threads = [threading.Thread(target=_load, args=(server, name)) for name in names]
        for thread in threads:
            thread.start()
        ends = [os.open(gate_of(root, name), os.O_WRONLY) for name in names]
        fourth = threading.Thread(target=_load, args=(server, "d"))
        fourth.start()
        until(client, lambda: states(client, "d") == {"1": "LOADING"})
        assert sorted(journal(root)) == [f"begin {name}_0_0.1" for name in names]
        for end in ends:
            os.close(end)
        for thread in (*threads, fourth):
            thread.join(living.PATIENCE_S)
        assert {entry["state"] for entry in client.models()} == {"READY"}


# ------------------------------------------------------------------------------------------------ which, and where


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    root = tmp_path_factory.mktemp("instances") / "models"
    root.mkdir()
    options = ["--host-policy", f"first,cpu-cores={OURS[0]}", "--host-policy", f"last,cpu-cores={OURS[-1]}"]
    with Server(root, "--model-control-mode", "explicit", *options) as server:
        yield server, root


@pytest.fixture
def client(running: tuple[Server, Path]) -> Iterator[shmserve.Client]:
    with running[0].client() as made:
        yield made
        for name in {entry["name"] for entry in made.models() if entry["state"]}:
            made.unload(name)


def instances(client: shmserve.Client, model: str) -> dict[str, dict[str, object]]:
    (entry,) = index(client, model).values()
    return {instance["name"]: instance for instance in entry["instances"]}


def asked(client: shmserve.Client, model: str) -> set[float]:
    """The pids that answer, when many ask at the same time."""
    futures = [client.submit(model, {"x": living.ONE}) for _ in range(40)]
    return {future.result(living.PATIENCE_S)["y"][0, 0].item() for future in futures}


def test_passive_instances(running: tuple[Server, Path], client: shmserve.Client) -> None:
    """They are loaded, and not asked; with another configuration they are, and are not started again for it..."""
    _, root = running
    config = 'instance_group [ {{ name: "works" kind: KIND_CPU }}, {{ name: "waits" kind: KIND_CPU {} }} ]\n'
    folder = journalist(root, "two", config.format("passive: true"))
    client.load("two")
    found = instances(client, "two")
    assert {name: (entry["passive"], entry["state"]) for name, entry in found.items()} == {
        "works_0": (False, "ready"),
        "waits_0": (True, "ready"),
    }
    assert asked(client, "two") == {found["works_0"]["pid"]}
    configure(folder, config.format(""))
    client.load("two")
    after = instances(client, "two")
    assert after["works_0"]["pid"] == found["works_0"]["pid"]
    assert after["waits_0"]["passive"] is False
    assert asked(client, "two") == {entry["pid"] for entry in after.values()}


def test_a_model_that_only_waits(running: tuple[Server, Path], client: shmserve.Client) -> None:
    _, root = running
    journalist(root, "idle", "instance_group [ { kind: KIND_CPU passive: true } ]\n")
    (warning,) = client.load("idle")["warnings"]
    assert warning.endswith("instance_group: all its instances are passive: it cannot process requests")
    assert instances(client, "idle")["idle_0_0"]["state"] == "ready"
    assert not client.ready("idle")
    with pytest.raises(shmserve.DeadlineExceeded):
        client.infer("idle", {"x": living.ONE}, timeout=0.1)


def test_kinds_and_counts_that_were_not_given(running: tuple[Server, Path], client: shmserve.Client) -> None:
    _, root = running
    for name, config, expected in (
        ("none", "", {"none_0_0": "KIND_CPU"}),
        ("auto", "instance_group [ { kind: KIND_AUTO } ]\n", {"auto_0_0": "KIND_CPU"}),
        ("counted", "instance_group [ { count: 2 } ]\n", {"counted_0_0": "KIND_CPU", "counted_0_1": "KIND_CPU"}),
        ("model", "instance_group [ { kind: KIND_MODEL } ]\n", {"model_0_0": "KIND_MODEL"}),
    ):
        folder = journalist(root, name, config)
        client.load(name)
        assert {entry["name"]: entry["kind"] for entry in instances(client, name).values()} == expected
        (written,) = client.config(name)["instance_group"]
        assert written["count"] == len(expected)
        assert written["kind"] == expected[f"{name}_0_0"]
        assert folder.exists()


def test_a_gpu_that_is_not_there(running: tuple[Server, Path], client: shmserve.Client) -> None:
    _, root = running
    journalist(root, "gpu", "instance_group [ { kind: KIND_GPU } ]\n")
    with pytest.raises(shmserve.InvalidRequest, match=r"config\.pbtxt:\d+:\d+: instance_group\[0\]\.kind.*KIND_GPU"):
        client.load("gpu")


def test_host_policies(running: tuple[Server, Path], client: shmserve.Client) -> None:
    server, root = running
    group = 'instance_group [ {{ kind: KIND_CPU host_policy: "{}" }} ]\n'
    policies = {"first": [OURS[0]], "last": [OURS[-1]], "unknown": OURS}
    for name, cores in policies.items():
        journalist(root, name, group.format(name))
        warnings = client.load(name)["warnings"]
        assert any("unknown host policy 'unknown'" in text for text in warnings) is (name == "unknown")
        assert all(found == cores for found in cores_of(instances(client, name)[f"{name}_0_0"]["pid"]))
    journalist(root, "free")
    client.load("free")
    assert all(found == OURS for found in cores_of(instances(client, "free")["free_0_0"]["pid"]))
    if len(OURS) > 1:
        configure(root / "first", group.format("last"))
        client.load("first")
        assert all(found == [OURS[-1]] for found in cores_of(instances(client, "first")["first_0_0"]["pid"]))
    assert server.log.count("unknown host policy 'unknown'") == 1


def cores_of(pid: object) -> list[list[int]]:
    """Of each thread of the process: the kernel's list, read."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/status"):
        text = next(line for line in path.read_text().splitlines() if line.startswith("Cpus_allowed_list:"))
        ranges = [part.split("-") for part in text.split()[1].split(",")]
        found.append([core for part in ranges for core in range(int(part[0]), int(part[-1]) + 1)])
    assert found
    return found

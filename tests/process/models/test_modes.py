"""Which models are served: none, poll and explicit. The oracles are the files and the numbers in the answers."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shmserve
from shmserve.testing import Server
from tests.support import living
from tests.support.living import answer, generation, group, identity, index, pids, policy, ready, states, until
from tests.support.workers.worker_models import Graph

pytestmark = pytest.mark.process

REFUSED = "explicit model load / unload is not allowed if polling is enabled"
BROKEN = living.IDENTITY.replace("max_batch", "max_bach")

# ------------------------------------------------------------------------------------------------ none


def test_none(tmp_path: Path) -> None:
    identity(tmp_path, "m")
    with Server(tmp_path) as server, server.client() as client:
        before = pids(client, "m")
        for operation in (client.load, client.unload):
            with pytest.raises(shmserve.Unavailable, match=REFUSED):
                operation("m")
        with pytest.raises(shmserve.Unavailable, match=REFUSED):
            client.load("m", config={"backend": "identity"}, files={"1/large": bytes(3_000_000)})
        identity(tmp_path, "late")
        living.write(tmp_path / "m" / "config.pbtxt", BROKEN)
        assert index(client).keys() == {"m/1"}, "what changes on disk is not seen"
        assert pids(client, "m") == before
        client.restart("m")
        assert pids(client, "m").keys() == before.keys()
        assert pids(client, "m") != before
        assert client.ready()


# ------------------------------------------------------------------------------------------------ explicit


@pytest.fixture(scope="module")
def explicit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    root = tmp_path_factory.mktemp("explicit")
    identity(root, "resnet")
    with Server(root, "--model-control-mode", "explicit") as server:
        yield server, root


def test_nothing_at_start(explicit: tuple[Server, Path]) -> None:
    server, _ = explicit
    with server.client() as client:
        assert client.ready()
        (entry,) = client.models()
        assert (entry["name"], entry["version"], entry["state"], entry["reason"]) == ("resnet", "", "", "")
        with pytest.raises(shmserve.NotFound, match="Request for unknown model: 'resnet' is not found"):
            client.infer("resnet", {"x": living.ONE})


def test_names_that_are_no_models(explicit: tuple[Server, Path]) -> None:
    server, root = explicit
    (root.parent / "outside" / "1").mkdir(parents=True, exist_ok=True)
    with server.client() as client:
        with pytest.raises(shmserve.NotFound, match=r"failed to load 'resnt'.*did you mean 'resnet'"):
            client.load("resnt")
        for name in ("../outside", "..", "/etc", "resnet/1"):
            with pytest.raises(shmserve.InvalidRequest, match="must not contain path traversal characters"):
                client.load(name)
            with pytest.raises(shmserve.NotFound):
                client.restart(name)
            client.unload(name)
        with pytest.raises(shmserve.NotFound, match="failed to poll from model repository: no model repository has it"):
            client.load("a..b")
        with pytest.raises(shmserve.InvalidRequest, match="Model name cannot be empty"):
            client.load("")
        for name in (".hidden", "é", " a", "a\\b", "a\n"):
            with pytest.raises(shmserve.NotFound, match="a model cannot have this name"):
                client.load(name)
        assert index(client).keys() == {"resnet/"}, "and nothing is left of them"
        assert client.ready()


def test_a_model_that_comes_while_the_server_runs(explicit: tuple[Server, Path]) -> None:
    server, root = explicit
    with server.client() as client:
        folder = generation(root, "new", 1)
        assert states(client, "new") == {"": ""}
        assert client.load("new")["versions"][0]["state"] == "READY"
        assert answer(client, "new") == 1
        generation(root, "new", 2, version=2)
        assert ready(client, "new") == ["1"]
        client.load("new")
        assert ready(client, "new") == ["2"]
        assert answer(client, "new") == 2
        shutil.rmtree(folder / "2")
        client.load("new")
        assert answer(client, "new") == 1
        shutil.rmtree(folder)
        with pytest.raises(shmserve.NotFound):
            client.load("new")
        assert answer(client, "new") == 1, "what is served is served"
        client.unload("new")
        assert index(client).keys() == {"resnet/"}, "gone from disk, gone from the list"


def test_a_broken_model(explicit: tuple[Server, Path]) -> None:
    server, root = explicit
    folder = identity(root, "broken")
    living.write(folder / "config.pbtxt", BROKEN)
    with server.client() as client:
        for _ in range(2):
            with pytest.raises(shmserve.InvalidRequest, match=r"broken/config\.pbtxt:2.*max_batch_size") as caught:
                client.load("broken")
            assert str(root) not in str(caught.value)
            assert states(client, "broken") == {"": "UNAVAILABLE"}
            assert "max_batch_size" in index(client)["broken/"]["reason"]
        assert not client.ready(), "it was to be served, and is not"
        with pytest.raises(shmserve.ServeError, match="max_batch_size"):
            client.infer("broken", {"x": living.ONE})
        living.write(folder / "config.pbtxt", living.IDENTITY)
        client.load("broken")
        assert states(client, "broken") == {"1": "READY"}
        assert client.ready()
        before = pids(client, "broken")
        living.write(folder / "config.pbtxt", BROKEN)
        with pytest.raises(shmserve.InvalidRequest, match="max_batch_size"):
            client.load("broken")
        assert answer(client, "broken") == 1
        assert pids(client, "broken") == before
        assert client.ready(), "what is served is served"
        client.unload("broken")
        assert client.ready()
        shutil.rmtree(folder)
        assert index(client).keys() == {"resnet/"}


def test_a_repository_that_has_gone(explicit: tuple[Server, Path]) -> None:
    server, root = explicit
    with server.client(timeout=20) as client:
        client.load("resnet")
        root.rename(root.with_name("away"))
        assert states(client, "resnet") == {"1": "READY"}
        with pytest.raises(shmserve.Unavailable, match=r"failed to load 'resnet'.*repository cannot be read") as caught:
            client.load("resnet")
        assert str(root.parent) not in str(caught.value)
        assert answer(client, "resnet") == 1
        root.with_name("away").rename(root)
        assert client.load("resnet")["changed"] is False
        client.unload("resnet")


@pytest.mark.parametrize("chosen", [["a"], ["a", "b", "broken", "nobody"], ["*"]], ids=["one", "several", "all"])
def test_models_at_start(tmp_path: Path, chosen: list[str]) -> None:
    for name in ("a", "b", "c", "broken"):
        identity(tmp_path, name)
    living.write(tmp_path / "broken" / "config.pbtxt", BROKEN)
    options = [option for name in chosen for option in ("--load-model", name)]
    with Server(tmp_path, "--model-control-mode", "explicit", *options) as server, server.client() as client:
        served = {name for name in ("a", "b", "c") if name in chosen or chosen == ["*"]}
        assert {entry["name"] for entry in client.models() if entry["state"] == "READY"} == served
        failed = {entry["name"]: entry["reason"] for entry in client.models() if entry["state"] == "UNAVAILABLE"}
        assert failed.keys() == {"broken", "nobody"}.intersection(chosen) | ({"broken"} if chosen == ["*"] else set())
        assert all("max_batch_size" in failed[name] for name in failed.keys() & {"broken"})
        assert all("no model repository has it" in failed[name] for name in failed.keys() & {"nobody"})
        assert client.ready() is (not failed)


# ------------------------------------------------------------------------------------------------ poll


@pytest.fixture(scope="module")
def polled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    root = tmp_path_factory.mktemp("polled")
    (root.parent / "second").mkdir()
    options = ["--model-control-mode", "poll", "--repository-poll-secs", "0.1", "--settle-secs", "0.2"]
    with Server(root, *options, "--model-repository", str(root.parent / "second")) as server:
        yield server, root


def test_the_start_does_not_wait_for_the_first_poll(tmp_path: Path) -> None:
    identity(tmp_path, "new")  # within --settle-secs before the start
    options = ("--model-control-mode", "poll", "--repository-poll-secs", "3600", "--settle-secs", "3600")
    with Server(tmp_path, *options) as server, server.client() as client:
        assert client.ready("new")


def test_models_come_change_and_go(polled: tuple[Server, Path]) -> None:
    server, root = polled
    with server.client() as client:
        with pytest.raises(shmserve.Unavailable, match=REFUSED):
            client.load("m")
        files = generation(root, "files", 1)
        identity(root, "config")
        counted = identity(root, "counted", group(1))
        identity(root, "goes")
        for name in ("files", "config", "counted", "goes"):
            client.wait_ready(name, timeout=living.PATIENCE_S)
        assert answer(client, "files") == 1
        untouched = pids(client, "counted")
        living.renew(files, 2)
        living.write(root / "config" / "config.pbtxt", living.IDENTITY.replace("8", "16"))
        living.write(counted / "config.pbtxt", living.IDENTITY + group(2))
        shutil.rmtree(root / "goes")
        until(client, lambda: answer(client, "files") == 2)
        until(client, lambda: client.config("config")["max_batch_size"] == 16)
        until(client, lambda: len(pids(client, "counted")) == 2)
        until(client, lambda: not index(client, "goes"), "it has gone, and so it is not shown")
        assert untouched.items() <= pids(client, "counted").items(), "in place"
        with pytest.raises(shmserve.NotFound):
            answer(client, "goes")
        for name in ("files", "config", "counted"):
            shutil.rmtree(root / name)
        until(client, lambda: not index(client))


def test_versions_come_and_go(polled: tuple[Server, Path]) -> None:
    server, root = polled
    policies = {
        "newest": "latest { num_versions: 1 }",
        "two": "latest { num_versions: 2 }",
        "every": "all { }",
        "chosen": "specific { versions: [ 1, 4 ] }",
    }
    with server.client() as client:
        for name, text in policies.items():
            identity(root, name, policy(text), 1, 3)
        expected = {"newest": ["3"], "two": ["1", "3"], "every": ["1", "3"], "chosen": ["1"]}
        until(client, lambda: {name: ready(client, name) for name in policies} == expected)
        kept = pids(client, "every")
        for name in policies:
            (root / name / "4").mkdir()
        expected = {"newest": ["4"], "two": ["3", "4"], "every": ["1", "3", "4"], "chosen": ["1", "4"]}
        until(client, lambda: {name: ready(client, name) for name in policies} == expected)
        assert kept.items() <= pids(client, "every").items(), "a version more is no reason to load the others again"
        for name in policies:
            shutil.rmtree(root / name / "4")
            living.write(root / name / "config.pbtxt", living.IDENTITY + policy("latest { num_versions: 2 }"))
        expected = {name: ["1", "3"] for name in policies}
        until(client, lambda: {name: ready(client, name) for name in policies} == expected)
        assert kept.items() <= pids(client, "every").items()
        for name in policies:
            shutil.rmtree(root / name)
        until(client, lambda: not index(client))


def test_what_is_broken_is_told_and_the_old_one_goes_on(polled: tuple[Server, Path]) -> None:
    server, root = polled
    with server.client() as client:
        folder = generation(root, "m", 1)
        never = identity(root, "never")
        living.write(never / "config.pbtxt", BROKEN)
        client.wait_ready("m", timeout=living.PATIENCE_S)
        until(client, lambda: states(client, "never") == {"": "UNAVAILABLE"})
        assert "max_batch_size" in index(client)["never/"]["reason"]
        before = pids(client, "m")
        living.renew(folder, "three")
        until(client, lambda: "could not convert string to float" in server.log)
        assert answer(client, "m") == 1
        assert pids(client, "m") == before
        living.renew(folder, 3)
        until(client, lambda: answer(client, "m") == 3)
        assert server.log.count("'never' is not served") == 1, "once"
        shutil.rmtree(never)
        until(client, lambda: not index(client, "never"))
        until(client, client.ready)
        shutil.rmtree(folder)
        until(client, lambda: not index(client))


def test_a_model_in_two_repositories(polled: tuple[Server, Path]) -> None:
    server, root = polled
    second = root.parent / "second"
    with server.client() as client:
        identity(root, "m")
        client.wait_ready("m", timeout=living.PATIENCE_S)
        before = pids(client, "m")
        twice = "model appears in two or more repositories: 'm' is in 2 of them"
        told = server.log.count(twice)
        identity(second, "m")
        until(client, lambda: server.log.count(twice) == told + 1)
        assert pids(client, "m") == before, "what is served goes on"
        shutil.rmtree(second / "m")
        until(client, client.ready)
        assert pids(client, "m") == before
        for folder in (second, root):
            identity(folder, "both")
        until(client, lambda: twice.replace("'m'", "'both'") in index(client).get("both/", {}).get("reason", ""))
        shutil.rmtree(root / "both")
        until(client, lambda: client.ready("both"))
        shutil.rmtree(second / "both")
        shutil.rmtree(root / "m")
        until(client, lambda: not index(client))


# ------------------------------------------------------------------------------------------------ a slow copy


def network(folder: Path, number: int) -> bytes:
    """y = x * 0 + number, and a megabyte that a half of the file would lack."""
    graph = Graph().input("x", "FP32", [-1, 3]).output("y", "FP32", [-1, 3])
    graph.weight("zero", np.zeros(3, np.float32)).weight("number", np.full(3, number, np.float32))
    graph.weight("ballast", np.full(250_000, number, np.float32)).node("ReduceMax", ["ballast"], ["most"], keepdims=0)
    graph.node("Mul", ["x", "zero"], ["nothing"]).node("Add", ["nothing", "number"], ["found"])
    graph.node("Max", ["found", "most"], ["y"])
    return graph.save(folder).read_bytes()


def test_a_half_copied_model_is_never_served(polled: tuple[Server, Path], tmp_path: Path) -> None:
    server, root = polled
    old, new = network(tmp_path / "old", 1), network(tmp_path / "new", 2)
    assert len(old) == len(new)
    config = living.IDENTITY.replace("identity", "onnxruntime").replace("[ -1 ]", "[ 3 ]")
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "1" / "model.onnx").write_bytes(old)
    (root / "m" / "config.pbtxt").write_text(config)
    with server.client() as client:
        client.wait_ready("m", timeout=living.PATIENCE_S)
        answers: list[float] = []
        began = len(server.log)
        (root / "slow" / "1").mkdir(parents=True)
        (root / "slow" / "config.pbtxt").write_text(config)
        with (
            (root / "m" / "1" / "model.onnx").open("wb") as over,
            (root / "slow" / "1" / "model.onnx").open("wb") as copy,
        ):
            for start in range(0, len(new), len(new) // 8):
                for file in (over, copy):
                    file.write(new[start : start + len(new) // 8])
                    file.flush()
                pause = time.monotonic() + 0.12
                while time.monotonic() < pause:
                    answers.append(answer(client, "m"))
                assert ready(client, "slow") == []
            os.fsync(over.fileno())
        assert set(answers) == {1.0}
        while answers[-1] != 2:
            answers.append(answer(client, "m"))
        client.wait_ready("slow", timeout=living.PATIENCE_S)
        assert answer(client, "slow") == 2
        assert set(answers) == {1.0, 2.0}
        assert answers == sorted(answers), "once new, always new"
        said = server.log[began:]
        assert not re.search(r"ERROR|WARNING", said), said
        for name in ("m", "slow"):
            shutil.rmtree(root / name)
        until(client, lambda: not index(client))

"""Which models are served in the modes none, poll and explicit."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import shmserve
from shmserve.testing import Server
from tests.support import living
from tests.support.living import answer, generation, group, identity, index, pids, ready, states, until

pytestmark = pytest.mark.process

REFUSED = "explicit model load / unload is not allowed"
POLLING = f"{REFUSED} if polling is enabled; start the server with --model-control-mode explicit"
BROKEN = living.IDENTITY.replace("max_batch", "max_bach")

# ------------------------------------------------------------------------------------------------ none


def test_mode_none_ignores_changes_and_refuses_operations(tmp_path: Path) -> None:
    identity(tmp_path, "m")
    with Server(tmp_path) as server, server.client() as client:
        before = pids(client, "m")
        for operation in (client.load, client.unload):
            with pytest.raises(
                shmserve.Unavailable, match=f"{REFUSED} in mode none; start the server with --model-con"
            ):
                operation("m")
        with pytest.raises(shmserve.Unavailable, match=REFUSED):
            client.load("m", config={"backend": "identity"}, files={"1/large": bytes(3_000_000)})
        identity(tmp_path, "late")
        living.write(tmp_path / "m" / "config.pbtxt", BROKEN)
        assert index(client).keys() == {"m/1"}, "changes on disk are ignored"
        assert pids(client, "m") == before
        client.restart("m")
        assert pids(client, "m").keys() == before.keys()
        assert pids(client, "m") != before
        assert client.ready()


# ------------------------------------------------------------------------------------------------ explicit


def test_deleted_versions_stay_listed(tmp_path: Path) -> None:
    """As in Triton, like those that the version policy leaves out."""
    config = "version_policy { all { } }"
    for version in (1, 2, 3):
        generation(tmp_path, "m", version, config, version=version)
    options = ("--model-control-mode", "explicit", "--load-model", "m")
    with Server(tmp_path, *options) as server, server.client() as client:
        assert index(client).keys() == {"m/1", "m/2", "m/3"}
        shutil.rmtree(tmp_path / "m" / "1")
        living.write(tmp_path / "m" / "config.pbtxt", living.PYTHON + "version_policy { latest { num_versions: 1 } }")
        client.load("m")
        until(client, lambda: states(client, "m") == {"1": "UNAVAILABLE", "2": "UNAVAILABLE", "3": "READY"})
        assert [entry["version"] for entry in client.statistics("m")["model_stats"]] == ["3"]
        assert {entry["version"] for entry in client.statistics()["model_stats"]} == {"1", "2", "3"}
        with pytest.raises(shmserve.Unavailable, match="'m' version 1 is not at ready state"):
            client.infer("m", {"x": living.ONE}, version=1)
        client.unload("m")
        assert set(states(client, "m").values()) == {"UNAVAILABLE"}
        shutil.rmtree(tmp_path / "m")
        assert client.models() == []
        assert client.statistics() == {"model_stats": []}


@pytest.fixture(scope="module", autouse=True)
def resnet(root: Path) -> None:
    identity(root, "resnet")


def test_no_model_is_loaded_at_start(client: shmserve.Client) -> None:
    assert client.ready()
    (entry,) = client.models()
    assert (entry["name"], entry["version"], entry["state"], entry["reason"]) == ("resnet", "", "", "")
    with pytest.raises(shmserve.NotFound, match="Request for unknown model: 'resnet' is not found"):
        client.infer("resnet", {"x": living.ONE})


def test_invalid_model_names_are_refused(root: Path, client: shmserve.Client) -> None:
    (root.parent / "outside" / "1").mkdir(parents=True)
    with pytest.raises(shmserve.NotFound, match=r"failed to load 'resnt'.*did you mean 'resnet'"):
        client.load("resnt")
    for name in ("../outside", "..", "/etc", "resnet/1"):
        with pytest.raises(shmserve.InvalidRequest, match="must not contain path traversal characters"):
            client.load(name)
        with pytest.raises(shmserve.NotFound):
            client.restart(name)
        client.unload(name)
    assert index(client).keys() == {"resnet/"}
    assert client.ready()


def test_load_applies_added_changed_and_removed_versions(root: Path, client: shmserve.Client) -> None:
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
    assert answer(client, "new") == 1, "the loaded model is still served"
    client.unload("new")
    assert index(client).keys() == {"resnet/"}


def test_a_broken_model_is_not_ready_until_it_is_repaired_or_unloaded(root: Path, client: shmserve.Client) -> None:
    folder = identity(root, "broken")
    living.write(folder / "config.pbtxt", BROKEN)
    for _ in range(2):
        with pytest.raises(shmserve.InvalidRequest, match=r"broken/config\.pbtxt:2.*max_batch_size") as caught:
            client.load("broken")
        assert str(root) not in str(caught.value)
        assert states(client, "broken") == {"": "UNAVAILABLE"}
        assert "max_batch_size" in index(client)["broken/"]["reason"]
    assert not client.ready()
    with pytest.raises(shmserve.ServeError, match="max_batch_size"):
        client.infer("broken", {"x": living.ONE})
    living.write(folder / "config.pbtxt", living.IDENTITY)
    client.load("broken")
    assert states(client, "broken") == {"1": "READY"}
    assert client.ready()
    living.write(folder / "config.pbtxt", BROKEN)
    with pytest.raises(shmserve.InvalidRequest, match="max_batch_size"):
        client.load("broken")
    assert client.ready(), "the previous generation is still served"
    client.unload("broken")
    assert client.ready()
    shutil.rmtree(folder)
    assert index(client).keys() == {"resnet/"}


def test_an_unreadable_repository_keeps_loaded_models(root: Path, client: shmserve.Client) -> None:
    client.load("resnet")
    root.rename(root.with_name("away"))
    assert states(client, "resnet") == {"1": "READY"}
    with pytest.raises(shmserve.Unavailable, match=r"failed to load 'resnet'.*repository cannot be read") as caught:
        client.load("resnet")
    assert str(root.parent) not in str(caught.value)
    assert answer(client, "resnet") == 1
    root.with_name("away").rename(root)
    assert client.load("resnet")["changed"] is False


@pytest.mark.parametrize("chosen", [["a", "b", "broken", "missing"], ["*"]], ids=["several", "all"])
def test_load_model_selects_the_models_loaded_at_start(tmp_path: Path, chosen: list[str]) -> None:
    for name in ("a", "b", "c", "broken"):
        identity(tmp_path, name)
    living.write(tmp_path / "broken" / "config.pbtxt", BROKEN)
    options = [option for name in chosen for option in ("--load-model", name)]
    with Server(tmp_path, "--model-control-mode", "explicit", *options) as server, server.client() as client:
        served = {name for name in ("a", "b", "c") if name in chosen or chosen == ["*"]}
        assert {entry["name"] for entry in client.models() if entry["state"] == "READY"} == served
        failed = {entry["name"]: entry["reason"] for entry in client.models() if entry["state"] == "UNAVAILABLE"}
        assert failed.keys() == {"broken", "missing"}.intersection(chosen) | ({"broken"} if chosen == ["*"] else set())
        assert all("max_batch_size" in failed[name] for name in failed.keys() & {"broken"})
        assert all("no model repository has it" in failed[name] for name in failed.keys() & {"missing"})
        assert not client.ready()


# ------------------------------------------------------------------------------------------------ poll


@pytest.fixture(scope="module")
def polled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    root = tmp_path_factory.mktemp("polled")
    (root.parent / "second").mkdir()
    options = ["--model-control-mode", "poll", "--repository-poll-secs", "0.1", "--settle-secs", "0.1"]
    with Server(root, *options, "--model-repository", str(root.parent / "second")) as server:
        yield server, root


def test_changes_are_not_loaded_before_the_settle_time(tmp_path: Path) -> None:
    """Except at the start of the server."""
    served = generation(tmp_path, "served", 1)
    identity(tmp_path, "removed")
    options = ("--model-control-mode", "poll", "--repository-poll-secs", "0.1", "--settle-secs", "3600")
    with Server(tmp_path, *options) as server, server.client() as client:
        assert answer(client, "served") == 1
        living.renew(served, 2)
        (served / "1" / "model.py").write_text("def half_a_")
        generation(tmp_path, "copied", 3)
        shutil.rmtree(tmp_path / "removed")
        until(client, lambda: not index(client, "removed"))  # by a poll that has also seen the other changes
        assert answer(client, "served") == 1
        assert ready(client, "copied") == []
        assert not re.search(r"ERROR|WARNING", server.log), server.log
        (served / "1" / "model.py").write_text(living.GENERATION)
        server.restart()
        assert (answer(client, "served"), answer(client, "copied")) == (2, 3)


def test_models_are_added_changed_and_removed_by_polling(polled: tuple[Server, Path]) -> None:
    server, root = polled
    with server.client() as client:
        with pytest.raises(shmserve.Unavailable, match=POLLING):
            client.load("m")
        files = generation(root, "files", 1)
        identity(root, "config")
        counted = identity(root, "counted", group(1))
        identity(root, "goes")
        for name in ("files", "config", "counted", "goes"):
            # A poll may read a half-written model, so wait even if the model has failed to load.
            until(client, lambda name=name: ready(client, name))  # type: ignore[misc]
        assert answer(client, "files") == 1
        untouched = pids(client, "counted")
        living.renew(files, 2)
        living.write(root / "config" / "config.pbtxt", living.IDENTITY.replace("8", "16"))
        living.write(counted / "config.pbtxt", living.IDENTITY + group(2))
        shutil.rmtree(root / "goes")
        until(client, lambda: answer(client, "files") == 2)
        until(client, lambda: client.config("config")["max_batch_size"] == 16)
        until(client, lambda: len(pids(client, "counted")) == 2)
        until(client, lambda: not index(client, "goes"), "it is not listed")
        assert untouched.items() <= pids(client, "counted").items(), "no other process is restarted"
        (root / "counted" / "2").mkdir()
        until(client, lambda: ready(client, "counted") == ["2"])
        shutil.rmtree(root / "counted" / "2")
        until(client, lambda: ready(client, "counted") == ["1"])
        with pytest.raises(shmserve.NotFound):
            answer(client, "goes")
        for name in ("files", "config", "counted"):
            shutil.rmtree(root / name)
        until(client, lambda: not index(client))


def test_a_model_in_two_repositories_is_reported(polled: tuple[Server, Path]) -> None:
    server, root = polled
    second = root.parent / "second"
    with server.client() as client:
        identity(root, "m")
        until(client, lambda: ready(client, "m"))
        before = pids(client, "m")
        twice = "model appears in two or more repositories: 'm' is in 2 of them"
        logged = server.log.count(twice)
        identity(second, "m")
        until(client, lambda: server.log.count(twice) == logged + 1)
        assert pids(client, "m") == before, "the served model is not affected"
        shutil.rmtree(second / "m")
        until(client, client.ready)
        assert pids(client, "m") == before
        shutil.rmtree(root / "m")
        until(client, lambda: not index(client))

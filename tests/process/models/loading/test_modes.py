"""Which models are served in the modes poll and explicit."""

from __future__ import annotations

import shutil
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
    assert not index(client)


def test_a_removed_model_and_an_unreadable_repository_keep_what_is_loaded(root: Path, client: shmserve.Client) -> None:
    folder = identity(root, "gone")
    client.load("gone")
    shutil.rmtree(folder)
    with pytest.raises(shmserve.NotFound):
        client.load("gone")
    assert answer(client, "gone") == 1
    client.unload("gone")
    assert not index(client)
    identity(root, "resnet")
    client.load("resnet")
    root.rename(root.with_name("away"))
    assert states(client, "resnet") == {"1": "READY"}
    with pytest.raises(shmserve.Unavailable, match=r"failed to load 'resnet'.*repository cannot be read") as caught:
        client.load("resnet")
    assert str(root.parent) not in str(caught.value)
    assert answer(client, "resnet") == 1
    root.with_name("away").rename(root)
    assert client.load("resnet")["changed"] is False


def test_load_model_selects_the_models_loaded_at_start(tmp_path: Path) -> None:
    chosen = ("a", "b", "broken", "missing")
    for name in ("a", "b", "c", "broken"):
        identity(tmp_path, name)
    living.write(tmp_path / "broken" / "config.pbtxt", BROKEN)
    options = [option for name in chosen for option in ("--load-model", name)]
    with Server(tmp_path, "--model-control-mode", "explicit", *options) as server, server.client() as client:
        assert {entry["name"] for entry in client.models() if entry["state"] == "READY"} == {"a", "b"}
        failed = {entry["name"]: entry["reason"] for entry in client.models() if entry["state"] == "UNAVAILABLE"}
        assert failed.keys() == {"broken", "missing"}
        assert "max_batch_size" in failed["broken"]
        assert "no model repository has it" in failed["missing"]
        assert not client.ready()


def test_models_are_added_changed_and_removed_by_polling(tmp_path: Path) -> None:
    root = tmp_path
    options = ("--model-control-mode", "poll", "--repository-poll-secs", "0.1")
    with Server(root, *options) as server, server.client() as client:
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

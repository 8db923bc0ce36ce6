"""Which models are served in the mode explicit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import shmserve
from shmserve.testing import Server
from tests.support import living
from tests.support.living import answer, identity, index, states

pytestmark = pytest.mark.process

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

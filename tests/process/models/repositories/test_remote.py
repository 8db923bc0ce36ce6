"""Models in an S3 server: listed, downloaded, loaded and reloaded by a real server, beside local ones."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import shmserve
from shmserve.repo.remote.download import PIECE_BYTES
from shmserve.testing import Server
from tests.support import living
from tests.support.ensemble_models import ensemble
from tests.support.launch import await_end, children_of
from tests.support.living import answer, generation, index, states, until
from tests.support.patience import PATIENCE_S
from tests.support.repo.object_store import CREDENTIALS, KEY_ID, SECRET, ObjectStore, Proxy, object_store

pytest.importorskip("moto")
pytest.importorskip("s3fs")
pytestmark = pytest.mark.process

MODULE = "shmserve.repo.remote.main"
EXPLICIT = ("--model-control-mode", "explicit")


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


@pytest.fixture(scope="module")
def proxy(store: ObjectStore) -> Iterator[Proxy]:
    with Proxy(store.port) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def credentials(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    yield
    proxy.reset()


def put(store: ObjectStore, place: Path, name: str, number: int, repository: str = "repo") -> None:
    """A model that answers with its number."""
    folder = place / f"{name}-{number}"
    store.put_model(repository, generation(folder, name, number))


def serving(folder: Path, url: str, *options: str) -> Server:
    """A server with a local repository beside a remote one."""
    cache = ("--cache-directory", str(folder / "cache"))
    return Server(folder / "local", "--model-repository", url, *cache, *options)


def mirror_pid(server: Server) -> int:
    for pid in children_of(server.pid):
        if MODULE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("no process mirrors the repositories")


def test_models_are_loaded_on_request(store: ObjectStore, proxy: Proxy, tmp_path: Path) -> None:
    generation(tmp_path / "local", "near", 1)
    put(store, tmp_path, "far", 1)
    put(store, tmp_path, "other", 1)
    with serving(tmp_path, proxy.url, *EXPLICIT, "--load-model", "far") as server, server.client() as client:
        assert answer(client, "far") == 1
        until(client, lambda: "other/" in index(client), "a model that was not downloaded is listed")
        assert not proxy.ranges("/other/")
        assert client.load("near")["warnings"] == []
        client.load("other")
        assert (answer(client, "near"), answer(client, "other")) == (1, 1)

        put(store, tmp_path, "far", 2)
        proxy.requests.clear()
        assert client.load("far")["changed"]
        assert answer(client, "far") == 2
        assert not proxy.ranges("/far/1/model.py"), "an object that did not change was downloaded again"
        assert not client.load("far")["changed"]
        client.load("far", previous=True)
        assert answer(client, "far") == 1

        store.put("repo/far/1/generation", "4")
        os.kill(server.pid, signal.SIGHUP)
        until(client, lambda: answer(client, "far") == 4, "the reread")
        with pytest.raises(shmserve.NotFound, match="no model repository has it"):
            client.load("nowhere")
        client.unload("other")
        assert states(client, "other") == {"1": "UNAVAILABLE"}


def test_a_killed_download_is_resumed_and_the_secret_is_kept(store: ObjectStore, proxy: Proxy, tmp_path: Path) -> None:
    """The model has two pieces, and is loaded automatically because an ensemble needs it."""
    put(store, tmp_path, "step", 3)
    store.put("repo/step/1/weights.bin", os.urandom(PIECE_BYTES + 1000))
    ensemble(tmp_path / "local", "both", "x", "y", "step(x:x)->(y:y)", more="max_batch_size: 8")
    last = f"bytes={PIECE_BYTES}-"

    def is_last(path: str) -> bool:
        return "weights" in path and proxy.ranges("weights")[-1].startswith(last)

    with serving(tmp_path, proxy.url, *EXPLICIT) as server, server.client() as client, server.client() as other:
        proxy.holds = is_last
        proxy.gate.clear()
        with ThreadPoolExecutor(1) as pool:
            load = pool.submit(other.load, "both")
            try:
                assert proxy.held.wait(PATIENCE_S)
                until(client, lambda: "downloading 8.4 of 8.4 MB" in index(client, "step")["step/"]["reason"])
                assert states(client, "step") == {"": "LOADING"}
                shown = str(client.activity()) + str(client.models())
                first = mirror_pid(server)
                lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in (first, server.pid)]
                os.kill(first, signal.SIGKILL)
                await_end(first)
            finally:
                proxy.gate.set()
            load.result()
        assert answer(client, "both") == 3
        assert mirror_pid(server) != first
        # The first piece was read once; the second one by the killed process and again by the next one.
        assert proxy.ranges("weights") == [f"bytes=0-{PIECE_BYTES - 1}", *[f"{last}{PIECE_BYTES + 999}"] * 2]

        proxy.rule = lambda method, path: "refuse"
        warnings = client.load("step")["warnings"]
        assert "served from the cache, because it cannot be downloaded" in warnings[0]
        with pytest.raises(shmserve.Unavailable, match=r"failed to load 'nowhere': model repository s3://"):
            client.load("nowhere")
        shown += server.log + str(client.activity()) + "".join(lines) + str(warnings)
        assert SECRET not in shown
        assert KEY_ID not in shown


def test_unloading_a_model_frees_cache_space(store: ObjectStore, proxy: Proxy, tmp_path: Path) -> None:
    url = proxy.url.replace("/repo", "/room")
    for name in ("first", "second"):
        put(store, tmp_path, name, 1, "room")
        store.put(f"room/{name}/1/weights.bin", os.urandom(60_000))
    (tmp_path / "local").mkdir()
    with serving(tmp_path, url, *EXPLICIT, "--remote-cache-size", "100000") as server, server.client() as client:
        client.load("first")
        with pytest.raises(shmserve.Unavailable, match="raise --remote-cache-size, or unload models"):
            client.load("second")
        assert answer(client, "first") == 1
        client.unload("first")
        client.load("second")
        assert answer(client, "second") == 1
        assert not client.load("second")["changed"]


@pytest.fixture
def failing(store: ObjectStore) -> Iterator[Proxy]:
    """A proxy that the test closes."""
    with Proxy(store.port) as proxy:
        yield proxy


def test_changes_are_polled_and_models_survive_a_lost_store(store: ObjectStore, failing: Proxy, tmp_path: Path) -> None:
    proxy, url = failing, failing.url.replace("/repo", "/away")
    for name in ("stays", "goes"):
        put(store, tmp_path, name, 1, "away")
    generation(tmp_path / "local", "near", 1)
    follow = ("--model-control-mode", "poll", "--repository-poll-secs", "0.2")
    with serving(tmp_path, f"{proxy.url}2", *follow) as server, server.client() as client:
        assert list(index(client)) == ["near/1"]
        assert not client.ready()
        put(store, tmp_path, "late", 1, repository="repo2")
        until(client, lambda: living.ready(client, "late") == ["1"])
        until(client, client.ready)
        assert answer(client, "late") == 1
        assert "served unchanged" not in server.log, "there was nothing to serve"
    with pytest.raises(RuntimeError, match="ended with code 1 before it was ready"):
        serving(tmp_path, f"{proxy.url}3", "--exit-on-error").start()
    with serving(tmp_path, url, *follow) as server, server.client() as client:
        assert [answer(client, name) for name in ("near", "stays", "goes")] == [1, 1, 1]
        store.put("away/stays/1/generation", "2")
        until(client, lambda: answer(client, "stays") == 2, "the new version")
        for path in ("config.pbtxt", "1/model.py", "1/generation"):
            store.delete(f"away/goes/{path}")
        until(client, lambda: living.ready(client, "goes") == [], "the unload")
        proxy.close()
        until(client, lambda: "its models are served unchanged" in server.log, "the error")
        assert answer(client, "stays") == 2
    with serving(tmp_path, url) as server, server.client() as client:  # the store is still down
        assert (answer(client, "stays"), answer(client, "near")) == (2, 1)
        assert "serving its 1 model(s) from the cache" in server.log
        assert "goes/1" not in index(client)

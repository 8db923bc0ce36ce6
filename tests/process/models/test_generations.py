"""A version stays what was loaded: workers that are killed and restarted after files have changed. The oracle is the
number that a model answers with, which it reads when it is loaded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest

import shmserve
from shmserve.testing import Server
from tests.support.living import IDENTITY, ONE, generation, group, index, pids, renew, until, write
from tests.support.workers.worker_models import Graph

pytestmark = pytest.mark.process

ALL_LINKED = ("--generation-file-bytes", "0")
"""As if every file were large."""
ONNX = IDENTITY.replace("identity", "onnxruntime")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@contextmanager
def serving(root: Path, *options: str) -> Iterator[tuple[Server, shmserve.Client]]:
    with Server(root, *options) as server, server.client() as client:
        yield server, client


def kill(client: shmserve.Client, model: str, count: int = 1) -> None:
    """The first `count` instances."""
    for pid in [pid for _, pid in sorted(pids(client, model).items())][:count]:
        os.kill(pid, signal.SIGKILL)


def kill_and_wait(client: shmserve.Client, model: str) -> None:
    """All instances, and waits for their successors."""
    before = pids(client, model)
    kill(client, model, len(before))
    until(
        client, lambda: len(after := pids(client, model)) == len(before) and not {*after.values()} & {*before.values()}
    )


def answers(client: shmserve.Client, model: str, count: int = 20) -> set[float]:
    futures = [client.submit(model, {"x": ONE}) for _ in range(count)]
    return {future.result(60)["y"][0, 0].item() for future in futures}


@pytest.mark.parametrize("mode", ["none", "explicit", "poll"])
def test_a_restarted_worker_loads_what_was_loaded(root: Path, mode: str) -> None:
    folder = generation(root, "m", 1, group(2))
    write(folder / "1" / "helper.py", "FACTOR = 1\n")
    source = (folder / "1" / "model.py").read_text()
    source = source.replace("import os\n", "import os\nfrom helper import FACTOR\n").replace(
        "float(", "FACTOR * float("
    )
    write(folder / "1" / "model.py", source)
    more = {"explicit": ("--load-model", "m"), "poll": ("--settle-secs", "0", "--repository-poll-secs", "3600")}
    with serving(root, "--model-control-mode", mode, *more.get(mode, ())) as (_, client):
        renew(folder, 2)
        write(folder / "1" / "helper.py", "FACTOR = 100\n")
        (folder / "1" / "model.py").write_text("this is not Python")
        kill_and_wait(client, "m")
        assert answers(client, "m") == {1}
        write(folder / "1" / "model.py", source)
        if mode == "explicit":
            client.load("m")
            assert answers(client, "m") == {200}


def test_all_instances_of_a_generation_read_the_same_files(root: Path) -> None:
    """An instance that is added later too, as the rest of the version goes on."""
    folder = generation(root, "m", 1, group(1))
    with serving(root, "--model-control-mode", "explicit", "--load-model", "m") as (_, client):
        state = (folder / "1" / "generation").stat()
        (folder / "1" / "generation").write_text("2")  # in place, with the time of before: nobody can tell
        os.utime(folder / "1" / "generation", ns=(state.st_atime_ns, state.st_mtime_ns))
        write(folder / "config.pbtxt", (folder / "config.pbtxt").read_text().replace("count: 1", "count: 2"))
        client.load("m")
        assert len(pids(client, "m")) == 2
        assert answers(client, "m") == {1}


def test_a_large_file_that_is_replaced_is_kept(root: Path) -> None:
    folder = generation(root, "m", 1, group(2))
    with serving(root, *ALL_LINKED) as (_, client):
        renew(folder, 2)
        kill_and_wait(client, "m")
        assert answers(client, "m") == {1}


def test_a_large_file_that_was_written_to_is_refused(root: Path) -> None:
    folder = generation(root, "m", 1, group(1))
    with serving(root, "--model-control-mode", "explicit", "--load-model", "m", *ALL_LINKED) as (_, client):
        (folder / "1" / "generation").write_text("22")
        kill(client, "m")
        until(
            client,
            lambda: "1/generation changed on disk since it was loaded (size 1 -> 2)" in json.dumps(client.models()),
        )
        assert str(root) not in json.dumps(client.models())
        client.load("m")
        assert answers(client, "m") == {22}


def scale(folder: Path, number: float, external: bool = False) -> None:
    """An ONNX model that answers with its number."""
    graph = Graph().input("x", "FP32", [-1, 3]).output("y", "FP32", [-1, 3])
    path = graph.weight("w", np.full(3, number, np.float32)).node("Mul", ["x", "w"], ["y"]).save(folder)
    if external:
        onnx.save(onnx.load(str(path)), str(path), save_as_external_data=True, location="w.bin", size_threshold=0)


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize(
    "options", [(), ALL_LINKED, ("--generation-file-bytes", "100")], ids=["copied", "linked", "both"]
)
def test_weights_that_are_replaced(root: Path, options: tuple[str, ...], external: bool) -> None:
    (root / "m").mkdir()
    write(root / "m" / "config.pbtxt", ONNX.replace("-1", "3") + group(2))
    scale(root / "m", 1, external)
    with serving(root, "--model-control-mode", "explicit", "--load-model", "m", *options) as (_, client):
        scale(root.parent / "new", 2, external)
        for path in (root.parent / "new" / "1").iterdir():
            path.replace(root / "m" / "1" / path.name)
        kill_and_wait(client, "m")
        assert answers(client, "m") == {1}
        client.load("m")
        assert answers(client, "m") == {2}


def test_the_files_of_a_version_are_removed_with_it(root: Path) -> None:
    folder = generation(root, "m", 1)
    with serving(root, "--model-control-mode", "explicit", "--load-model", "m", *ALL_LINKED) as (server, client):
        place = server.runtime_dir / "generations"
        descriptors = Path(f"/proc/{server.pid}/fd")

        def linked() -> list[str]:
            return [found for found in map(readlink, descriptors.iterdir()) if found.startswith(str(folder))]

        assert len(list(place.iterdir())) == 1
        assert len(linked()) == 3
        client.unload("m")
        until(client, lambda: not list(place.iterdir()) and not linked())
        client.load("m")
        assert len(list(place.iterdir())) == 1
    assert not place.exists()


def readlink(path: Path) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""


def test_what_a_killed_server_has_left_is_removed(root: Path) -> None:
    generation(root, "m", 1)
    with serving(root) as (server, _):
        (first,) = (server.runtime_dir / "generations").iterdir()
        server.kill()
        assert first.exists()
        server.restart()
        (second,) = (server.runtime_dir / "generations").iterdir()
        assert second != first


@pytest.mark.parametrize("mode", ["none", "explicit"])
def test_models_shows_what_has_changed_on_disk(root: Path, mode: str) -> None:
    folder = generation(root, "m", 1, group(1))
    generation(root, "other", 1)
    more = ("--load-model", "m", "--load-model", "other") if mode == "explicit" else ()
    with serving(root, "--model-control-mode", mode, *more) as (server, client):

        def changed() -> dict[str, bool]:
            return {name: entry["changed_on_disk"] for name, entry in index(client).items()}

        assert changed() == {"m/1": False, "other/1": False}
        renew(folder, 2)
        until(client, lambda: changed() == {"m/1": True, "other/1": False})
        command = [
            sys.executable,
            "-m",
            "shmserve.clients.cli.main",
            "models",
            "--runtime-dir",
            str(server.runtime_dir),
        ]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        assert [line.split()[0] for line in shown.splitlines() if line.endswith("changed on disk")] == ["m"]
        if mode == "explicit":
            client.load("m")
            assert changed() == {"m/1": False, "other/1": False}
            client.load("m", previous=True)
            until(client, lambda: changed() == {"m/1": True, "other/1": False})

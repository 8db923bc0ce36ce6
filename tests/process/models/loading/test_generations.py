"""A version keeps its loaded state while its files change, and a load can be rolled back.

A model answers with the number that it read when it was loaded.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest

import shmserve
from shmserve.errors import InvalidRequest, NotFound, Unavailable
from shmserve.testing import Server
from tests.support.launch import descriptors_of
from tests.support.living import (
    GENERATION,
    IDENTITY,
    ONE,
    PYTHON,
    answer,
    generation,
    group,
    index,
    pids,
    policy,
    ready,
    renew,
    until,
    write,
)
from tests.support.model_files import write_model
from tests.support.workers.models.worker_models import Graph

pytestmark = pytest.mark.process

EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "*")
ALL_LINKED = ("--generation-file-bytes", "0")
"""Treats every file as large."""
ONNX = IDENTITY.replace("identity", "onnxruntime")
CHANGED = "1/generation changed on disk since it was loaded"


def kill(client: shmserve.Client, model: str) -> set[int]:
    """Kills all instances, and returns their pids."""
    killed = set(pids(client, model).values())
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    return killed


def kill_and_wait(client: shmserve.Client, model: str) -> None:
    """Kills all instances, and waits for their successors."""
    before = kill(client, model)
    until(client, lambda: len(now := set(pids(client, model).values())) == len(before) and not now & before)


def answers(client: shmserve.Client, model: str, count: int = 20) -> set[float]:
    futures = [client.submit(model, {"x": ONE}) for _ in range(count)]
    return {future.result(60)["y"][0, 0].item() for future in futures}


def run_cli(server: Server, *words: str) -> str:
    command = [sys.executable, "-m", "shmserve.clients.cli.main", *words, "--runtime-dir", str(server.runtime_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


# ------------------------------------------------------------------------------------------------ modes none and poll


@pytest.fixture(scope="module", params=["none", "poll"])
def rereading(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path]]:
    """A server that reads its repository only on SIGHUP."""
    root = tmp_path_factory.mktemp(request.param)
    write(generation(root, "restarted", 1, group(2)) / "1" / "helper.py", "FACTOR = 1\n")
    source = GENERATION.replace("import os\n", "import os\nfrom helper import FACTOR\n")
    write(root / "restarted" / "1" / "model.py", source.replace("float(", "FACTOR * float("))
    for name in ("rolled_back", "other"):
        generation(root, name, 1)
    more = ("--settle-secs", "0", "--repository-poll-secs", "3600") if request.param == "poll" else ()
    with Server(root, "--model-control-mode", request.param, *more) as server:
        yield server, root


def reread(server: Server, client: shmserve.Client, root: Path, number: int) -> None:
    """Sends SIGHUP, and waits until another model has been reloaded."""
    renew(root / "other", number)
    for _ in range(2):
        os.kill(server.pid, signal.SIGHUP)
    until(client, lambda: answer(client, "other") == number)


def test_a_rollback_lasts_until_the_model_changes(rereading: tuple[Server, Path]) -> None:
    server, root = rereading
    with server.client() as client:
        renew(root / "rolled_back", 2)
        reread(server, client, root, 2)
        until(client, lambda: answer(client, "rolled_back") == 2)
        client.load("rolled_back", previous=True)
        before = pids(client, "rolled_back")
        reread(server, client, root, 3)
        assert (answer(client, "rolled_back"), pids(client, "rolled_back")) == (1, before)
        renew(root / "rolled_back", 3)
        reread(server, client, root, 4)
        until(client, lambda: answer(client, "rolled_back") == 3)
    assert "SIGHUP: rereading the repositories" in server.log


def test_a_restarted_worker_reads_the_loaded_files(rereading: tuple[Server, Path]) -> None:
    server, root = rereading
    with server.client() as client:
        assert index(client)["restarted/1"]["changed_on_disk"] is False
        renew(root / "restarted", 2)
        write(root / "restarted" / "1" / "helper.py", "FACTOR = 100\n")
        (root / "restarted" / "1" / "model.py").write_text("this is not Python")
        until(client, lambda: index(client)["restarted/1"]["changed_on_disk"])
        kill_and_wait(client, "restarted")
        assert answers(client, "restarted") == {1}


# ------------------------------------------------------------------------------------------------ files


def test_all_instances_of_a_generation_read_the_same_files(root: Path, client: shmserve.Client) -> None:
    """Including an instance that is added later, while the rest of the version stays."""
    folder = generation(root, "same", 1, group(1))
    client.load("same")
    state = (folder / "1" / "generation").stat()
    (folder / "1" / "generation").write_text("2")  # in place, with the same size and time: this cannot be detected
    os.utime(folder / "1" / "generation", ns=(state.st_atime_ns, state.st_mtime_ns))
    write(folder / "config.pbtxt", PYTHON + group(2))
    client.load("same")
    assert len(pids(client, "same")) == 2
    assert answers(client, "same") == {1}


def test_a_large_file_that_was_written_to_is_refused(tmp_path: Path) -> None:
    """A replaced file is kept."""
    folder = generation(tmp_path, "m", 1)
    with Server(tmp_path, *EXPLICIT, *ALL_LINKED) as server, server.client() as client:
        renew(folder, 2)
        client.load("m")
        client.load("m", previous=True)
        assert answer(client, "m") == 1
        client.load("m")
        (folder / "1" / "generation").write_text("33")
        client.load("m")
        with pytest.raises(Unavailable, match=rf"{CHANGED} \(size 1 -> 2\)"):
            client.load("m", previous=True)
        assert answer(client, "m") == 33
        (folder / "1" / "generation").write_text("444")
        kill(client, "m")
        until(client, lambda: f"{CHANGED} (size 2 -> 3)" in json.dumps(client.models()))
        assert str(tmp_path) not in json.dumps(client.models())
        client.load("m")
        assert answers(client, "m") == {444}


def scale(folder: Path, number: float, external: bool = False) -> None:
    """An ONNX model that answers with its number."""
    graph = Graph().input("x", "FP32", [-1, 3]).output("y", "FP32", [-1, 3])
    path = graph.weight("w", np.full(3, number, np.float32)).node("Mul", ["x", "w"], ["y"]).save(folder)
    if external:
        onnx.save(onnx.load(str(path)), str(path), save_as_external_data=True, location="w.bin", size_threshold=0)


@pytest.mark.parametrize(
    "options", [(), ALL_LINKED, ("--generation-file-bytes", "100")], ids=["copied", "linked", "both"]
)
def test_replaced_weights_are_kept_until_the_next_load(tmp_path: Path, options: tuple[str, ...]) -> None:
    root = tmp_path / "models"
    names = {"inside": False, "external": True}
    for name, external in names.items():
        scale(write_model(root, name, ONNX.replace("-1", "3") + group(2)), 1, external)
    with Server(root, *EXPLICIT, *options) as server, server.client() as client:
        for name, external in names.items():
            scale(tmp_path / name, 2, external)
            for path in (tmp_path / name / "1").iterdir():
                path.replace(root / name / "1" / path.name)
            kill_and_wait(client, name)
            assert answers(client, name) == {1}
            client.load(name)
            assert answers(client, name) == {2}


def test_linked_files_are_removed_with_their_version(tmp_path: Path) -> None:
    """The server removes them; if it was killed, the next server does."""
    folder = generation(tmp_path, "m", 1)
    with Server(tmp_path, *EXPLICIT, *ALL_LINKED) as server:
        place = server.runtime_dir / "generations"

        def linked() -> list[str]:
            return [target for target in descriptors_of(server.pid) if target.startswith(str(folder))]

        with server.client() as client:
            assert len(list(place.iterdir())) == 1
            assert len(linked()) == 3
            client.unload("m")
            until(client, lambda: not list(place.iterdir()) and not linked())
            client.load("m")
        (first,) = place.iterdir()
        server.kill()
        assert first.exists()
        server.restart()
        (second,) = place.iterdir()
        assert second != first
    assert not place.exists()


def test_models_shows_what_has_changed_on_disk(server: Server, root: Path, client: shmserve.Client) -> None:
    for name in ("changed", "other"):
        generation(root, name, 1)
        client.load(name)

    def changed() -> set[str]:
        return {name for name, entry in index(client).items() if entry.get("changed_on_disk")}

    assert changed() == set()
    renew(root / "changed", 2)
    until(client, lambda: changed() == {"changed/1"})
    lines = run_cli(server, "models").splitlines()
    assert [line.split()[0] for line in lines if line.endswith("changed on disk")] == ["changed"]
    client.load("changed")
    assert changed() == set()
    client.load("changed", previous=True)
    until(client, lambda: changed() == {"changed/1"})


# ------------------------------------------------------------------------------------------------ rollback


def test_a_second_rollback_undoes_the_first(server: Server, root: Path, client: shmserve.Client) -> None:
    folder = generation(root, "m", 1, group(2))
    client.load("m")
    with pytest.raises(NotFound, match="failed to load 'm': it has no previous generation"):
        client.load("m", previous=True)
    renew(folder, 2)
    client.load("m")
    assert client.load("m")["changed"] is False, "this is not a new generation"
    assert client.load("m", previous=True)["changed"] is True
    assert answer(client, "m") == 1
    kill_and_wait(client, "m")
    assert answer(client, "m") == 1
    assert (folder / "1" / "generation").read_text() == "2", "the repository does not change"
    client.load("m", previous=True)
    assert answer(client, "m") == 2
    renew(folder, 3)
    client.load("m")
    until(client, lambda: len(list((server.runtime_dir / "generations").iterdir())) == 2, "the first one is removed")
    client.load("m", previous=True)
    assert answer(client, "m") == 2
    client.load("m")
    assert answer(client, "m") == 3, "a load reads the repository"
    client.unload("m")
    with pytest.raises(NotFound, match="no previous generation"):
        client.load("m", previous=True)
    with pytest.raises(InvalidRequest, match="cannot be combined with config"):
        client.load("m", previous=True, config={})


def test_a_failed_reload_does_not_replace_the_previous_generation(root: Path, client: shmserve.Client) -> None:
    folder = generation(root, "failing", 1)
    client.load("failing")
    renew(folder, 2)
    client.load("failing")
    renew(folder, "nothing")
    with pytest.raises(Unavailable):
        client.load("failing")
    assert answer(client, "failing") == 2
    client.load("failing", previous=True)
    assert answer(client, "failing") == 1


def test_a_rollback_of_versions_and_overrides(root: Path, client: shmserve.Client) -> None:
    generation(root, "versions", 1)
    client.load("versions")
    generation(root, "versions", 2, version=2)
    client.load("versions")
    assert ready(client, "versions") == ["2"]
    client.load("versions", previous=True)
    assert ready(client, "versions") == ["1"]
    files = {"7/model.py": GENERATION.encode(), "7/generation": b"7"}
    client.load("versions", config={"backend": "python", "max_batch_size": 8, **tensors()}, files=files)
    assert answer(client, "versions") == 7
    for expected in (1, 7):
        client.load("versions", previous=True)
        assert answer(client, "versions") == expected


def tensors() -> dict[str, object]:
    tensor = {"data_type": "TYPE_FP32", "dims": [-1]}
    return {"input": [{"name": "x", **tensor}], "output": [{"name": "y", **tensor}]}


def test_a_change_of_the_number_of_instances_is_not_a_generation(root: Path, client: shmserve.Client) -> None:
    folder = generation(root, "counted", 1)
    client.load("counted")
    write(folder / "config.pbtxt", PYTHON + group(2) + policy("all { }"))
    client.load("counted")
    with pytest.raises(NotFound, match="no previous generation"):
        client.load("counted", previous=True)


def test_a_rollback_over_http_and_by_the_command_line(tmp_path: Path) -> None:
    folder = generation(tmp_path, "m", 1)
    roles = ("--http-roles", "infer,observe,operate")
    with Server(tmp_path, *EXPLICIT, *roles, gateway=True) as server, server.client() as client:

        def load(parameters: Mapping[str, object]) -> tuple[int, str]:
            with closing(http.client.HTTPConnection(server.endpoints["http"], timeout=60)) as connection:
                connection.request("POST", "/v2/repository/models/m/load", json.dumps({"parameters": parameters}))
                response = connection.getresponse()
                return response.status, response.read().decode()

        renew(folder, 2)
        assert load({})[0] == 200
        assert load({"previous": True})[0] == 200
        assert answer(client, "m") == 1
        for wrong, text in (({"previous": "yes"}, "must be true or false"), ({"config": True}, "must be a string")):
            status, error = load(wrong)
            assert (status, text in error) == (400, True)
        run_cli(server, "load", "m", "--previous")
        assert answer(client, "m") == 2

"""A version keeps its loaded state while its files change, and a load can be rolled back.

A model answers with the number that it read when it was loaded.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import onnx
import pytest

import shmserve
from shmserve.errors import InvalidRequest, NotFound, Unavailable
from shmserve.repo.storage.generation import FILE_BYTES
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
    renew,
    until,
    write,
)
from tests.support.model_files import write_model
from tests.support.patience import PATIENCE_S
from tests.support.workers.models.worker_models import Graph

pytestmark = pytest.mark.process

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
    return {future.result(PATIENCE_S)["y"][0, 0].item() for future in futures}


def test_a_restarted_worker_reads_the_loaded_files(root: Path, client: shmserve.Client) -> None:
    """So does an instance that is added later, while the rest of the version stays."""
    folder = generation(root, "restarted", 1, group(2))
    write(folder / "1" / "helper.py", "FACTOR = 1\n")
    source = GENERATION.replace("import os\n", "import os\nfrom helper import FACTOR\n")
    write(folder / "1" / "model.py", source.replace("float(", "FACTOR * float("))
    client.load("restarted")
    assert index(client)["restarted/1"]["changed_on_disk"] is False
    state = (folder / "1" / "generation").stat()
    (folder / "1" / "generation").write_text("2")  # in place, with the same size and time: this cannot be detected
    os.utime(folder / "1" / "generation", ns=(state.st_atime_ns, state.st_mtime_ns))
    write(folder / "config.pbtxt", PYTHON + group(3))
    client.load("restarted")
    assert len(pids(client, "restarted")) == 3
    with pytest.raises(NotFound, match="no previous generation"):  # the number of instances is not one
        client.load("restarted", previous=True)
    write(folder / "1" / "helper.py", "FACTOR = 100\n")
    (folder / "1" / "model.py").write_text("this is not Python")
    until(client, lambda: index(client)["restarted/1"]["changed_on_disk"])
    assert answers(client, "restarted") == {1}
    kill_and_wait(client, "restarted")
    assert answers(client, "restarted") == {1}


def large(number: int) -> str:
    """The text of a number, in a file that is linked instead of copied."""
    return str(number).zfill(FILE_BYTES + number)


def test_a_large_file_that_was_written_to_is_refused(root: Path, client: shmserve.Client) -> None:
    """A replaced file is kept."""
    folder = generation(root, "written", large(1))
    client.load("written")
    renew(folder, large(2))
    client.load("written")
    client.load("written", previous=True)
    assert answer(client, "written") == 1
    client.load("written")
    (folder / "1" / "generation").write_text(large(33))
    client.load("written")
    with pytest.raises(Unavailable, match=rf"{CHANGED} \(size {FILE_BYTES + 2} -> {FILE_BYTES + 33}\)"):
        client.load("written", previous=True)
    assert answer(client, "written") == 33
    (folder / "1" / "generation").write_text(large(444))
    kill(client, "written")
    until(client, lambda: f"{CHANGED} (size {FILE_BYTES + 33} -> {FILE_BYTES + 444})" in json.dumps(client.models()))
    assert str(root) not in json.dumps(client.models())
    client.load("written")
    assert answers(client, "written") == {444}


def scale(folder: Path, number: float, external: bool = False) -> None:
    """An ONNX model that answers with its number. The file with its weights is large."""
    graph = Graph().input("x", "FP32", [-1, 3]).output("y", "FP32", [-1, 3])
    path = graph.weight("w", np.full(3, number, np.float32)).node("Mul", ["x", "w"], ["y"]).save(folder)
    model = onnx.load(str(path))
    if external:
        onnx.save(model, str(path), save_as_external_data=True, location="w.bin", size_threshold=0)
        os.truncate(path.with_name("w.bin"), FILE_BYTES + 1)
    else:
        model.doc_string = "x" * FILE_BYTES
        onnx.save(model, str(path))


@pytest.mark.parametrize("external", [False, True])
def test_replaced_weights_wait_for_a_load(root: Path, client: shmserve.Client, tmp_path: Path, external: bool) -> None:
    """The engine itself opens the files of a generation, also those beside the model."""
    name = f"external_{external}"
    scale(write_model(root, name, ONNX.replace("-1", "3") + group(2)), 1, external)
    client.load(name)
    scale(tmp_path / name, 2, external)
    for path in (tmp_path / name / "1").iterdir():
        path.replace(root / name / "1" / path.name)
    kill_and_wait(client, name)
    assert answers(client, name) == {1}
    client.load(name)
    assert answers(client, name) == {2}


def test_linked_files_are_removed_with_their_version(tmp_path: Path) -> None:
    """The server removes them; if it was killed, the next server does."""
    folder = generation(tmp_path, "m", large(1))
    options = ("--model-control-mode", "explicit", "--load-model", "*")
    with Server(tmp_path, *options) as server:
        place = server.runtime_dir / "generations"

        def linked() -> list[str]:
            return [target for target in descriptors_of(server.pid) if target.startswith(str(folder))]

        with server.client() as client:
            assert len(list(place.iterdir())) == 1
            assert len(linked()) == 1
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


def test_a_second_rollback_undoes_the_first(server: Server, root: Path, client: shmserve.Client) -> None:
    folder = generation(root, "m", 1, group(2))
    client.load("m")
    renew(folder, 2)
    client.load("m")
    renew(folder, "nothing")
    with pytest.raises(Unavailable):
        client.load("m")
    assert answer(client, "m") == 2
    renew(folder, 2)
    assert client.load("m", previous=True)["changed"] is True
    assert answer(client, "m") == 1, "a failed load does not replace the previous generation"
    kill_and_wait(client, "m")
    assert answer(client, "m") == 1
    assert (folder / "1" / "generation").read_text() == "2", "the repository does not change"
    client.load("m", previous=True)
    assert answer(client, "m") == 2
    client.load("m", previous=True)
    until(client, lambda: len(list((server.runtime_dir / "generations").iterdir())) == 2, "two are kept")
    client.unload("m")
    with pytest.raises(NotFound, match="no previous generation"):
        client.load("m", previous=True)
    with pytest.raises(InvalidRequest, match="cannot be combined with config"):
        client.load("m", previous=True, config={})

"""`shmserve init`: the generated models of every kind are served and answer as described, on one server."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import shmserve
from shmserve.clients.cli.commands import init
from shmserve.repo.check import check
from shmserve.repo.samples import EXAMPLES
from shmserve.testing import Server
from tests.support import commands, foreign_models

pytestmark = pytest.mark.process

MLP, CNN = (EXAMPLES / name / "1" / "model.onnx" for name in ("mlp", "cnn"))


class Site(NamedTuple):
    server: Server
    folder: Path
    printed: Mapping[str, Any]
    """Name -> what `init --json` printed."""


TRAINED = ["trained"] if find_spec("torch") else []
"""The template that includes weights."""
needs_torch = pytest.mark.skipif(not find_spec("torch"), reason="PyTorch is not installed")
needs_sklearn = pytest.mark.skipif(not find_spec("sklearn"), reason="scikit-learn is not installed")


def run(*words: str | Path) -> str:
    code, out, err = commands.run(*words)
    assert code == 0, err
    return out


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("init")
    sources: dict[str, Any] = {"mlp": MLP, "cnn": CNN, "my scale": "python"}
    for kind, name in (("torch", "network"), ("sklearn", "iris")):
        if find_spec(kind):
            sources |= {name: kind} | {path.stem: path for path in foreign_models.make(kind, folder)}
    repository = folder / "models"
    printed = {
        name: json.loads(run("init", name, "--from", source, "--repository", repository, "--json"))
        for name, source in sources.items()
    }
    if "network" in sources:
        run("init", "trained", "--from", "torch", "--repository", repository)
        shutil.copy(folder / "weights.pth", repository / "trained" / "1")
    with Server(repository, "--strict-readiness", "false") as server:
        yield Site(server, folder, printed)


@pytest.fixture
def client(site: Site) -> Iterator[shmserve.Client]:
    with site.server.client() as client:
        yield client


def test_generated_models_pass_the_check_and_become_ready(site: Site, client: shmserve.Client) -> None:
    assert {entry["name"]: entry["state"] for entry in client.models()} == dict.fromkeys(
        [*site.printed, *TRAINED], "READY"
    )
    assert check([site.folder / "models"]).all() == []
    for name, document in site.printed.items():
        files = {path for path in (site.folder / "models" / name).rglob("*") if path.is_file()}
        assert set(map(Path, document["files"])) == files


def test_the_printed_commands_work(site: Site) -> None:
    for name, document in site.printed.items():
        serve, infer = map(shlex.split, document["commands"])
        assert serve == ["shmserve", "serve", "--model-repository", str(site.folder / "models")]
        answer = json.loads(run(*infer[1:], "--json", "--runtime-dir", site.server.runtime_dir))
        assert answer["outputs"], name


def test_python(client: shmserve.Client) -> None:
    assert client.infer("my scale", {"X": [[1, -2]]})["Y"].tolist() == [[2.5, -5]]
    with pytest.raises(shmserve.ModelFailed, match="not numbers"):
        client.infer("my scale", {"X": [[float("nan")]]})


@needs_sklearn
def test_sklearn(site: Site, client: shmserve.Client) -> None:
    numbers, text, line = (foreign_models.answers(site.folder / name) for name in foreign_models.SKLEARN)
    found = client.infer("numbers", {"x": numbers["x"]})
    assert found["label"].tolist() == numbers["label"].tolist()
    np.testing.assert_allclose(found["probabilities"], numbers["probabilities"], rtol=1e-6)
    np.testing.assert_allclose(client.infer("line", {"x": line["x"]})["label"], line["label"])
    found = client.infer("text", {"text": [["very good"], ["bad bad"]]})
    assert [[label.decode() for label in row] for row in found["label"]] == text["label"].tolist() == [["+"], ["-"]]
    assert client.infer("iris", {"x": [[5.1, 3.5, 1.4, 0.2]]})["label"].tolist() == [[0]]


@needs_torch
def test_torch(site: Site, client: shmserve.Client) -> None:
    image, words, program = (foreign_models.answers(site.folder / name) for name in foreign_models.TORCH)
    for name, expected in (("image", image), ("program", program)):
        found = client.infer(name, {"image": expected["image"]})["OUTPUT__0"]
        np.testing.assert_allclose(found, expected["scores"], rtol=1e-4, atol=1e-6)
    mean, rows = client.infer("words", {"ids": words["ids"]}).values()
    np.testing.assert_allclose(mean, words["mean"], rtol=1e-5)
    np.testing.assert_array_equal(rows, words["rows"])
    assert client.config("image")["input"][0]["dims"] == [3, -1, -1]
    assert client.config("program")["input"][0]["dims"] == [3, 8, 8]
    assert "check them" in site.printed["image"]["warning"]
    assert site.printed["program"]["warning"] == ""
    scores = client.infer("network", {"x": [[1, 2, 3, 4]]})["scores"]
    assert scores.shape == (1, 3)
    assert scores.sum() == pytest.approx(1)
    (expected,) = foreign_models.answers(site.folder / "weights.pth").values()
    np.testing.assert_allclose(client.infer("trained", {"x": [[1, 2, 3, 4]]})["scores"], expected, rtol=1e-5)


@needs_torch
def test_a_wrong_file_is_an_error_a_crashed_reader_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An uncaught exception also ends the reader with exit code 1."""
    file, repository = tmp_path / "model.pt", tmp_path / "models"
    file.write_bytes(b"not an archive")
    words: list[str | Path] = ["init", "m", "--from", file, "--repository", repository]
    code, _, error = commands.run(*words)
    assert (code, "model.pt" in error) == (1, True)
    assert not (repository / "m").exists()
    (tmp_path / "crashes.py").write_text("raise RuntimeError('of the engine')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(init, "DESCRIBE", "crashes")
    code, _, error = commands.run(*words)
    assert code == 0
    assert f"warning: reading {file} ended with 1" in error
    assert "RuntimeError: of the engine" in error
    assert (repository / "m" / "1" / "model.pt").is_file()

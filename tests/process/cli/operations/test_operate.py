"""Loading and unloading by command and by client, against a real server. The oracles are /proc and bare numpy."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shmserve
from shmserve.clients.cli import main
from shmserve.repo import samples
from shmserve.testing import Server
from tests.support.clients.client_faces import FACES
from tests.support.launch import await_end

pytestmark = pytest.mark.process

X = np.random.default_rng(7).standard_normal((2, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    samples.build(place / "all", lambda text: None)
    for name in ("mlp", "add_sub"):
        shutil.move(place / "all" / name, place / "served" / name)
    return place / "served"


@pytest.fixture(scope="module")
def shared(repository: Path) -> Iterator[Server]:
    with Server(repository, "--model-control-mode", "explicit") as made:
        yield made


@pytest.fixture
def server(shared: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The server without loaded models."""
    monkeypatch.setenv("SHMSERVE_RUNTIME_DIR", str(shared.runtime_dir))
    monkeypatch.delenv("SHMSERVE_URL", raising=False)
    yield shared
    with shared.client() as client:
        for name in {entry["name"] for entry in client.models()}:
            client.unload(name)


def pids(server: Server, model: str) -> list[int]:
    with server.client() as client:
        return [
            instance["pid"]
            for entry in client.models()
            for instance in entry.get("instances", ())
            if entry["name"] == model and instance["state"] == "ready"
        ]


def test_a_model_is_loaded_restarted_and_unloaded(
    server: Server, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> str:
        code = main.main(words)
        said = capsys.readouterr()
        assert code == 0, said.err
        assert said.err == ""
        return said.out

    lines = run("models").splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [["add_sub", "-", "not"], ["mlp", "-", "not"]]
    said = run("load", "mlp", "add_sub").splitlines()
    assert [line.split(" after ")[0] for line in said] == ["mlp: version 1 is READY", "add_sub: version 1 is READY"]
    assert run("load", "mlp") == "mlp: nothing has changed; version 1 is READY\n"
    config = repository / "mlp" / "config.pbtxt"
    text = config.read_text()
    config.write_text(text.replace("count: 1", "count: 2"))
    assert run("load", "mlp").startswith("mlp: version 1 is READY"), "with another instance"
    assert len(pids(server, "mlp")) == 2
    config.write_text(text)
    assert run("load", "mlp").startswith("mlp: version 1 is READY"), "with the first one only"
    assert run("ready", "mlp") == "model 'mlp' is ready\n"
    row = run("models").splitlines()[2].split()
    (pid,) = pids(server, "mlp")
    assert row[:7] == ["mlp", "1", "READY", "1/1", "0", "0", str(pid)]
    assert Path(f"/proc/{pid}").exists()
    assert f"  {pid}  " in run("models", "--instances")

    assert run("restart", "mlp") == "mlp: version 1 restarted\n"
    (after,) = pids(server, "mlp")
    assert after != pid
    await_end(pid)
    assert run("unload", "mlp") == "mlp: version 1 unloaded\n"
    assert not Path(f"/proc/{after}").exists(), "unload waits for the end"
    assert pids(server, "mlp") == []
    entries = {entry["name"]: entry for entry in json.loads(run("models", "--json"))}
    assert entries["mlp"]["state"] == "UNAVAILABLE"
    assert entries["add_sub"]["state"] == "READY"
    assert run("load", "--all", "--json").count('"READY"') == 2


def test_misspelled_model_names_are_reported_by_each_command(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = "Request for unknown model: 'mpl' is not found"
    for words, text in (
        ("logs mpl", unknown),  # first: operations on any name leave records about it
        ("load mpl", "failed to load 'mpl', failed to poll from model repository: no model repository has it"),
        ("unload mpl", unknown),
        ("unload mpl --no-wait", unknown),
        ("restart mpl", "cannot restart model 'mpl': it is not served"),
        ("restart mpl --version 3", "cannot restart version 3 of model 'mpl': it is not served"),
        ("config mpl", unknown),
        ("stats mpl", unknown),
        ("models mpl", "unknown model 'mpl'"),
        ("ready mpl", unknown),
        ("infer mpl --random", unknown),
        ("bench mpl --window 50ms", unknown),
    ):
        assert main.main(words.split()) == 1, words
        assert capsys.readouterr().err == f"shmserve {words.split()[0]}: {text}; did you mean 'mlp'?\n"
    for _ in range(2):  # models of the repository may already be unloaded
        assert main.main(["unload", "mlp"]) == 0
    assert main.main(["load", "mlp"]) == 0


def test_config_prints_the_origin_of_each_value(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["load", "mlp"]) == 0
    capsys.readouterr()
    assert main.main(["config", "mlp"]) == 0
    said = capsys.readouterr().out
    assert "max_batch_size: 32  # file" in said
    assert main.main(["config", "mlp", "--json"]) == 0
    config = json.loads(capsys.readouterr().out)
    assert config["max_batch_size"] == 32
    assert main.main(["config", "mlp", "--json", "--origins"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert both["config"] == config
    assert both["origins"]["max_batch_size"] == "file"
    assert set(both["origins"].values()) <= {"file", "override", "model", "default"}


def test_failed_operations_print_the_reason_and_keep_the_served_version(
    server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main.main(["load", "nobody", "mlp"]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("mlp: version 1 is READY after ")
    assert said.err.startswith("shmserve load: failed to load 'nobody', failed to poll from model repository")
    assert main.main(["restart", "nobody"]) == 1
    assert "nobody" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text('{"backend": "onnxruntime", "max_bach_size": 3}')
    assert main.main(["load", "mlp", "--config-json", str(tmp_path / "bad.json")]) == 1
    assert "max_batch_size" in capsys.readouterr().err, "the nearest name"
    assert main.main(["infer", "mlp", "--random"]) == 0, "the old one still serves"


@pytest.mark.parametrize(("face", "link"), [("sync", "url"), ("sync", "zmq_url"), ("uvloop", "url")])
def test_a_model_is_loaded_from_files_sent_by_the_client(
    face: str, link: str, server: Server, repository: Path
) -> None:
    """Sends megabytes; the responses equal those of the file."""
    model = repository / "mlp" / "1" / "model.onnx"
    config = {
        "backend": "onnxruntime",
        "max_batch_size": 8,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [64]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [10]}],
    }
    ballast = os.urandom(5_000_000)
    with FACES[face](getattr(server, link)) as client:
        client.load("mlp")
        expected = client.infer("mlp", {"x": X})["y"].copy()
        said = client.load("sent", config=config, files={"1/model.onnx": model, "1/ballast": ballast})
        assert [(entry["version"], entry["state"]) for entry in said["versions"]] == [("1", "READY")]
        assert client.config("sent")["max_batch_size"] == 8
        np.testing.assert_allclose(client.infer("sent", {"x": X})["y"], expected, rtol=1e-5)
        assert client.origins("sent")["origins"]["max_batch_size"] == "override"
        client.unload("sent")
        with pytest.raises(shmserve.ServeError):
            client.infer("sent", {"x": X})

"""Loading and unloading by command, against a real server, with processes that start and end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve.repo import samples
from shmserve.testing import Server
from tests.process.cli.commands import run
from tests.support.launch import await_end

pytestmark = pytest.mark.process


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


def printed(*words: str) -> str:
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    return out


def test_a_model_is_loaded_restarted_and_unloaded(server: Server, repository: Path) -> None:
    lines = printed("models").splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [["add_sub", "-", "not"], ["mlp", "-", "not"]]
    said = printed("load", "mlp", "add_sub").splitlines()
    assert [line.split(" after ")[0] for line in said] == ["mlp: version 1 is READY", "add_sub: version 1 is READY"]
    assert printed("load", "mlp") == "mlp: nothing has changed; version 1 is READY\n"
    config = repository / "mlp" / "config.pbtxt"
    text = config.read_text()
    config.write_text(text.replace("count: 1", "count: 2"))
    assert printed("load", "mlp").startswith("mlp: version 1 is READY"), "with another instance"
    assert len(pids(server, "mlp")) == 2
    config.write_text(text)
    assert printed("load", "mlp").startswith("mlp: version 1 is READY"), "with the first one only"
    assert "max_batch_size: 32  # file" in printed("config", "mlp")
    row = printed("models").splitlines()[2].split()
    (pid,) = pids(server, "mlp")
    assert row[:7] == ["mlp", "1", "READY", "1/1", "0", "0", str(pid)]
    assert Path(f"/proc/{pid}").exists()
    assert f"  {pid}  " in printed("models", "--instances")

    assert printed("restart", "mlp") == "mlp: version 1 restarted\n"
    (after,) = pids(server, "mlp")
    assert after != pid
    await_end(pid)
    assert printed("unload", "mlp") == "mlp: version 1 unloaded\n"
    assert not Path(f"/proc/{after}").exists(), "unload waits for the end"
    assert pids(server, "mlp") == []
    entries = {entry["name"]: entry for entry in json.loads(printed("models", "--json"))}
    assert entries["mlp"]["state"] == "UNAVAILABLE"
    assert entries["add_sub"]["state"] == "READY"
    assert printed("load", "--all", "--json").count('"READY"') == 2


def test_misspelled_model_names_are_reported_by_each_command(server: Server) -> None:
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
        error = f"shmserve {words.split()[0]}: {text}; did you mean 'mlp'?\n"
        assert run(*words.split()) == (1, "", error)
    for _ in range(2):  # models of the repository may already be unloaded
        assert printed("unload", "mlp")

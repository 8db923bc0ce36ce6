"""Repository agents in a real server: loads, reloads, rollbacks, restarts, and a killed server."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

import shmserve
from shmserve.testing import Server
from tests.process.models.loading.test_overrides import PYTHON as CONFIG
from tests.support import living
from tests.support.living import PYTHON, answer, generation, index, renew, until, write
from tests.support.repo.agents import agents_text, write_agent

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("agents")
    (place / "models").mkdir()
    write_agent(place / "agents", "notes")
    return place


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Server]:
    options = ("--repoagent-directory", str(place / "agents"), "--model-control-mode", "explicit")
    with TemporaryDirectory(dir="/dev/shm", prefix="shmserve-test-") as run:
        with Server(place / "models", *options, "--load-limit-secs", "30", runtime_dir=f"{run}/run") as server:
            yield server
        assert not list(Path(run).rglob("chain-*"))


def noting(place: Path, name: str, what: str = "") -> str:
    return agents_text(("notes", {"what": what, "called": "x", "notes": str(place / f"{name}.notes")}))


def notes(place: Path, name: str) -> list[str]:
    path = place / f"{name}.notes"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def chains(server: Server) -> list[Path]:
    return sorted(server.runtime_dir.glob("agents/chain-*"))


def test_a_replaced_directory_is_served(place: Path, server: Server, client: shmserve.Client) -> None:
    model = generation(place / "models", "r", 1, noting(place, "r", "replace"))
    client.load("r")
    assert answer(client, "r") == 101.0
    client.load("r")
    assert notes(place, "r") == ["load"], "nothing has changed"
    client.restart("r")
    assert answer(client, "r") == 101.0
    renew(model, 2)
    until(client, lambda: index(client, "r")["r/1"].get("changed_on_disk"), "changed on disk")
    client.load("r")
    assert answer(client, "r") == 102.0
    client.load("r", previous=True)
    assert answer(client, "r") == 101.0, "what the agents made is kept for a rollback"
    client.unload("r")
    until(client, lambda: notes(place, "r").count("unload") == 2 and not chains(server), "the agents know")


def test_what_was_checked_is_loaded(place: Path, client: shmserve.Client) -> None:
    model = generation(place / "models", "t", 1)
    digest = hashlib.sha256((model / "1" / "generation").read_bytes()).hexdigest()
    tamper = {"what": "tamper", "called": "x", "notes": str(place / "t.notes")}
    text = agents_text(("checksum", {"SHA256:1/generation": digest}), ("notes", tamper))
    write(model / "config.pbtxt", PYTHON + text)
    client.load("t")
    assert (model / "1" / "generation").read_text() == "9"
    assert answer(client, "t") == 1.0
    client.restart("t")
    assert answer(client, "t") == 1.0
    write(model / "1" / "generation", "1")
    write(
        model / "config.pbtxt", PYTHON + agents_text(("notes", tamper), ("checksum", {"SHA256:1/generation": digest}))
    )
    client.load("t")
    assert answer(client, "t") == 1.0, "the agent checks the copy that is loaded"


def test_an_agent_decrypts_a_model(place: Path, server: Server, client: shmserve.Client) -> None:
    import pyrage

    identity = pyrage.x25519.Identity.generate()
    (place / "key").write_text(str(identity))
    text = agents_text(("decrypt", {"identity_file": str(place / "key")}))
    model = generation(place / "models", "e", 7, text)
    for name in ("model.py", "generation"):
        plain = model / "1" / name
        plain.with_name(f"{name}.age").write_bytes(pyrage.encrypt(plain.read_bytes(), [identity.to_public()]))
        plain.unlink()
    client.load("e")
    assert answer(client, "e") == 7.0
    found = client.infer("e", {"x": np.ones((2, 3), np.float32)})["y"]
    assert found.tolist() == [[7.0] * 3] * 2
    client.unload("e")
    until(client, lambda: not chains(server) and not list(server.runtime_dir.glob("generations/*")), "nothing is left")


def test_files_of_a_load_call_are_passed_to_the_agents(place: Path, client: shmserve.Client) -> None:
    agent = {"name": "notes", "parameters": {"what": "replace", "called": "x", "notes": str(place / "f.notes")}}
    config = CONFIG | {"model_repository_agents": {"agents": [agent]}}
    client.load("f", config=config, files={"1/model.py": living.GENERATION.encode(), "1/generation": b"3"})
    assert answer(client, "f") == 103.0
    client.restart("f")
    assert answer(client, "f") == 103.0


def test_agents_are_notified_of_unloads_after_a_kill(place: Path, tmp_path: Path) -> None:
    generation(tmp_path / "models", "m", 1, noting(place, "m", "replace"))
    options = ("--repoagent-directory", str(place / "agents"))
    with Server(tmp_path / "models", *options, runtime_dir=tmp_path / "run") as server:
        with server.client() as client:
            assert answer(client, "m") == 101.0
        server.kill()
    assert notes(place, "m") == ["load"]
    with Server(tmp_path / "models", *options, runtime_dir=tmp_path / "run") as server, server.client() as client:
        assert notes(place, "m") == ["load", "unload", "load"]
        assert answer(client, "m") == 101.0
    assert notes(place, "m") == ["load", "unload", "load", "unload"]

"""Going back to what was served before the last load. The oracle is the number that a generation answers with."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

import shmserve
from shmserve.errors import InvalidRequest, NotFound, Unavailable
from shmserve.testing import Server
from tests.process.models.test_generations import ALL_LINKED, kill_and_wait, serving
from tests.support.living import GENERATION, PYTHON, answer, generation, group, pids, policy, ready, renew, until, write

pytestmark = pytest.mark.process

EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "m")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def test_back_and_forth(root: Path) -> None:
    folder = generation(root, "m", 1, group(2))
    with serving(root, *EXPLICIT) as (server, client):
        with pytest.raises(NotFound, match="failed to load 'm': it has no previous generation"):
            client.load("m", previous=True)
        renew(folder, 2)
        client.load("m")
        assert client.load("m")["changed"] is False, "which is no new generation"
        assert client.load("m", previous=True)["changed"] is True
        assert answer(client, "m") == 1
        kill_and_wait(client, "m")
        assert answer(client, "m") == 1
        assert (folder / "1" / "generation").read_text() == "2", "the repository is as it was"
        client.load("m", previous=True)
        assert answer(client, "m") == 2
        renew(folder, 3)
        client.load("m")
        until(
            client, lambda: len(list((server.runtime_dir / "generations").iterdir())) == 2, "the first one is removed"
        )
        client.load("m", previous=True)
        assert answer(client, "m") == 2
        client.load("m")
        assert answer(client, "m") == 3, "a load is of what is in the repository"
        client.unload("m")
        with pytest.raises(NotFound, match="no previous generation"):
            client.load("m", previous=True)
        with pytest.raises(InvalidRequest, match="cannot be combined with config"):
            client.load("m", previous=True, config={})


def test_a_reload_that_fails_is_not_gone_back_from(root: Path) -> None:
    folder = generation(root, "m", 1)
    with serving(root, *EXPLICIT) as (_, client):
        renew(folder, 2)
        client.load("m")
        renew(folder, "nothing")
        with pytest.raises(Unavailable):
            client.load("m")
        assert answer(client, "m") == 2
        client.load("m", previous=True)
        assert answer(client, "m") == 1


def test_large_files(root: Path) -> None:
    """Replaced ones are still there; one that was written to is not, and what is served goes on."""
    folder = generation(root, "m", 1)
    with serving(root, *EXPLICIT, *ALL_LINKED) as (_, client):
        renew(folder, 2)
        client.load("m")
        client.load("m", previous=True)
        assert answer(client, "m") == 1
        client.load("m")
        (folder / "1" / "generation").write_text("33")
        client.load("m")
        with pytest.raises(Unavailable, match=r"1/generation changed on disk since it was loaded \(size 1 -> 2\)"):
            client.load("m", previous=True)
        assert answer(client, "m") == 33


def test_versions_and_overrides(root: Path) -> None:
    folder = generation(root, "m", 1)
    with serving(root, *EXPLICIT) as (_, client):
        (folder / "2").mkdir()
        for name, text in (("model.py", GENERATION), ("generation", "2")):
            write(folder / "2" / name, text)
        client.load("m")
        assert ready(client, "m") == ["2"]
        client.load("m", previous=True)
        assert ready(client, "m") == ["1"]
        files = {"7/model.py": GENERATION.encode(), "7/generation": b"7"}
        client.load("m", config={"backend": "python", "max_batch_size": 8, **tensors()}, files=files)
        assert answer(client, "m") == 7
        client.load("m", previous=True)
        assert answer(client, "m") == 1
        client.load("m", previous=True)
        assert answer(client, "m") == 7


def tensors() -> dict[str, object]:
    return {
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}],
    }


def look(server: Server, client: shmserve.Client, root: Path, name: str) -> None:
    """The repositories are looked at: a model that is new is loaded."""
    generation(root, name, 9)
    os.kill(server.pid, signal.SIGHUP)
    until(client, lambda: ready(client, name) == ["1"])


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_what_was_gone_back_from_is_loaded_again_only_when_it_changes(root: Path, mode: str) -> None:
    folder = generation(root, "m", 1)
    more = ("--settle-secs", "0", "--repository-poll-secs", "3600") if mode == "poll" else ()
    with serving(root, "--model-control-mode", mode, *more) as (server, client):
        renew(folder, 2)
        look(server, client, root, "a")
        until(client, lambda: answer(client, "m") == 2)
        client.load("m", previous=True)
        before = pids(client, "m")
        look(server, client, root, "b")
        assert (answer(client, "m"), pids(client, "m")) == (1, before)
        renew(folder, 3)
        look(server, client, root, "c")
        until(client, lambda: answer(client, "m") == 3)


def test_over_http_and_by_the_command_line(root: Path) -> None:
    folder = generation(root, "m", 1)
    roles = ("--http-roles", "infer,observe,operate")
    with Server(root, *EXPLICIT, *roles, gateway=True) as server, server.client() as client:

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
            status, said = load(wrong)
            assert (status, text in said) == (400, True)
        command = [sys.executable, "-m", "shmserve.clients.cli.main", "load", "m", "--previous"]
        done = subprocess.run(
            [*command, "--runtime-dir", str(server.runtime_dir)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, answer(client, "m")) == (0, 2), done.stderr


def test_a_count_of_instances_is_no_generation(root: Path) -> None:
    folder = generation(root, "m", 1)
    with serving(root, *EXPLICIT) as (_, client):
        write(folder / "config.pbtxt", PYTHON + group(2) + policy("all { }"))
        client.load("m")
        with pytest.raises(NotFound, match="no previous generation"):
            client.load("m", previous=True)

"""Loads of chosen versions, shares and aliases, through the clients, the command line and HTTP."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from threading import Thread

import pytest

import shmserve
from shmserve.errors import InvalidRequest, NotFound, Unavailable
from shmserve.testing import Server
from tests.support.living import ONE, answer, generation, ready

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("models")
    for version in (1, 2, 3):
        generation(root, "m", version, version=version)
    with Server(root, "--model-control-mode", "explicit", gateway=True) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[shmserve.Client]:
    with server.client() as made:
        made.unload("m")
        yield made
        made.unload("m")


def cli(server: Server, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "shmserve.clients.cli.main", *words, "--runtime-dir", str(server.runtime_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_versions_of_a_load(client: shmserve.Client) -> None:
    client.load("m")
    assert ready(client, "m") == ["3"], "the version policy selects the latest"
    client.load("m", versions=[1, 2])
    assert ready(client, "m") == ["1", "2"]
    assert (answer(client, "m"), answer(client, "m", 1)) == (2, 1)
    with pytest.raises(InvalidRequest, match="7: has no directory"):
        client.load("m", versions=[2, 7])
    assert ready(client, "m") == ["1", "2"]
    client.load("m")
    assert ready(client, "m") == ["3"]
    with pytest.raises(InvalidRequest, match="it cannot be combined with"):
        client.load("m", versions=[2], previous=True)
    with pytest.raises(InvalidRequest, match="versions"):
        client.load("m", versions=[0])


def test_a_canary_is_rolled_back_without_a_lost_request(server: Server, client: shmserve.Client) -> None:
    client.load("m", versions=[2])
    client.traffic("m", shares={3: 0})
    client.load("m", versions=[2, 3])
    assert [answer(client, "m") for _ in range(10)] == [2] * 10, "a version with a share of 0 gets nothing"
    assert client.traffic("m", shares={3: 20})["now"] == {"2": 80.0, "3": 20.0}
    found = Counter(answer(client, "m") for _ in range(200))
    assert 25 <= found[3] <= 55
    assert found[2] + found[3] == 200
    answers: list[float] = []
    going = True

    def call() -> None:
        with server.client() as other:
            while going:
                answers.append(answer(other, "m"))

    caller = Thread(target=call)
    caller.start()
    code, text = cli(server, "traffic", "m", "--all", "2")
    assert code == 0
    assert text.split() == ["version", "now", "share", "aliases", "2", "100", "%", "100", "%"]
    client.load("m", versions=[2])
    going = False
    caller.join(60)
    assert not caller.is_alive()
    assert set(answers) <= {2, 3}
    assert answer(client, "m") == 2


def test_aliases(server: Server, client: shmserve.Client) -> None:
    client.load("m", versions=[1, 3])
    assert client.traffic("m", aliases={"prod": 1})["aliases"] == {"prod": 1}
    assert (answer(client, "m@prod"), answer(client, "m")) == (1, 3)
    assert client.infer("m@prod", {"x": ONE.tolist()})["y"][0, 0] == 1, "metadata is found, too"
    assert client.metadata("m@prod")["name"] == "m"
    assert client.ready("m@prod")
    with closing(http.client.HTTPConnection(server.endpoints["http"])) as connection:
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 1, 1]}]}
        connection.request("POST", "/v2/models/m@prod/infer", json.dumps(body))
        found = json.loads(connection.getresponse().read())
    assert found["outputs"][0]["data"][0] == 1
    assert found["model_version"] == "1"
    client.load("m", versions=[3])
    with pytest.raises((NotFound, Unavailable)):  # unloading, or unloaded
        answer(client, "m@prod")
    code, text = cli(
        server, "traffic", "m", "--alias", "prod=3", "--alias", "next=3", "--remove-alias", "none", "--json"
    )
    assert code == 0
    assert json.loads(text)["aliases"] == {"next": 3, "prod": 3}
    assert answer(client, "m@prod") == 3


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"shares": {1: 60, 3: 50}}, "the shares of model 'm' are 110 % together, expected at most 100 %"),
        ({"shares": {1: 101}}, "the traffic of model 'm' cannot be set"),
        ({"shares": {0: 10}}, "the traffic of model 'm' cannot be set"),
        ({"aliases": {"a@b": 1}}, "alias 'a@b': expected up to 64 letters"),
        ({"aliases": {"": 1}}, "alias '': expected up to 64 letters"),
    ],
)
def test_wrong_changes_change_nothing(client: shmserve.Client, changes: dict[str, dict[int, int]], text: str) -> None:
    client.load("m")
    client.traffic("m", shares={3: 50}, aliases={"prod": 3})
    before = client.traffic("m")
    with pytest.raises(InvalidRequest, match=text):
        client.traffic("m", **changes)  # type: ignore[arg-type]
    assert client.traffic("m") == before


def test_models_that_are_not_loaded_have_no_traffic(client: shmserve.Client) -> None:
    with pytest.raises(NotFound):
        client.traffic("unknown")
    client.load("m")
    client.traffic("m", aliases={"prod": 3})
    client.unload("m")
    client.load("m")
    assert client.traffic("m")["aliases"] == {}

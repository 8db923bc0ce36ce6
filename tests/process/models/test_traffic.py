"""Loads of chosen versions, shares and aliases, through the clients, the command line and HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import shmserve
from shmserve.errors import InvalidRequest, NotFound, Unavailable
from shmserve.testing import Server
from tests.support.broker.metrics import Seen
from tests.support.commands import run
from tests.support.gateway.served_gateways import ask
from tests.support.living import ONE, PYTHON, answer, generation, pids, policy, ready, write
from tests.support.model_files import parameters
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    for version in (1, 2, 3):
        generation(repository, "m", version, version=version)
    roles = ("--http-roles", "infer,observe,operate")
    with Server(repository, "--model-control-mode", "explicit", *roles, gateway=True) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[shmserve.Client]:
    with server.client() as made:
        made.unload("m")
        yield made
        made.unload("m")


def cli(server: Server, *words: str) -> tuple[int, str]:
    code, out, err = run(*words, "--runtime-dir", server.runtime_dir)
    return code, out + err


def over_http(server: Server, path: str, body: Any) -> tuple[int, bytes]:
    return ask(int(server.endpoints["http"].rpartition(":")[2]), f"/v2/{path}", body)


def test_a_canary_is_rolled_back_without_a_lost_request(server: Server, client: shmserve.Client) -> None:
    client.load("m", versions=[2])
    client.traffic("m", shares={3: 0})
    client.load("m", versions=[2, 3])
    assert [answer(client, "m") for _ in range(10)] == [2] * 10, "a version with a share of 0 gets nothing"
    assert client.traffic("m", shares={3: 20})["now"] == {"2": 80.0, "3": 20.0}
    assert Seen(client.metrics())("shmserve_model_share_percent", model="m", version="3") == 20
    assert "20 %" in cli(server, "models", "m")[1]
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
    caller.join(PATIENCE_S)
    assert not caller.is_alive()
    assert set(answers) <= {2, 3}
    assert answer(client, "m") == 2


def test_a_load_selects_versions_over_http(server: Server, client: shmserve.Client) -> None:
    def load(parameters: dict[str, Any]) -> tuple[int, str]:
        status, text = over_http(server, "repository/models/m/load", {"parameters": parameters})
        return status, text.decode()

    assert load({"versions": "1,3"})[0] == 200
    assert ready(client, "m") == ["1", "3"]
    assert load({"versions": 2})[0] == 200
    assert ready(client, "m") == ["2"]
    for wrong, text in (
        ({"versions": "latest"}, "'latest'; expected numbers, such as '2' or '2,3'"),
        ({"versions": True}, "must be a string"),
        ({"versions": "0"}, "versions"),
        ({"versions": "2,7"}, "7: has no directory"),
        ({"versions": "2", "previous": True}, "cannot be combined"),
        ({"previous": "yes"}, "must be true or false"),
        ({"config": True}, "must be a string"),
    ):
        status, error = load(wrong)
        assert (status, text in error) == (400, True), error
    assert ready(client, "m") == ["2"]
    assert load({"previous": True})[0] == 200
    assert ready(client, "m") == ["1", "3"]


def test_aliases_select_a_version(server: Server, client: shmserve.Client) -> None:
    client.load("m", versions=[1, 3])
    assert client.traffic("m", aliases={"prod": 1})["aliases"] == {"prod": 1}
    assert (answer(client, "m@prod"), answer(client, "m")) == (1, 3)
    assert client.infer("m@prod", {"x": ONE.tolist()})["y"][0, 0] == 1, "metadata is found, too"
    assert client.metadata("m@prod")["name"] == "m"
    assert client.ready("m@prod")
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 1, 1]}]}
    found = json.loads(over_http(server, "models/m@prod/infer", body)[1])
    assert (found["outputs"][0]["data"][0], found["model_version"]) == (1, "1")
    client.load("m", versions=[3])
    with pytest.raises((NotFound, Unavailable)):  # unloading, or unloaded
        answer(client, "m@prod")
    words = ("--alias", "prod=3", "--alias", "next=3", "--remove-alias", "none", "--json")
    code, text = cli(server, "traffic", "m", *words)
    assert code == 0
    assert json.loads(text)["aliases"] == {"next": 3, "prod": 3}
    assert answer(client, "m@prod") == 3
    before = client.traffic("m")
    for changes, text in (
        ({"shares": {1: 60, 3: 50}}, "the shares of model 'm' add up to 110 %; the maximum is 100 %"),
        ({"shares": {1: 101}}, "invalid body of 'set_traffic'"),
        ({"shares": {0: 10}}, "invalid body of 'set_traffic'"),
        ({"aliases": {"a@b": 1}}, "alias 'a@b': expected up to 64 letters"),
        ({"aliases": {"": 1}}, "alias '': expected up to 64 letters"),
    ):
        with pytest.raises(InvalidRequest, match=text):
            client.traffic("m", **changes)
        assert client.traffic("m") == before
    with pytest.raises(NotFound):
        client.traffic("unknown")


def test_a_load_changes_the_traffic_of_a_configuration_in_place(client: shmserve.Client, repository: Path) -> None:
    for version in (1, 2):
        generation(repository, "given", version, version=version)
    found = []
    for traffic in ("1=100", "2=100"):
        more = parameters(traffic=traffic, aliases="prod=2")
        write(repository / "given" / "config.pbtxt", PYTHON + policy("all { }") + more)
        client.load("given")
        found.append((answer(client, "given"), answer(client, "given@prod"), pids(client, "given")))
    assert found == [(1, 2, found[0][2]), (2, 2, found[0][2])]
    client.unload("given")

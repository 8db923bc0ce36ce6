"""Load calls that bring a configuration, and files. The oracles are /proc, the runtime directory and the answers."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shmserve
from shmserve.broker.models.overrides import HEADER_BYTES, IN_MEMORY
from shmserve.protocol import codec
from shmserve.protocol.messages import (
    FIELD_BYTES,
    PROTOCOL,
    Answer,
    Ask,
    BrokerMessage,
    Cancel,
    Fail,
    Hello,
    Ping,
    Pong,
    Welcome,
)
from shmserve.testing import Server
from tests.support import living
from tests.support.living import answer, generation, identity, index, pids, states, until

pytestmark = pytest.mark.process

LIMIT = 4 << 20
TENSOR = [{"data_type": "TYPE_FP32", "dims": [-1]}]
CONFIG: dict[str, Any] = {
    "backend": "identity",
    "max_batch_size": 3,
    "input": [{"name": "x", **TENSOR[0]}],
    "output": [{"name": "y", **TENSOR[0]}],
}
PYTHON = CONFIG | {"backend": "python"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    root = tmp_path_factory.mktemp("models")
    options = ["--model-control-mode", "explicit", "--override-bytes", str(LIMIT)]
    identity(root, "m")
    with Server(root, *options) as server:
        yield server, root


@pytest.fixture
def client(running: tuple[Server, Path]) -> Iterator[shmserve.Client]:
    """With "m" loaded for this test alone, so that the server has no more processes after it than before."""
    with running[0].client() as made:
        made.load("m")
        yield made
        made.unload("m")


def kept(server: Server) -> list[str]:
    """What the server keeps of load calls, beside the files of models of the repository."""
    places = (server.runtime_dir / "generations").glob("model-*")
    return [name for place in places for _, folders, files in os.walk(place) for name in (*folders, *files)]


def descriptors(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.pid}/fd"))


def batch(client: shmserve.Client, model: str = "m") -> int:
    found: int = client.config(model)["max_batch_size"]
    return found


# ------------------------------------------------------------------------------------------------ a configuration


def test_a_configuration_is_kept_until_the_files_change(running: tuple[Server, Path], client: shmserve.Client) -> None:
    _, root = running
    assert batch(client) == 8
    before = pids(client, "m")
    assert client.load("m", config=CONFIG)["changed"] is True
    assert batch(client) == 3
    assert client.origins("m")["origins"]["max_batch_size"] == "override"
    overridden = pids(client, "m")
    assert overridden != before
    assert client.load("m", config=CONFIG)["changed"] is False
    assert pids(client, "m") == overridden
    assert client.load("m")["changed"] is False
    assert pids(client, "m") == overridden
    assert batch(client) == 3, "a load without a configuration keeps it"
    client.restart("m")
    assert batch(client) == 3
    os.utime(root / "m" / "config.pbtxt")
    assert client.load("m")["changed"] is True
    assert batch(client) == 8
    assert client.origins("m")["origins"]["max_batch_size"] == "file"
    assert client.load("m")["changed"] is False


def test_a_configuration_is_not_kept_over_an_unload(client: shmserve.Client) -> None:
    client.load("m", config=CONFIG)
    client.unload("m")
    client.load("m")
    assert batch(client) == 8


def test_a_configuration_is_taken_back_with_a_rollback(client: shmserve.Client) -> None:
    client.load("m", config=CONFIG)
    client.load("m", previous=True)
    assert batch(client) == 8
    assert client.load("m")["changed"] is False
    assert batch(client) == 8


def test_a_configuration_that_is_wrong(client: shmserve.Client) -> None:
    before = pids(client, "m")
    wrong: list[tuple[Any, str]] = [
        (CONFIG | {"max_bach_size": 3}, "failed to load 'm'.*max_bach_size.*did you mean.*max_batch_size"),
        (CONFIG | {"backend": "identty"}, "failed to load 'm'.*identty.*identity"),
        (CONFIG | {"name": "other"}, "failed to load 'm'.*name"),
        (CONFIG | {"input": [{"name": "x", "data_type": "TYPE_FP23", "dims": [1]}]}, "TYPE_FP23.*TYPE_FP32"),
        (CONFIG | {"version_policy": {"specific": {"versions": [7]}}}, "at least one version must be available"),
        ({}, "failed to load 'm'"),
    ]
    for config, text in wrong:
        with pytest.raises(shmserve.InvalidRequest, match=text):
            client.load("m", config=config)
        assert answer(client, "m") == 1
        assert pids(client, "m") == before
    with pytest.raises(shmserve.NotFound, match="failed to load 'nobody', failed to poll from model repository"):
        client.load("nobody", config=CONFIG)
    assert client.load("m")["changed"] is False


def test_the_old_one_goes_on_and_is_not_loaded_again(client: shmserve.Client) -> None:
    """What takes its place fails in its worker; to load what is served is then nothing to do."""
    before = pids(client, "m")
    broken = CONFIG | {"parameters": {"delay_us": {"string_value": "soon"}}}
    for _ in range(2):
        with pytest.raises(
            shmserve.Unavailable, match=r"delay_us must be a number.*the previous version is still served"
        ):
            client.load("m", config=broken)
    assert pids(client, "m") == before
    assert client.load("m")["changed"] is False
    assert pids(client, "m") == before


# ------------------------------------------------------------------------------------------------ files


def test_a_model_that_is_in_no_repository(running: tuple[Server, Path], client: shmserve.Client) -> None:
    server, root = running
    for number in (0, 1, 2):
        files = {"1/model.py": living.GENERATION.encode(), "1/generation": str(number).encode()}
        assert client.load("sent", config=PYTHON, files=files)["changed"] is True
        assert answer(client, "sent") == number
    until(client, lambda: kept(server).count("generation") == 2, "those of the one before the last are gone")
    with pytest.raises(shmserve.NotFound, match="no model repository has it"):
        client.load("sent")
    client.restart("sent")
    assert answer(client, "sent") == 2
    files["1/generation"] = b"three"
    with pytest.raises(shmserve.ServeError, match="could not convert string to float") as caught:
        client.load("sent", config=PYTHON, files=files)
    assert "generations" not in str(caught.value)
    assert answer(client, "sent") == 2
    client.unload("sent")
    until(client, lambda: kept(server) == [], "nothing is kept")
    assert not index(client, "sent")
    assert not (root / "sent").exists()


def test_files_stand_in_for_those_of_the_repository(running: tuple[Server, Path], client: shmserve.Client) -> None:
    server, root = running
    generation(root, "both", 1)
    files = {"7/model.py": living.GENERATION.encode(), "7/generation": b"7"}
    client.load("both", config=PYTHON, files=files)
    assert (answer(client, "both"), states(client, "both")) == (7, {"7": "READY"})
    client.load("both")
    assert answer(client, "both") == 1
    assert {version for version, state in states(client, "both").items() if state == "READY"} == {"1"}
    client.unload("both")
    until(client, lambda: kept(server) == [])


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (
            {"1/other.py": b"x"},
            "load failed for model 'sent': version 1 is at UNAVAILABLE state: has no file 'model.py'",
        ),
        ({"one/model.py": b"x"}, "failed to load 'sent'"),
        ({"configs/model.py": b""}, "failed to load 'sent'"),
    ],
)
def test_files_that_make_no_model(
    running: tuple[Server, Path], client: shmserve.Client, files: dict[str, bytes], text: str
) -> None:
    with pytest.raises(shmserve.InvalidRequest, match=text):
        client.load("sent", config=PYTHON, files=files)
    until(client, lambda: kept(running[0]) == [])
    client.unload("sent")


def test_names_that_lead_elsewhere(running: tuple[Server, Path], client: shmserve.Client, tmp_path: Path) -> None:
    server, root = running
    around = sorted(server.runtime_dir.parent.rglob("*")), sorted(root.parent.rglob("*"))
    deep = "../" * 12
    for name in (
        "../evil",
        "1/../../evil",
        f"1/{deep}{tmp_path}/evil",
        f"{tmp_path}/evil",
        "1/.evil",
        "evil",
        "1//evil",
    ):
        with pytest.raises(shmserve.InvalidRequest, match="expected VERSION/NAME below the model's directory"):
            client.load("m", config=CONFIG, files={"1/good": b"x", name: b"x"})
    for model in ("../evil", f"{tmp_path}/evil", f"{deep}{tmp_path}/evil", "", ".", "..", "a/b"):
        with pytest.raises(shmserve.InvalidRequest, match="model name must not contain path traversal characters"):
            client.load(model, config=CONFIG, files={"1/x": b"x"})
    with pytest.raises(shmserve.InvalidRequest, match="conflicts with another one"):
        client.load("m", config=CONFIG, files={"1/x": b"x", "1/x/y": b"x"})
    assert list(tmp_path.iterdir()) == []
    assert (sorted(server.runtime_dir.parent.rglob("*")), sorted(root.parent.rglob("*"))) == around
    assert client.load("m")["changed"] is False


# ------------------------------------------------------------------------------------------------ large bodies


def test_too_large(running: tuple[Server, Path], client: shmserve.Client) -> None:
    server, _ = running
    before = descriptors(server)
    with pytest.raises(shmserve.InvalidRequest, match=f"exceed the limit of {LIMIT} bytes \\(--override-bytes\\)"):
        client.load("sent", config=CONFIG, files={"1/x": bytes(LIMIT + 2 * HEADER_BYTES)})
    assert answer(client, "m") == 1, "the same connection goes on"
    assert client.load("sent", config=CONFIG, files={"1/x": bytes(LIMIT)})["changed"] is True
    client.unload("sent")
    until(client, lambda: (descriptors(server), kept(server)) == (before, []))


class Raw:
    """A lane client of a few lines, which can stop in the middle of a body."""

    def __init__(self, server: Server) -> None:
        self._codec = codec.Codec(BrokerMessage)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(living.PATIENCE_S)
        self._sock.connect(server.url.removeprefix("unix://"))
        self.say(Hello(PROTOCOL, os.getpid(), "raw", "memfd"))
        assert isinstance(self.hear(), Welcome)

    def say(self, *messages: Any) -> None:
        self._sock.sendall(codec.encode(list(messages)))

    def hear(self) -> Any:
        (message,) = self._codec.decode(self._sock.recv(1 << 18))
        return message

    def begin(self, request: int, size: int) -> None:
        """A load call whose body does not end; returns when the server has taken what there is of it."""
        self.say(Ask(request, "load", "sent", 0, b"", True))
        for _ in range(size // FIELD_BYTES):
            self.say(Ask(request, "", "", 0, bytes(FIELD_BYTES), True))
        self.say(Ping(request))
        assert self.hear() == Pong(request)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()


@pytest.mark.parametrize("goodbye", ["killed", "cancelled"])
def test_a_body_that_does_not_end(running: tuple[Server, Path], client: shmserve.Client, goodbye: str) -> None:
    server, _ = running
    client.live()
    before = descriptors(server)
    with Raw(server) as raw:
        for request in (1, 2, 3):
            raw.begin(request, 2 * IN_MEMORY)
        assert descriptors(server) == before + 4, "a connection, and three files"
        assert kept(server) == [], "without names"
        if goodbye == "cancelled":
            raw.say(*(Cancel(request) for request in (1, 2, 3)))
            raw.say(Ping(9))
            assert raw.hear() == Pong(9)
            assert descriptors(server) == before + 1
            raw.say(Ask(1, "unload", "nobody"))
            assert isinstance(raw.hear(), Answer), "the number can be used again"
    until(client, lambda: descriptors(server) == before)
    assert not index(client, "sent")
    assert answer(client, "m") == 1


def test_many_bodies_at_a_time(running: tuple[Server, Path], client: shmserve.Client) -> None:
    server, _ = running
    client.live()
    before = descriptors(server)
    with Raw(server) as raw:
        for request in range(16):
            raw.begin(request, FIELD_BYTES)
        raw.say(Ask(16, "load", "sent", 0, b"", True))
        refused = raw.hear()
        assert isinstance(refused, Fail)
        assert (refused.request, refused.code) == (16, "UNAVAILABLE")
        assert "16 load calls are already being received" in refused.text
        with pytest.raises(shmserve.Unavailable, match="try again"):
            client.load("m", config=CONFIG)
    until(client, lambda: descriptors(server) == before)
    assert client.load("m")["changed"] is False

"""Load calls with a configuration and files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shmserve
from bench.lib.raw_client import RawLane
from shmserve.broker.models.overrides import HEADER_BYTES, IN_MEMORY
from shmserve.protocol.messages import FIELD_BYTES, Answer, Ask, Cancel, Fail, Ping, Pong
from shmserve.testing import Server
from tests.support import living
from tests.support.launch import descriptors_of
from tests.support.living import answer, identity, index, pids, until
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.process

CONFIG: dict[str, Any] = {
    "backend": "identity",
    "max_batch_size": 3,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}],
}
PYTHON = CONFIG | {"backend": "python"}


OPTIONS = ("--limit", f"override_bytes={4 << 20}")


@pytest.fixture(scope="module", autouse=True)
def m(root: Path) -> None:
    identity(root, "m")


@pytest.fixture
def client(client: shmserve.Client) -> shmserve.Client:
    """The model "m" is loaded."""
    client.load("m")
    return client


def kept(server: Server) -> list[str]:
    """Files and folders that the server keeps for load calls."""
    places = (server.runtime_dir / "generations").glob("model-*")
    return [name for place in places for _, folders, files in os.walk(place) for name in (*folders, *files)]


def uploads(server: Server) -> int:
    """How many open files without names the server keeps for load calls."""
    place = str(server.runtime_dir.resolve() / "generations")
    return sum(target.startswith(place) for target in descriptors_of(server.pid))


def batch(client: shmserve.Client, model: str = "m") -> int:
    found: int = client.config(model)["max_batch_size"]
    return found


def test_a_configuration_is_kept_until_the_files_change(server: Server, root: Path, client: shmserve.Client) -> None:
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


def test_a_model_in_no_repository_is_loaded_from_files(server: Server, root: Path, client: shmserve.Client) -> None:
    for number in (0, 1, 2):
        files = {"1/model.py": living.GENERATION.encode(), "1/generation": str(number).encode()}
        assert client.load("sent", config=PYTHON, files=files)["changed"] is True
        assert answer(client, "sent") == number
    until(client, lambda: kept(server).count("generation") == 2, "files of older generations are removed")
    with pytest.raises(shmserve.NotFound, match="no model repository has it"):
        client.load("sent")
    client.restart("sent")
    assert answer(client, "sent") == 2
    files["1/generation"] = b"three"
    with pytest.raises(shmserve.ServeError, match="could not convert string to float") as caught:
        client.load("sent", config=PYTHON, files=files)
    assert "generations" not in str(caught.value)
    assert answer(client, "sent") == 2
    with pytest.raises(shmserve.InvalidRequest, match=r"exceed the limit of 4194304 bytes \(--limit override_bytes\)"):
        client.load("sent", config=PYTHON, files={"1/x": bytes((4 << 20) + 2 * HEADER_BYTES)})
    assert answer(client, "sent") == 2, "the connection continues"
    client.unload("sent")
    until(client, lambda: kept(server) == [], "nothing is kept")
    assert not index(client, "sent")
    assert not (root / "sent").exists()


@pytest.fixture
def lane(server: Server) -> Iterator[RawLane]:
    with RawLane(server.url.removeprefix("unix://")) as lane:
        lane.hello("memfd")
        yield lane


def begin(lane: RawLane, request: int, size: int) -> None:
    """Sends a load call with an incomplete body. Returns when the server has received this part."""
    lane.send(Ask(request, "load", "sent", 0, b"", True))
    for _ in range(size // FIELD_BYTES):
        lane.send(Ask(request, "", "", 0, bytes(FIELD_BYTES), True))
    lane.send(Ping(request))
    assert lane.receive(PATIENCE_S) == Pong(request)


@pytest.mark.parametrize("end", ["disconnected", "cancelled"])
def test_an_incomplete_upload_is_discarded(server: Server, client: shmserve.Client, lane: RawLane, end: str) -> None:
    for request in (1, 2, 3):
        begin(lane, request, 2 * IN_MEMORY)
    assert uploads(server) == 3
    assert kept(server) == [], "the files have no names"
    if end == "cancelled":
        lane.send(*(Cancel(request) for request in (1, 2, 3)))
        lane.send(Ask(1, "unload", "nothing"))
        assert isinstance(lane.receive(PATIENCE_S), Answer), "the number can be used again"
    else:
        lane.close()
    until(client, lambda: not uploads(server))
    assert not index(client, "sent")
    assert answer(client, "m") == 1


def test_the_number_of_concurrent_uploads_is_limited(server: Server, client: shmserve.Client, lane: RawLane) -> None:
    for request in range(16):
        begin(lane, request, FIELD_BYTES)
    lane.send(Ask(16, "load", "sent", 0, b"", True))
    refused = lane.receive(PATIENCE_S)
    assert isinstance(refused, Fail)
    assert (refused.request, refused.code) == (16, "UNAVAILABLE")
    assert "16 load calls are already being received" in refused.text
    with pytest.raises(shmserve.Unavailable, match="try again"):
        client.load("m", config=CONFIG)
    lane.close()

    def accepted() -> bool:
        # The broker may read the new call before it sees that the lane was closed.
        try:
            return bool(client.load("m", config=CONFIG)["changed"])
        except shmserve.Unavailable:
            return False

    until(client, accepted)

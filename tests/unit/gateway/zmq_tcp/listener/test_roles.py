"""Clients of the ZeroMQ listener have the roles of their keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.protocol.messages import Cancel
from tests.support.broker.fake_broker import FakeBroker, echo
from tests.support.clients.client_faces import FACES
from tests.support.gateway.zmq_listener import ListenerThread
from tests.support.patience import PATIENCE_S


def test_a_client_has_the_roles_of_its_key(listener: ListenerThread, broker: FakeBroker) -> None:
    with listener.client("bob") as bob:
        assert bob.infer("echo", {"x": np.array(1)})["x"] == 1
        assert bob.ready()
        with pytest.raises(shmserve.Denied, match=r"'models' needs the role observe or operate.*--zmq-keys"):
            bob.models()
        with pytest.raises(shmserve.Denied, match="'load' needs the role operate, but this connection has infer;"):
            bob.load("echo")


def test_r25_what_only_operators_may_see(listener: ListenerThread, broker: FakeBroker) -> None:
    """The gateway itself has the role operate, whichever client it acts for."""
    broker.answers["activity"] = {"clients": [{"number": 1, "user": "uid:7"}]}
    broker.answers["models"] = [{"name": "m", "instances": [{"name": "m_0", "last_words": ["plums"]}]}]
    broker.answers["logs"] = {"records": []}
    found = {}
    for name in ("alice", "olga"):
        with listener.client(name) as client:
            found[name] = client.activity()["clients"][0]["user"], client.models()[0]["instances"][0]["last_words"]
            if name == "alice":
                assert client.logs() == {"records": []}
            else:
                with pytest.raises(shmserve.Denied, match="'logs' needs the role operate, but this connection has obs"):
                    client.logs()
    assert found == {"alice": ("uid:7", ["plums"]), "olga": ("", [])}


@pytest.mark.parametrize("face", list(FACES))
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"key_file": "eve.key"}, r"rejected the key .* file of --zmq-keys"),
        ({"server_key": "eve.pub"}, r"does not have the server key .* check the url and server_key="),
    ],
)
def test_a_rejected_key_has_its_reason(listener: ListenerThread, face: str, wrong: dict[str, str], text: str) -> None:
    keys = listener.keys("alice") | {name: listener.folder / file for name, file in wrong.items()}
    with FACES[face](listener.url, **keys, timeout=PATIENCE_S) as client, pytest.raises(shmserve.Denied, match=text):
        client.infer("echo", {"x": np.array(1)})


def test_a_client_without_keys_is_refused(
    listener: ListenerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right, open_to_all = listener.keys("alice"), tmp_path / "open.key"
    open_to_all.write_text(right["key_file"].read_text())
    open_to_all.chmod(0o644)
    for url, keys, text in (
        (listener.url, {}, r"tcp:// needs server_key= \(or SHMSERVE_SERVER_KEY\)"),
        (listener.url, {"server_key": right["server_key"]}, r"tcp:// needs key_file= \(or SHMSERVE_KEY_FILE\)"),
        ("unix:///nowhere/lane.sock", right, "only for tcp://, not unix://"),
        (listener.url, right | {"key_file": open_to_all}, "is readable by other users: chmod 600"),
    ):
        with pytest.raises(shmserve.InvalidRequest, match=text):
            shmserve.Client(url, **keys)
    monkeypatch.setenv("SHMSERVE_SERVER_KEY", str(right["server_key"]))
    monkeypatch.setenv("SHMSERVE_KEY_FILE", str(right["key_file"]))
    with shmserve.Client(listener.url, timeout=PATIENCE_S) as client:
        assert client.live()


def test_the_file_of_keys_is_reloaded(listener: ListenerThread) -> None:
    with listener.client("bob") as bob:
        assert bob.live()
        listener.write_keys("alice", "eve")
        listener.do(listener.listener.read_keys)
        with pytest.raises(shmserve.Denied, match=r"rejected the key|has no roles"):
            bob.infer("echo", {"x": np.array(1)})
    with listener.client("eve") as eve:
        assert eve.live()
    (listener.folder / "keys").write_text("nonsense\n")
    listener.do(listener.listener.read_keys)  # keeps the valid keys
    with listener.client("eve") as eve:
        assert eve.live()
    listener.write_keys("alice", "bob")
    listener.do(listener.listener.read_keys)


def test_a_reused_identity_receives_no_messages_of_its_former_client(
    listener: ListenerThread, broker: FakeBroker, bare: Any
) -> None:
    alice = bare("alice", identity=b"mine")
    alice.send([7, 5, "hold", 0, [["x", "UINT8", [1], b"a"]]])
    peer, infer, frames = broker.next_parked()
    alice.close()
    assert broker.wait_for(Cancel).request == infer.request
    bob = bare("bob", identity=b"mine")
    broker.do(lambda: echo(broker, peer, infer, frames))
    bob.send([9, 6, "models"])
    assert bob.receive()[:3] == [34, 6, "DENIED"]
    assert bob.quiet()

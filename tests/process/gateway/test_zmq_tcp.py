"""ZeroMQ over tcp as users run it: keys from the command, a server that starts its gateway, and commands."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve.testing import Server
from shmserve.transport.keys import read_pair
from tests.support.commands import run
from tests.support.gateway.running_gateway import model

pytestmark = pytest.mark.process


class Door:
    """The endpoint of a server, with keys for `alice` (role operate) and `bob` (role infer)."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.folder = folder
        self.url = f"tcp://{server.endpoints['zmq']}"

    def where(self, name: str) -> list[str]:
        """The options of a command."""
        server, own = self.folder / "server.pub", self.folder / f"{name}.key"
        return ["--url", self.url, "--server-key", str(server), "--key-file", str(own)]


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    repository, folder = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("keys")
    model(repository, "all", ["FP32"], "[ -1 ]", 0)
    for name, roles in (("server", "infer"), ("alice", "infer,observe,operate"), ("bob", "infer")):
        assert run("keygen", name, "--out", str(folder), "--roles", roles)[0] == 0
    (folder / "keys").write_text((folder / "alice.pub").read_text() + (folder / "bob.pub").read_text())
    options = ["--zmq-address", "tcp://127.0.0.1:0", "--zmq-server-key", str(folder / "server.key")]
    server = Server(repository, *options, "--zmq-keys", str(folder / "keys"), gateway=True)
    with server:
        yield Door(server, folder)
    assert "ZeroMQ with CURVE on tcp://127.0.0.1:0" in server.log
    assert "Traceback" not in server.log
    assert read_pair(folder / "alice.key").secret not in server.log


def test_commands_over_tcp_need_keys_and_roles(listener: Door) -> None:
    for words, code, text in (
        (["models", "--json", *listener.where("alice")], 0, '"name": "all"'),
        (["models", *listener.where("bob")], 1, "'models' needs the role observe or operate"),
        (["ready", "--url", listener.url], 2, "tcp:// needs --server-key (or SHMSERVE_SERVER_KEY)"),
        (["ready", *listener.where("bob")], 0, ""),
    ):
        found, out, err = run(*words)
        assert (found, text in out + err) == (code, True), (words, out, err)


def test_keygen_writes_a_key_pair_and_overwrites_none(tmp_path: Path) -> None:
    code, out, _ = run("keygen", "alice", "--out", str(tmp_path / "new"))
    assert code == 0
    key, public = tmp_path / "new" / "alice.key", tmp_path / "new" / "alice.pub"
    assert (key.stat().st_mode & 0o777, public.stat().st_mode & 0o022) == (0o600, 0)
    pair = read_pair(key)
    assert public.read_text() == f"{pair.public} infer,observe alice\n"
    assert pair.secret not in out
    assert str(key) in out
    before = key.read_bytes()
    code, _, err = run("keygen", "alice", "--out", str(tmp_path / "new"))
    assert code == 1
    assert "File exists" in err
    assert key.read_bytes() == before
    for words in (["../x"], ["-x"], ["a", "--roles", "root"]):
        with contextlib.suppress(SystemExit):
            assert run("keygen", "--out", str(tmp_path), *words)[0] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    code, out, _ = run("keygen", "bob", "--out", str(tmp_path), "--json")
    assert json.loads(out)["public_key"] == read_pair(tmp_path / "bob.key").public

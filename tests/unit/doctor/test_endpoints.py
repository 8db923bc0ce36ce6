"""The checks of the runtime directory and the ports."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from shmserve.doctor import endpoints
from shmserve.doctor.machine import ERROR, OK, Finding, Machine
from tests.unit.doctor.tree import machine, only


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = Path(os.path.relpath(tmp_path)) / "run"  # a short path, whatever the name of tmp_path
    monkeypatch.setenv("SHMSERVE_RUNTIME_DIR", str(path))
    return path


def test_the_runtime_directory(tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> Finding:
        return only(endpoints.runtime_directory(machine(tmp_path)))

    assert found().state == OK
    assert not directory.exists(), "it can be created, and is not"
    directory.mkdir(mode=0o700)
    assert found().state == OK
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 4711)
        text = f"{directory} belongs to uid {directory.stat().st_uid}"
        assert (found().state, found().found) == (ERROR, text)
    directory.chmod(0o777)
    assert (found().state, found().fix) == (ERROR, f"chmod 700 {directory}")


@pytest.mark.parametrize(("length", "state", "error"), [(107, OK, "No such file"), (108, ERROR, "path too long")])
def test_the_length_of_a_socket_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, state: str, error: str
) -> None:
    """The limit is that of the kernel."""
    path = "/tmp/" + "x" * (length - len("/tmp//broker.sock")) + "/broker.sock"
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(OSError, match=error):
        probe.connect(path)
    monkeypatch.setenv("SHMSERVE_RUNTIME_DIR", os.path.dirname(path))
    assert only(endpoints.runtime_directory(machine(tmp_path))).state == state


def test_ports(tmp_path: Path, directory: Path) -> None:
    assert [finding.check for finding in endpoints.ports(machine(tmp_path))] == [
        "port 8000 (http)", "port 8001 (grpc)", "port 8002 (metrics)"
    ]  # fmt: skip
    found = endpoints.ports(machine(tmp_path, is_free=lambda port: port != 8001))
    assert [finding.state for finding in found] == [OK, ERROR, OK]
    assert found[1].fix.startswith("shmserve serve --grpc-port N")
    chosen = machine(tmp_path, environment={"SHMSERVE_HTTP_PORT": "9000"})
    assert [finding.check for finding in endpoints.ports(chosen)][:2] == ["port 9000 (http)", "port 8001 (grpc)"]
    wrong = machine(tmp_path, environment={"SHMSERVE_GRPC_PORT": "70000"}, is_free=Machine().is_free)
    refused = endpoints.ports(wrong)[1]
    assert refused.state == ERROR
    assert (refused.found, refused.fix) == ("not a port", "set SHMSERVE_GRPC_PORT to one up to 65535")


def test_the_ports_of_a_running_server(tmp_path: Path) -> None:
    """Another server may have the default ones."""
    runs = {tmp_path / "mine": {"http": 9000, "metrics": 9002}}
    mine = machine(tmp_path, is_free=lambda port: False, ports_of=runs.get, runtime_dir=tmp_path / "mine")
    found = endpoints.ports(mine)
    assert [(one.check, one.state) for one in found] == [("port 9000 (http)", OK), ("port 9002 (metrics)", OK)]
    assert only(endpoints.runtime_directory(mine)).found == f"{tmp_path / 'mine'}, where a server runs"


def test_a_port_of_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert not Machine().is_free(port)
    assert Machine().is_free(port)

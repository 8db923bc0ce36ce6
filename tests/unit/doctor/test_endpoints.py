"""The checks of the runtime directory and the ports."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from shmserve.doctor import checks
from shmserve.doctor.machine import ERROR, OK, Finding, Machine
from tests.unit.doctor.tree import machine, only


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = Path(os.path.relpath(tmp_path)) / "run"  # a short path, whatever the name of tmp_path
    monkeypatch.setenv("SHMSERVE_RUNTIME_DIR", str(path))
    return path


def test_the_runtime_directory(tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> Finding:
        return only(checks.runtime_directory(machine(tmp_path)))

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
    stat = os.stat

    def refused(path: Any, **options: Any) -> os.stat_result:
        if path == directory:
            raise PermissionError
        return stat(path, **options)

    with monkeypatch.context() as patch:  # it is below a folder that this user may not search
        patch.setattr(os, "stat", refused)
        patch.setattr(os, "access", lambda place, mode: False)
        result = found()
    assert (result.state, result.found) == (ERROR, f"{directory.parent} is not writable")


@pytest.mark.parametrize(("length", "state", "error"), [(107, OK, "No such file"), (108, ERROR, "path too long")])
def test_the_length_of_a_socket_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, state: str, error: str
) -> None:
    """The limit is that of the kernel."""
    path = "/tmp/" + "x" * (length - len("/tmp//broker.sock")) + "/broker.sock"
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(OSError, match=error):
        probe.connect(path)
    monkeypatch.setenv("SHMSERVE_RUNTIME_DIR", os.path.dirname(path))
    assert only(checks.runtime_directory(machine(tmp_path))).state == state


def test_ports(tmp_path: Path, directory: Path) -> None:
    def found(**changes: Any) -> list[tuple[str, str]]:
        return [(one.check, one.state) for one in checks.ports(machine(tmp_path, **changes))]

    http, grpc, metrics = ("port 8000 (http)", OK), ("port 8001 (grpc)", OK), ("port 8002 (metrics)", OK)
    assert found() == [http, grpc, metrics]
    assert found(environment={"SHMSERVE_HTTP_PORT": "9000"}) == [("port 9000 (http)", OK), grpc, metrics]
    used = machine(tmp_path, is_free=lambda port: port != 8001)
    assert [one.state for one in checks.ports(used)] == [OK, ERROR, OK]
    assert checks.ports(used)[1].fix.startswith("shmserve serve --grpc-port N")
    wrong = machine(tmp_path, environment={"SHMSERVE_GRPC_PORT": "70000"}, is_free=Machine().is_free)
    refused = checks.ports(wrong)[1]
    assert (refused.state, refused.found) == (ERROR, "not a port")
    assert refused.fix == "set SHMSERVE_GRPC_PORT to one up to 65535"
    # The ports of a running server, while another server has the default ones.
    place = tmp_path / "mine"
    runs = {"is_free": lambda port: False, "ports_of": {place: {"http": 9000}}.get, "runtime_dir": place}
    assert found(**runs) == [("port 9000 (http)", OK)]
    assert only(checks.runtime_directory(machine(tmp_path, **runs))).found == f"{place}, where a server runs"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert not Machine().is_free(port)
    assert Machine().is_free(port)

"""Notifications to the service manager. The oracle is the test's own datagram socket at the manager's end."""

from __future__ import annotations

import asyncio
import os
import secrets
import select
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shmserve.broker.observability.service_status import Announcer, Census
from shmserve.broker.processes.workers import worker_environment
from shmserve.core.owners.model import Model
from shmserve.core.records import Version
from shmserve.core.states import VersionState
from shmserve.gateway.main import ServiceState
from shmserve.system.service_manager import VARIABLES, ServiceManager
from tests.support.patience import PATIENCE_S

READY, LOADING = VersionState.READY, VersionState.LOADING
UNAVAILABLE, UNLOADING = VersionState.UNAVAILABLE, VersionState.UNLOADING


class Ear:
    """The service manager's socket."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(PATIENCE_S)

    def hear(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self.socket.recv(65536).decode().split("\n"))

    def is_silent(self) -> bool:
        return not select.select([self.socket], [], [], 0)[0]

    def close(self) -> None:
        self.socket.close()


@pytest.fixture(params=["path", "abstract"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "notify") if request.param == "path" else f"@shmserve-test-{secrets.token_hex(8)}"


@pytest.fixture
def ear(address: str) -> Iterator[Ear]:
    with closing(Ear(address)) as ear:
        yield ear


@pytest.fixture
def loop() -> Iterator[Any]:
    with closing(asyncio.new_event_loop()) as loop:
        yield loop


def model(name: str, *states: VersionState, reason: str = "", coming: bool = False) -> Model:
    made = Model(name, reason=reason)
    for number, state in enumerate(states, 1):
        made.versions[number] = Version(name, number, [])
        made.versions[number].state = state
    if coming:
        made.coming[1] = Version(name, 1, [])
    return made


class Told:
    """A notifier of a manager, and the state that it announces."""

    def __init__(self, loop: Any, address: str, ear: Ear, **environment: str) -> None:
        self.models: list[Model] = []
        self.in_flight, self.out_of_service = 0, False
        self.hear, self.is_silent = ear.hear, ear.is_silent
        manager = ServiceManager({"NOTIFY_SOCKET": address, **environment}, os.getpid())
        self.announcer = Announcer(
            loop, manager, lambda: self.models, lambda: self.in_flight, lambda: self.out_of_service
        )


@pytest.fixture
def told(loop: Any, address: str, ear: Ear) -> Iterator[Told]:
    told = Told(loop, address, ear)
    yield told
    told.announcer.close()


def test_workers_get_the_variables_that_the_operator_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """R10: a worker's environment is an allow-list, and never has those of the service manager or the key."""
    names = {"HF_HOME", "HF_TOKEN", "MODEL_BUCKET", "PASSWORD", "LD_PRELOAD", "MALLOC_CONF"}
    for name in (*names, *VARIABLES, "SHMSERVE_SERVER_KEY"):
        monkeypatch.setenv(name, name.lower())
    usual = set(worker_environment())
    assert not usual & names
    assert set(worker_environment(["LD_PRELOAD", "MALLOC_*"])) - usual == {"LD_PRELOAD", "MALLOC_CONF"}
    found = worker_environment(["HF_*", "MODEL_BUCKET", "NONE"])
    assert set(found) - usual == {"HF_HOME", "HF_TOKEN", "MODEL_BUCKET"}
    assert found["HF_HOME"] == "hf_home"
    every = set(worker_environment(["*"]))
    assert {"PASSWORD", "HF_TOKEN"} < every
    assert not every & {*VARIABLES, "SHMSERVE_SERVER_KEY"}


def test_removed_variables_and_reported_addresses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notify = {"NOTIFY_SOCKET": str(tmp_path / "nobody")}
    for usec, pid, seconds in (
        ("30000000", "17", 30),
        ("1", "", 1e-6),
        ("", "", 0),
        ("x", "", 0),
        ("5000000", "18", 0),
    ):
        variables = notify | {"WATCHDOG_USEC": usec, "WATCHDOG_PID": pid, "PATH": "/bin"}
        manager = ServiceManager(variables, 17)
        assert (variables, manager.watchdog_s) == ({"PATH": "/bin"}, seconds), "that of another process is ignored"
        manager.close()
    assert not ServiceManager({"NOTIFY_SOCKET": "vsock:2:1"}, 1)
    assert "NOTIFY_SOCKET is neither a path nor an abstract name" in caplog.text
    manager = ServiceManager(notify, 1)
    manager.notify("READY=1", once=True)
    manager.close()
    assert "cannot notify the service manager of READY=1" in caplog.text


def test_a_manager_that_does_not_read_delays_only_one_notification(
    address: str, ear: Ear, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmserve.system.service_manager.SEND_TIMEOUT_MS", 1)
    manager = ServiceManager({"NOTIFY_SOCKET": address}, 1)
    while not caplog.text:
        manager.notify("WATCHDOG=1")
    manager.notify("READY=1", once=True)
    assert "cannot notify the service manager of READY=1: Resource temporarily unavailable" in caplog.text
    while not ear.is_silent():
        ear.hear()
    manager.notify("READY=1", once=True)
    assert ear.hear() == {"READY": "1"}
    manager.close()


def test_models_are_counted_by_state() -> None:
    unloaded = model("old", UNAVAILABLE)
    unloaded.versions[1].reason = "unloaded"
    models = [
        model("good", READY, READY),
        model("half", READY, UNAVAILABLE),
        model("new", LOADING),
        model("again", READY, coming=True),
        model("broken", reason="no such field"),
        model("going", UNLOADING),
        model("back", UNLOADING, coming=True),
        unloaded,
    ]
    census = Census.of(models)
    assert census == Census(6, ["new", "again", "back"], ["half", "broken"])
    assert census.text() == "loading 3 of 6 models: again, back, new; failed: broken, half"
    assert Census(5, [], ["half"]).text() == "serving 4 of 5 models; failed: half"
    assert Census(0, [], []).text() == "serving 0 of 0 models"
    text = Census(1000, [f"m{number:03}\nREADY=1" for number in range(1000)], []).text()
    assert ("\n" in text, len(text) < 300, text.endswith("and 992 more")) == (False, True, True)


def test_from_start_to_stop(told: Told) -> None:
    told.announcer.begin()
    assert told.hear() == {"EXTEND_TIMEOUT_USEC": "60000000", "STATUS": "reading the repositories"}
    told.models = [model("mlp", LOADING), model("cnn", LOADING)]
    told.announcer.check_status()
    assert told.hear() == {"STATUS": "loading 2 of 2 models: cnn, mlp"}
    told.announcer.check_status()
    assert told.is_silent()
    told.models = [model("mlp", READY), model("cnn", UNAVAILABLE)]
    told.announcer.ready()
    assert told.hear() == {"READY": "1", "STATUS": "serving 1 of 2 models; failed: cnn"}
    told.in_flight, told.out_of_service = 3, True
    told.announcer.check_status()
    assert told.hear() == {"STATUS": "out of service: 3 request(s) in flight; serving 1 of 2 models; failed: cnn"}
    told.announcer.stopping(30)
    status = "stopping: 3 request(s) in flight"
    assert told.hear() == {"STOPPING": "1", "EXTEND_TIMEOUT_USEC": "40000000", "STATUS": status}
    told.announcer.stopping(30)
    assert told.is_silent()


def test_a_reload_is_notified_while_the_server_is_ready(told: Told) -> None:
    told.announcer.reloading()
    told.announcer.reloaded()
    assert told.is_silent(), "not ready yet"
    told.announcer.ready()
    told.hear()
    told.announcer.reloading()
    said = told.hear()
    assert said["RELOADING"] == "1"
    assert int(said["MONOTONIC_USEC"]) > 0
    assert told.announcer.reloaded()
    assert told.hear() == {"READY": "1"}
    assert not told.announcer.reloaded()
    assert told.is_silent()
    told.announcer.reloading()
    told.hear()
    told.announcer.stopping(1)
    assert "STOPPING" in told.hear()
    told.announcer.reloaded()
    assert told.is_silent(), "not ready any more"


def test_the_watchdog_is_notified_only_while_the_loop_runs(loop: Any, address: str, ear: Ear) -> None:
    told = Told(loop, address, ear, WATCHDOG_USEC="20000")
    told.models = [model("mlp", READY)]
    told.announcer.begin()
    assert told.hear()["WATCHDOG"] == "1"
    told.announcer.ready()
    assert told.hear() == {"READY": "1"}
    assert told.is_silent()  # the loop does not run
    heard: list[dict[str, str]] = []

    def listen() -> None:
        heard.append(ear.hear())
        if len(heard) == 3:
            loop.stop()

    loop.add_reader(ear.socket, listen)
    loop.run_forever()
    loop.remove_reader(ear.socket)
    assert heard == [{"WATCHDOG": "1"}] * 3
    told.announcer.close()


def test_a_gateway_notifies_readiness_and_the_watchdog(ear: Ear, address: str, loop: Any, caplog: Any) -> None:
    service = ServiceState(loop, ServiceManager({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "400000"}, 1))
    assert ear.hear() == {"WATCHDOG": "1"}
    service.ready({"http": 8000, "metrics": 8002})
    assert ear.hear() == {"READY": "1", "STATUS": "listening: http on port 8000, metrics on port 8002"}
    loop.add_reader(ear.socket, loop.stop)
    loop.run_forever()
    loop.remove_reader(ear.socket)
    assert ear.hear() == {"WATCHDOG": "1"}
    service.reloading()
    assert ear.hear().keys() == {"RELOADING", "MONOTONIC_USEC"}
    service.stopping()
    assert ear.hear()["STOPPING"] == "1"
    service.close()
    manager = ServiceManager({"WATCHDOG_USEC": "20000"}, 1)
    service = ServiceState(loop, manager)
    service.ready({})
    service.stopping()
    service.close()
    assert (bool(manager), manager.watchdog_s, caplog.records) == (False, 0, []), "without a service manager"

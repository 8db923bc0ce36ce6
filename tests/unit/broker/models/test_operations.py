"""Operations between clients and core: reading in a thread, deploying, and forgetting; loading models at the start that
must be downloaded first."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing
from errno import EIO
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from shmserve.broker.models.catalog import Catalog
from shmserve.broker.models.disk_changes import DiskChanges
from shmserve.broker.models.operations import ClientOperations, LoadSettings
from shmserve.broker.models.reader import ReaderThread
from shmserve.broker.models.remote import Fetched, RemoteModels
from shmserve.broker.models.remote_changes import RemoteChanges
from shmserve.broker.models.repositories import ModelReading, Repositories
from shmserve.core import effects, events
from shmserve.core.core import Core
from shmserve.core.owners.rate_limiter import ANY
from shmserve.protocol.messages import Answer, Ask, Fail
from shmserve.repo.compile import CoreSet
from shmserve.repo.remote.cache import ABSENT
from tests.support.cases import cases
from tests.support.manual_loop import ThreadedLoop
from tests.support.repo.models import ENSEMBLE, GOOD, model


class Shell:
    def __init__(self, root: Path, mode: str = "explicit", compatible: bool = False) -> None:
        model(root / "models", "m", GOOD, {"1/weights": "a"})
        self.loop = ThreadedLoop()
        self.core = Core()
        self.catalog = Catalog(Repositories([root / "models"]), {}, CoreSet((0,)), resources=(("r", ANY, 3),))
        self.inbox: list[tuple[int, Any]] = []
        self.said: list[Any] = []
        self.operations = ClientOperations(
            self.loop,
            self.core,
            self.catalog,
            ReaderThread(),
            lambda event: self.inbox.append((0, event)),
            lambda peer, message: self.said.append(message),
            LoadSettings(root / "overrides", mode, compatible),
        )

    def ask(self, what: str, body: bytes = b"", name: str = "m") -> None:
        """Runs an operation up to the event for the core's next turn."""
        self.operations.handle(1, Ask(1, what, name, body=body))
        self.loop.run_one()

    def close(self) -> None:
        self.operations.close()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with closing(Shell(tmp_path)) as made:
        yield made


def with_resource(resource: str) -> str:
    return f"{GOOD}\ninstance_group [ {{ kind: KIND_CPU rate_limiter {{ resources [ {{ {resource} }} ] }} }} ]"


def test_loads_that_do_not_fit_the_resources_fail(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "models" / "m" / "config.pbtxt").write_text(with_resource("name: 'r' count: 1"))
    model(tmp_path / "models", "n", with_resource("name: 'r' global: true count: 1"), {"1/weights": "a"})
    text = 'Resource "r" is present as both global and device-specific resource in the model configuration.'
    shell.ask("load")
    assert not shell.said
    shell.ask("load", name="n")
    (failed,) = shell.said
    assert failed.text.startswith(f"failed to load 'n': {text}")
    shell.ask("unload")
    shell.ask("load", name="n")
    assert [type(event) for _, event in shell.inbox] == [events.Deploy, events.Refuse, events.Unload, events.Deploy]
    model(tmp_path / "models", "much", with_resource("name: 'r' global: true count: 4"))
    shell.ask("load", name="much")
    assert 'Resource count for "r" is limited to 3 which will prevent' in shell.said[-1].text
    assert isinstance(shell.inbox[-1][1], events.Refuse)


def test_an_internal_error_is_reported_to_the_caller(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shell.catalog, "adopt", Mock(side_effect=ZeroDivisionError))
    shell.ask("load")
    assert shell.said == [Fail(1, "INTERNAL", "failed to load 'm': internal error; the server's log has the details")]
    assert "load of model 'm' failed" in caplog.text


def test_a_source_is_kept_until_the_core_has_processed_its_spawn(shell: Shell) -> None:
    """A load, an unload, and the end of an earlier operation, all before the next turn."""
    shell.ask("load")
    shell.ask("unload")
    shell.operations.settled(effects.Settled(99))
    (spawn,) = (effect for effect in shell.core.handle(shell.inbox, 1) if isinstance(effect, effects.Spawn))
    _, descriptor = shell.catalog.load_order(spawn)
    os.close(descriptor)
    shell.core.handle([(0, events.Exited(spawn.peer, "killed"))], 2)
    shell.operations.tidy()
    with pytest.raises(KeyError):
        shell.catalog.load_order(spawn)


@cases(
    ("none", False, "in mode none"), ("none", True, "if polling is enabled"), ("poll", False, "if polling is enabled")
)
def test_loading_in_other_modes(mode: str, compatible: bool, why: str, tmp_path: Path) -> None:
    """Triton says that polling is enabled in mode none as well."""
    with closing(Shell(tmp_path, mode=mode, compatible=compatible)) as shell:
        for what in ("load", "unload"):
            shell.operations.handle(1, Ask(1, what, "m"))
            text = "explicit model load / unload is not allowed"
            assert shell.said.pop().text == f"{text} {why}; start the server with --model-control-mode explicit"


def test_loads_of_a_model_run_one_after_the_other(shell: Shell) -> None:
    """Each caller learns the outcome of its own load. An unload ends the loads before it."""
    shell.ask("load")
    for peer in (2, 3):
        shell.operations.handle(peer, Ask(peer, "load", "m"))
    (_, first), *others = shell.inbox
    assert not others
    shell.operations.settled(effects.Settled(first.operation, "UNAVAILABLE", "no such file"))
    shell.loop.run_one()
    second = shell.inbox[-1][1]
    assert second.operation != first.operation
    shell.operations.settled(effects.Settled(second.operation))
    shell.loop.run_one()
    shell.operations.handle(4, Ask(4, "load", "m"))
    shell.ask("unload")
    assert [type(event) for _, event in shell.inbox] == [events.Deploy] * 3 + [events.Unload]
    failed, done, dropped = shell.said
    assert (failed.request, failed.text) == (1, "no such file")
    assert (type(done), done.request) == (Answer, 2)
    assert (dropped.request, dropped.code) == (4, "UNAVAILABLE")
    assert "Newer operation" in dropped.text


CONFIGS = {"both": ENSEMBLE, "good": GOOD}


class Remote:
    """A store whose models are downloaded as soon as they are requested. `show` makes them visible in a view."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._view = root / "views" / "key"
        self._view.mkdir(parents=True)
        (root / "trees" / ABSENT).mkdir(parents=True)
        for number, (name, config) in enumerate(CONFIGS.items()):
            model(root / "trees", str(number), config)
            self.show(name, ABSENT)
        self.folders = [self._view]
        self.requested: list[str] = []

    def show(self, name: str, tree: str) -> None:
        (self._view / name).unlink(missing_ok=True)
        (self._view / name).symlink_to(f"../../trees/{tree}")

    def start(self, listener: object) -> None:
        pass

    def list(self) -> None:
        pass

    def fetch(self, name: str, then: Fetched) -> None:
        self.requested.append(name)
        self.show(name, str(list(CONFIGS).index(name)))
        then("", ())

    def fetch_all(self, then: Fetched) -> None:
        then("", ())


class Started:
    """A server in mode explicit, before anything is loaded."""

    def __init__(self, root: Path) -> None:
        self.loop, self.remote = ThreadedLoop(), Remote(root)
        self.inbox: list[Any] = []
        self.began = 0
        self.catalog = Catalog(Repositories(self.remote.folders), {}, CoreSet((0,)))
        remote, core = cast(RemoteModels, self.remote), Core()
        settings = LoadSettings(root / "overrides", "explicit")
        self.operations = ClientOperations(
            self.loop, core, self.catalog, ReaderThread(), self.inbox.append, lambda *_: None, settings, remote
        )
        on_disk = DiskChanges(self.loop, core.state, self.catalog, self.operations, self.inbox.append)
        self.changes = RemoteChanges(remote, self.catalog.repositories, self.operations, on_disk, self._began)

    def _began(self) -> None:
        self.began += 1

    def deployed(self) -> list[str]:
        return [event.model for event in self.inbox if isinstance(event, events.Deploy)]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    started = Started(tmp_path)
    yield started
    started.operations.close()


def test_a_model_is_deployed_as_the_polling_thread_read_it(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop reads no files, and does not notice that a step's model has been released in the meantime."""
    readers: set[threading.Thread] = set()
    read = started.catalog.repositories.read

    def observed(*arguments: Any) -> ModelReading:
        readers.add(threading.current_thread())
        return read(*arguments)

    monkeypatch.setattr(started.catalog.repositories, "read", observed)
    started.changes.begin(["both"])
    started.loop.run_one()
    assert started.remote.requested == ["both", "good"]
    adopt = started.loop.next_call()
    started.remote.show("good", ABSENT)
    adopt()
    assert started.deployed() == ["both", "good"]
    assert started.began == 1
    assert not started.changes.starting
    assert threading.current_thread() not in readers


def test_all_models_are_loaded(started: Started) -> None:
    for name in CONFIGS:
        started.remote.fetch(name, lambda failure, notes: None)
    started.changes.begin(["*"])
    assert started.changes.starting
    for _ in range(2):
        started.loop.run_one()
    assert started.deployed() == ["both", "good"]
    assert started.began == 1


@pytest.mark.parametrize("models", [["*"], ["both"]])
def test_startup_survives_a_failed_disk(started: Started, monkeypatch: pytest.MonkeyPatch, models: list[str]) -> None:
    """Otherwise the server would never be ready, without saying why."""
    for name in ("read_all", "read"):
        failing = Mock(side_effect=OSError(EIO, "Input/output error"))
        monkeypatch.setattr(started.catalog.repositories, name, failing)
    started.changes.begin(models)
    while not started.began:
        started.loop.run_one()
    assert not started.changes.starting
    assert not started.deployed()

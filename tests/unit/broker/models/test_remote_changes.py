"""Loading models at the start that must be downloaded first. The test runs the loop and publishes models."""

from __future__ import annotations

import threading
from collections.abc import Iterator
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
from shmserve.core import events
from shmserve.core.core import Core
from shmserve.repo.compile import CoreSet
from shmserve.repo.remote.cache import ABSENT
from tests.support.manual_loop import ThreadedLoop
from tests.support.repo.models import ENSEMBLE, GOOD, model

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

"""Loading at the start what has to be downloaded first. The loop is called by hand; the test publishes models."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from shmserve.broker.models.catalog import Catalog, Reading
from shmserve.broker.models.operations import ClientOperations
from shmserve.broker.models.remote import Fetched, RemoteModels
from shmserve.broker.models.remote_changes import RemoteChanges
from shmserve.core import events
from shmserve.core.core import Core
from shmserve.repo.compile import CoreSet
from shmserve.repo.remote.cache import ABSENT
from tests.support.repo.models import ENSEMBLE, GOOD, model

CONFIGS = {"both": ENSEMBLE, "good": GOOD}


class Loop:
    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def call_soon_threadsafe(self, call: Callable[..., None], *arguments: Any) -> None:
        self.calls.put(lambda: call(*arguments))

    def next(self) -> Callable[[], None]:
        return self.calls.get(timeout=60)


class Remote:
    """Models are downloaded as soon as they are requested. `show` makes them what a view has."""

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

    def start(self) -> None:
        pass

    def list(self) -> None:
        pass

    def fetch(self, name: str, then: Fetched) -> None:
        self.requested.append(name)
        self.show(name, str(list(CONFIGS).index(name)))
        then("", ())


def test_a_model_is_deployed_as_the_thread_has_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop reads no files, and does not notice that a step's model has been released since."""
    loop, remote = Loop(), Remote(tmp_path)
    inbox: list[Any] = []
    began: list[bool] = []
    catalog = Catalog(remote.folders, {}, CoreSet((0,)))
    readers: set[threading.Thread] = set()
    read = catalog.read

    def observed(*arguments: Any) -> Reading:
        readers.add(threading.current_thread())
        return read(*arguments)

    monkeypatch.setattr(catalog, "read", observed)
    operations = ClientOperations(
        loop,
        Core(),
        catalog,
        inbox.append,
        lambda peer, message: None,
        tmp_path / "overrides",
        "explicit",
        remote=cast(RemoteModels, remote),
    )
    try:
        changes = RemoteChanges(cast(RemoteModels, remote), catalog, operations, lambda: began.append(True))
        changes.begin(["both"])
        loop.next()()
        assert remote.requested == ["both", "good"]
        adopt = loop.next()
        remote.show("good", ABSENT)
        adopt()
        assert [event.model for event in inbox if isinstance(event, events.Deploy)] == ["both", "good"]
        assert began == [True]
        assert not changes.starting
        assert threading.current_thread() not in readers
    finally:
        operations.close()

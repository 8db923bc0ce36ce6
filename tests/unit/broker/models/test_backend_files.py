"""Files of a backend in the backend directory belong to the versions that use it. The oracle is the test's own
changes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from shmserve.broker.models import backend_files as module
from shmserve.broker.models import poller
from shmserve.broker.models.backend_files import read_backend
from shmserve.broker.models.catalog import Catalog
from shmserve.broker.models.differences import compare
from shmserve.broker.models.poller import Poll
from shmserve.broker.models.repositories import ModelReading, Repositories
from shmserve.core.effects import Spawn
from shmserve.core.events import Deploy
from shmserve.core.policy import InstanceSpec
from shmserve.errors import InvalidRequest
from shmserve.repo.backends import BACKEND_PINS, DIRECTORY, ENVIRONMENT_FILE
from shmserve.repo.compile import CoreSet
from shmserve.repo.storage.generation import DEFAULT, Generations, Sizes
from shmserve.repo.storage.snapshot import Snapshot, changed, take
from tests.support.repo.models import GOOD, SOURCE, model

MINE = GOOD.replace("identity", "mine")


@pytest.fixture
def backends(tmp_path: Path) -> Path:
    for name in ("mine", "other"):
        (tmp_path / "backends" / name / "utils").mkdir(parents=True)
        (tmp_path / "backends" / name / "model.py").write_text(SOURCE)
        (tmp_path / "backends" / name / "utils" / "shared.py").write_text("A = 1\n")
    return tmp_path / "backends"


def catalog_of(tmp_path: Path, backends: Path, sizes: Sizes | None = None) -> Catalog:
    (tmp_path / "kept").mkdir()
    generations = Generations(tmp_path / "kept", sizes or DEFAULT)
    repositories = Repositories([tmp_path / "models"], str(backends), generations=generations)
    return Catalog(repositories, {DIRECTORY: str(backends)}, CoreSet((0,)))


def source_of(catalog: Catalog, name: str) -> int:
    (event,) = catalog.adopt(catalog.repositories.read(name))
    assert isinstance(event, Deploy)
    return event.targets[0].source


def order(catalog: Catalog, name: str) -> tuple[Mapping[str, str], str]:
    """The settings that a worker would get, and its environment."""
    spawn = Spawn(1 << 20, name, 1, source_of(catalog, name), InstanceSpec(f"{name}_0"))
    load, descriptor = catalog.load_order(spawn)
    os.close(descriptor)
    return load.settings, catalog.worker_resources(spawn).environment


def test_a_version_keeps_the_files_of_its_backend(tmp_path: Path, backends: Path) -> None:
    for name in ("a", "b"):
        model(tmp_path / "models", name, MINE)
    model(tmp_path / "models", "plain")
    catalog = catalog_of(tmp_path, backends)
    first = {name: source_of(catalog, name) for name in ("a", "b", "plain")}
    settings, environment = order(catalog, "a")
    folder = Path(settings[DIRECTORY]) / "mine"
    assert (folder / "utils" / "shared.py").read_text() == "A = 1\n"
    assert environment == ""
    assert sorted(path.name for path in Path(settings[DIRECTORY]).iterdir()) == ["mine"]
    assert order(catalog, "b")[0][DIRECTORY] == settings[DIRECTORY], "one copy is enough for all its models"
    assert order(catalog, "plain")[0][DIRECTORY] == str(backends)
    assert set(compare(catalog.loaded()).values()) == {False}

    (backends / "mine" / "utils" / "shared.py").write_text("A = 22\n")
    assert compare(catalog.loaded()) == {first["a"]: True, first["b"]: True, first["plain"]: False}
    assert (folder / "utils" / "shared.py").read_text() == "A = 1\n"
    second = {name: source_of(catalog, name) for name in first}
    assert {name for name in first if first[name] != second[name]} == {"a", "b"}
    assert {name: source_of(catalog, name) for name in first} == second
    assert (Path(order(catalog, "a")[0][DIRECTORY]) / "mine" / "utils" / "shared.py").read_text() == "A = 22\n"


def test_files_that_are_not_copied_are_watched_and_the_environment_is_shared(tmp_path: Path, backends: Path) -> None:
    (backends / "mine" / ENVIRONMENT_FILE).write_bytes(b"archive")
    model(tmp_path / "models", "a", MINE)
    own = 'parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "/opt/env" } }\n'
    model(tmp_path / "models", "b", MINE + own)
    catalog = catalog_of(tmp_path, backends, Sizes(0, 0))
    settings, environment = order(catalog, "a")
    assert Path(environment).samefile(backends / "mine" / ENVIRONMENT_FILE), "it is unpacked once, and is no copy"
    assert order(catalog, "b")[1] == "/opt/env"
    looks = json.loads(Path(settings[BACKEND_PINS]).read_bytes())
    folder = Path(settings[DIRECTORY]) / "mine"
    assert changed(folder, looks) == ""
    (backends / "mine" / "model.py").write_text(SOURCE + "# more\n")
    assert changed(folder, looks).startswith("model.py changed on disk since it was loaded (size ")


def test_a_backend_that_keeps_changing(tmp_path: Path, backends: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each reading, the files have changed by the time they are copied."""
    (tmp_path / "kept").mkdir()
    shared, readings = backends / "mine" / "utils" / "shared.py", 0

    def meddled(folder: Path) -> Snapshot:
        nonlocal readings
        readings += 1
        found = take(folder)
        shared.write_text("A = 1\n" + "#" * readings)
        return found

    monkeypatch.setattr(module, "take", meddled)
    found = read_backend("mine", str(backends), Generations(tmp_path / "kept"))
    assert readings == module.READINGS
    assert found is not None
    assert (found.folder / "utils" / "shared.py").read_text() == shared.read_text(), "the last one counts"

    def removed(folder: Path) -> Snapshot:
        (folder / "more").mkdir()
        found = take(folder)
        (folder / "more").rmdir()
        return found

    monkeypatch.setattr(module, "take", removed)
    with pytest.raises(InvalidRequest, match="the files of backend 'mine' changed while they were read"):
        read_backend("mine", str(backends), Generations(tmp_path / "kept"))


def test_a_poll_finds_a_changed_backend(tmp_path: Path, backends: Path) -> None:
    for name, config in {"a": MINE, "b": MINE.replace("mine", "other"), "plain": GOOD}.items():
        model(tmp_path / "models", name, config)
    now = 2e9  # the files are older than that
    poll = Poll(catalog_of(tmp_path, backends).repositories, 1.0, lambda: now, lambda: 0.0)

    def found() -> list[str]:
        """The models that one poll finds; the next one finds nothing."""
        first, again = poll.check().readings, poll.check().readings
        assert again == []
        return [reading.scanned.name for reading in first]

    assert found() == ["a", "b", "plain"]
    for path, text, expected in (
        (backends / "mine" / "utils" / "shared.py", "A = 22\n", ["a"]),
        (tmp_path / "models" / "a" / "config.pbtxt", MINE.replace("mine", "other"), ["a"]),
        (backends / "mine" / "model.py", SOURCE + "# not that of a any more\n", []),
        (backends / "other" / "model.py", SOURCE + "# that of both\n", ["a", "b"]),
    ):
        path.write_text(text)
        assert found() == expected
    (backends / "other").rename(backends / "gone")
    assert found() == ["a", "b"]


def test_a_backend_of_many_models_is_read_once(tmp_path: Path, backends: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        model(tmp_path / "models", name, MINE)
    catalog = catalog_of(tmp_path, backends)
    poll = Poll(catalog.repositories, 1.0, lambda: 2e9, lambda: 0.0)
    taken: list[Path] = []

    def counted(folder: Path) -> Snapshot:
        taken.append(folder)
        return take(folder)

    monkeypatch.setattr(module, "take", counted)
    monkeypatch.setattr(poller, "take", counted)

    def found(readings: Sequence[ModelReading]) -> tuple[list[str], int]:
        """The models that were read, and how many times the files of their backend were listed."""
        times = taken.count(backends / "mine")
        taken.clear()
        return [reading.scanned.name for reading in readings], times

    assert found(poll.check().readings) == (["a", "b", "c"], 1)
    assert found(poll.check().readings) == ([], 1)
    (backends / "mine" / "utils" / "shared.py").write_text("A = 22\n")
    assert found(poll.check().readings) == (["a", "b", "c"], 2), "once before they are read, and once while they are"
    assert found(poll.check().readings) == ([], 1)
    assert found(catalog.repositories.read_all()) == (["a", "b", "c"], 1)
    (backends / "mine" / "utils" / "shared.py").write_text("A = 333\n")
    readings = catalog.repositories.read_all()
    (folder,) = {reading.backend.folder for reading in readings if reading.backend is not None}
    assert (folder / "utils" / "shared.py").read_text() == "A = 333\n", "a later pass lists them again"


def test_a_backend_that_is_still_being_copied_waits(tmp_path: Path, backends: Path) -> None:
    model(tmp_path / "models", "a", MINE)
    clock = take(tmp_path / "models" / "a").newest / 1e9 + 1e6
    poll = Poll(catalog_of(tmp_path, backends).repositories, 10.0, lambda: clock, lambda: clock)
    assert len(poll.check().readings) == 1
    (backends / "mine" / "model.py").write_text(SOURCE + "# more\n")
    clock = take(backends / "mine").newest / 1e9 + 5
    changes = poll.check()
    assert (changes.readings, changes.recheck_s) == ([], 10.0)
    clock += 6
    assert len(poll.check().readings) == 1

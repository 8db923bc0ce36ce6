"""Polling for changes, with clocks that the test advances. The oracle is the test's own changes to the repositories."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from shmserve.broker.models.backend_files import KnownBackends
from shmserve.broker.models.overrides import LoadOverride
from shmserve.broker.models.poller import Poll, PollChanges
from shmserve.broker.models.repositories import ModelReading, Repositories
from shmserve.repo.storage import snapshot
from tests.support.repo.models import GOOD, model

SETTLE = 100.0
NEVER = float("inf")


class Meddled(Repositories):
    """Repositories that change on disk just before and just after a model is read."""

    before: Callable[[], object] = staticmethod(lambda: None)
    after: Callable[[], object] = staticmethod(lambda: None)

    def read_folder(
        self,
        folder: Path,
        given: LoadOverride | None = None,
        versions: Collection[int] = (),
        known: KnownBackends | None = None,
    ) -> ModelReading:
        before, self.before = self.before, lambda: None
        after, self.after = self.after, lambda: None
        before()
        reading = super().read_folder(folder, given, versions, known)
        after()
        return reading


class World:
    """One or more repositories, their poller, and its clocks. `written`: the files on disk were written just now."""

    def __init__(self, *roots: Path) -> None:
        for root in roots:
            root.mkdir()
        self.root = roots[0]
        self.repositories = Meddled(roots)
        self._wall = self._clock = 0.0
        self.poll = Poll(self.repositories, SETTLE, lambda: self._wall, lambda: self._clock)

    def written(self, ahead: float = 0.0) -> None:
        self._wall = time.time() + ahead

    def later(self, seconds: float) -> None:
        self._wall += seconds
        self._clock += seconds

    def model(self, name: str, root: Path | None = None) -> Path:
        made = model(root or self.root, name, GOOD)
        self.written()
        return made

    def write(self, path: Path, text: str) -> None:
        path.write_text(text)
        self.written()

    def checked(self) -> list[str]:
        """The models that are read now."""
        return names(self.poll.check())

    def settled(self) -> PollChanges:
        self.later(SETTLE + 10)
        return self.poll.check()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "models")


def names(changes: PollChanges) -> list[str]:
    return [reading.scanned.name for reading in changes.readings]


def quiet(changes: PollChanges) -> bool:
    """Whether nothing has changed and no change is pending."""
    return changes[:2] == ([], []) and changes.problems == [] and changes.recheck_s == NEVER


def test_a_model_is_read_once_its_files_have_settled(world: World) -> None:
    assert quiet(world.poll.check())
    assert list(world.poll.check().names) == []
    world.model("m")
    for _ in range(3):
        found = world.poll.check()
        assert (found[:2], list(found.names)) == (([], []), ["m"])
        assert found.recheck_s == SETTLE, "it makes sense to look before the next round"
        world.later(SETTLE / 4)
    found = world.settled()
    (reading,) = found.readings
    assert (reading.scanned.problem_texts, reading.snapshot) == ((), snapshot.take(world.root / "m"))
    assert found.recheck_s == NEVER
    assert quiet(world.settled())
    for part in range(1, 6):  # a file that is still being copied
        world.write(world.root / "m" / "1" / "weights", "x" * part)
        assert world.checked() == []
        world.later(SETTLE * 0.9)
        assert world.checked() == []
    (reading,) = world.settled().readings
    assert reading.snapshot is not None
    assert reading.snapshot.files["1/weights"][0] == 5
    world.model("n")
    assert names(world.settled()) == ["n"], "its files are old when they are found"


def test_clocks_that_differ(world: World) -> None:
    """The clock of the disk's machine differs from the local one, so the poller compares two checks."""
    folder = world.model("m")
    world.written(-1e6)
    assert world.checked() == []
    world.later(SETTLE * 0.9)
    assert world.checked() == []
    (folder / "1" / "weights").write_text("more")
    for _ in range(2):
        world.later(SETTLE * 0.9)
        assert world.checked() == []
    world.later(SETTLE * 0.2)
    assert world.checked() == ["m"]
    assert quiet(world.settled())
    world.model("n")
    world.written(1e6)
    assert world.checked() == ["n"], "all are old; the worker sees whether they change while it loads them"
    assert quiet(world.settled())


def test_a_model_that_changes_while_it_is_read(world: World) -> None:
    folder = world.model("m")
    world.repositories.before = lambda: world.write(folder / "1" / "weights", "half")
    assert names(world.settled()) == [], "what was read is not what had settled"
    world.repositories.after = lambda: world.write(folder / "1" / "weights", "all of it")
    for text in ("half", "all of it"):
        (reading,) = world.settled().readings
        assert reading.snapshot is not None
        assert reading.snapshot.files["1/weights"][0] == len(text), "what has been read was consistent"
    assert quiet(world.settled())


def test_a_model_that_vanishes_between_two_polls_or_while_it_is_read(world: World) -> None:
    folder = world.model("m")
    world.repositories.before = lambda: shutil.rmtree(folder)
    assert names(world.settled()) == []
    assert quiet(world.settled()), "nobody has heard of it, so nobody has to hear that it has gone"
    world.model("m")
    world.model("other")
    world.settled()
    world.write(folder / "config.pbtxt", GOOD.replace("8", "4"))
    world.repositories.before = lambda: shutil.rmtree(folder)
    assert world.settled().removed == []
    found = world.settled()
    assert (names(found), found.removed, list(found.names)) == ([], ["m"], ["other"])
    assert quiet(world.settled())
    world.model("m")
    assert names(world.settled()) == ["m"]


def test_a_broken_model_is_reported_once_per_change(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = world.model("m")
    for fault, text in (("max_bach_size", "max_batch_size"), ("identty", "identity")):
        world.write(folder / "config.pbtxt", GOOD.replace(text, fault))
        (problem,) = world.settled().readings[0].scanned.problem_texts
        assert text in problem
        for _ in range(2):
            assert quiet(world.settled())
    world.write(folder / "config.pbtxt", GOOD)
    assert world.settled().readings[0].scanned.problem_texts == ()
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "ENTRIES", 1)
        assert world.checked() == []
        (reading,) = world.settled().readings
        assert reading.snapshot is None, "who reads it says what is wrong"
        assert quiet(world.settled())
    (reading,) = world.settled().readings
    assert reading.snapshot is not None


def test_a_model_in_two_repositories(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    world = World(first, second)
    world.model("m")
    world.model("only here", root=second)
    assert names(world.settled()) == ["m", "only here"]
    world.model("m", root=second)
    found = world.poll.check()
    assert names(found) == ["m"]
    assert found.readings[0].scanned.problem_texts == (
        "model appears in two or more repositories: 'm' is in 2 of them; keep one",
    )
    assert quiet(world.settled())
    shutil.rmtree(second / "m")
    found = world.settled()
    (reading,) = found.readings
    assert (reading.scanned.path, reading.scanned.problem_texts, found.removed) == (first / "m", (), [])
    world.model("m", root=second)
    assert world.checked() == ["m"]
    shutil.rmtree(first / "m")
    assert world.settled().readings[0].scanned.path == second / "m"
    shutil.rmtree(second / "m")
    assert world.settled().removed == ["m"]


def test_a_repository_that_disappears_and_returns(tmp_path: Path) -> None:
    world = World(tmp_path / "first", tmp_path / "second")
    world.model("m")
    world.model("n", root=tmp_path / "second")
    world.settled()
    for _ in range(2):
        world.root.rename(tmp_path / "away")
        found = world.poll.check()
        (text,) = found.problems
        assert "--model-repository" in text
        assert found == ([], [], ["m", "n"], [text], NEVER), "what is served goes on"
        assert quiet(world.settled()), "it has been told"
        (tmp_path / "away").rename(world.root)
        assert quiet(world.settled())
    world.write(world.root / "m" / "config.pbtxt", GOOD.replace("8", "2"))
    assert names(world.settled()) == ["m"]
    shutil.rmtree(world.root)
    world.root.write_text("")
    found = world.poll.check()
    assert (len(found.problems), found.removed) == (1, [])
    world.root.unlink()
    world.root.mkdir()
    assert world.settled().removed == ["m"], "empty is not the same as not there"


def test_at_startup_models_are_read_without_waiting_for_them_to_settle(world: World) -> None:
    folder = world.model("m")
    assert names(world.poll.check(at_start=True)) == ["m"]
    assert names(world.settled()) == []
    world.write(folder / "1" / "more", "half")
    assert world.checked() == []
    assert names(world.settled()) == ["m"]
    other = world.model("n")
    world.repositories.before = lambda: world.write(other / "1" / "more", "half")
    assert names(world.poll.check(at_start=True)) == [], "it changed while it was read"

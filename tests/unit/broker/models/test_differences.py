"""Which versions differ from the repository. The oracle is the test's own changes; the test runs the loop."""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path

import pytest

from shmserve.broker.models import differences as module
from shmserve.broker.models.differences import Differences, LoadedVersion, compare
from shmserve.repo.storage.snapshot import take
from tests.support.manual_loop import ThreadedLoop


def model(folder: Path) -> Path:
    for version in ("1", "2"):
        (folder / version).mkdir(parents=True)
        (folder / version / "file").write_text("a")
    (folder / "config.pbtxt").write_text("c")
    return folder


def loaded(folder: Path, source: int, version: int, configuration: bool = True) -> LoadedVersion:
    seen = take(folder)
    return LoadedVersion(
        source, folder, version, seen.of_version(version), seen.of_configuration() if configuration else None
    )


@pytest.mark.parametrize(
    ("path", "changed"),
    [("1/file", {1, 3}), ("2/more", {2}), ("labels.txt", {1, 2, 3}), ("config.pbtxt", {1, 2}), (".hidden", set())],
)
def test_changed_files_are_found_per_version(tmp_path: Path, path: str, changed: set[int]) -> None:
    folder = model(tmp_path / "m")
    entries = [loaded(folder, 1, 1), loaded(folder, 2, 2), loaded(folder, 3, 1, configuration=False)]
    assert compare(entries) == {1: False, 2: False, 3: False}
    (folder / path).write_text("changed")
    assert {source for source, differs in compare(entries).items() if differs} == changed
    folder.rename(tmp_path / "other")
    assert set(compare(entries).values()) == {True}, "a model that was removed differs"


def test_a_comparison_is_bounded(tmp_path: Path) -> None:
    entries = [loaded(model(tmp_path / str(number)), number, 1) for number in range(4)]
    files = len(take(tmp_path / "0").files)
    assert list(compare(entries, files + 1)) == [0, 1]


class Compared:
    """Three loaded versions whose comparisons always stop after the first, which differs."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        entries = [loaded(model(folder / str(number)), number, 1) for number in range(3)]
        self.loop = ThreadedLoop()
        self.comparisons: list[list[int]] = []
        self.answers: list[Set[int]] = []
        self.differences = Differences(self.loop, lambda: entries)
        patch.setattr(module, "compare", self._compare)

    def _compare(self, entries: list[LoadedVersion]) -> dict[int, bool]:
        self.comparisons.append([entry.source for entry in entries])
        return {entries[0].source: True}

    def check(self) -> None:
        self.differences.check(self.answers.append)


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compared]:
    made = Compared(tmp_path, monkeypatch)
    yield made
    made.differences.close()


def test_simultaneous_callers_share_one_comparison(compared: Compared) -> None:
    for _ in range(3):
        compared.check()
    (timeout,) = compared.loop.timers
    compared.loop.run_one()
    assert (len(compared.comparisons), compared.answers) == (1, [{0}] * 3)
    assert timeout.cancelled, "or it would answer later callers too early"
    compared.check()
    assert compared.answers == [{0}] * 4, "compared a moment ago"
    assert not compared.loop.timers


def test_a_disk_that_does_not_respond(compared: Compared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers wait for a limited time, and the next comparison begins where this one ended."""
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    compared.check()
    compared.loop.fire()
    assert compared.answers == [set()]
    compared.loop.run_one()
    compared.check()
    compared.loop.run_one()
    assert (compared.comparisons, compared.answers) == ([[0, 1, 2], [1, 2, 0]], [set(), {0, 1}])

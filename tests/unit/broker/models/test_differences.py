"""Which versions differ from the repository. The oracle is the test's own changes; the test runs the loop."""

from __future__ import annotations

from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import pytest

from shmserve.broker.models import differences as module
from shmserve.broker.models.differences import Differences, LoadedVersion, compare
from shmserve.repo.storage.snapshot import take
from tests.support.broker.fake_loop import Timer


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


def test_a_removed_model_differs(tmp_path: Path) -> None:
    entry = loaded(model(tmp_path / "m"), 1, 1)
    (tmp_path / "m").rename(tmp_path / "other")
    assert compare([entry]) == {1: True}


def test_a_comparison_is_bounded(tmp_path: Path) -> None:
    entries = [loaded(model(tmp_path / str(number)), number, 1) for number in range(4)]
    files = len(take(tmp_path / "0").files)
    assert list(compare(entries, files + 1)) == [0, 1]


class Loop:
    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []
        self.later: list[Timer] = []

    def call_soon_threadsafe(self, call: Callable[..., None], *given: Any) -> None:
        self.soon.append(lambda: call(*given))

    def call_later(self, after: float, call: Callable[[], None]) -> Timer:
        self.later.append(Timer(after, call))
        return self.later[-1]


def test_simultaneous_callers_share_one_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparisons: list[list[LoadedVersion]] = []

    def compared(entries: list[LoadedVersion]) -> dict[int, bool]:
        comparisons.append(entries)
        return {entries[0].source: True}

    monkeypatch.setattr(module, "compare", compared)
    entries = [loaded(model(tmp_path / str(number)), number, 1) for number in range(3)]
    loop, answers = Loop(), list[Set[int]]()
    differences = Differences(loop, lambda: entries)
    for _ in range(3):
        differences.check(answers.append)
    differences._thread.shutdown()
    assert (len(comparisons), answers, len(loop.later)) == (1, [], 1)
    loop.soon.pop()()
    assert answers == [{0}] * 3
    assert loop.later[0].cancelled, "or it would answer later callers too early"
    differences.check(answers.append)
    assert answers == [{0}] * 4, "compared a moment ago"
    assert len(loop.later) == 1


def test_a_disk_that_does_not_respond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers wait for a limited time, and the next comparison begins where this one ended."""
    comparisons: list[list[int]] = []

    def compared(entries: list[LoadedVersion]) -> dict[int, bool]:
        comparisons.append([entry.source for entry in entries])
        return {entries[0].source: True}

    monkeypatch.setattr(module, "compare", compared)
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    entries = [loaded(model(tmp_path / str(number)), number, 1) for number in range(3)]
    loop, answers = Loop(), list[Set[int]]()
    differences = Differences(loop, lambda: entries)
    differences.check(answers.append)
    loop.later.pop().call()
    assert answers == [set()]
    differences._thread.submit(lambda: None).result()
    loop.soon.pop()()
    differences.check(answers.append)
    differences._thread.shutdown()
    loop.soon.pop()()
    assert (comparisons, answers) == ([[0, 1, 2], [1, 2, 0]], [set(), {0, 1}])

"""The startup messages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from shmserve.broker.observability.progress import LoadProgress, first_steps, hints
from shmserve.core import events
from tests.support.core.policies import plain
from tests.support.core.world import World


class Watched(World):
    """Reports after each turn, as the broker does."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.failed: list[int] = []
        self.downloading = False
        self.progress = LoadProgress(
            self.core,
            self.failed.append,
            lambda level, text, fields: self.lines.append(text.partition(" after")[0]),
            lambda: self.downloading,
        )

    def _carry_out(self, effects: list[Any]) -> None:
        super()._carry_out(effects)
        if not self.failed:
            self.progress.report()


def test_versions_are_reported_in_any_turn_and_failures_counted_at_the_end() -> None:
    world = Watched()
    for name in ("a", "b", "c"):
        world.deploy(plain(name), load=False)
    world.turn([(0, events.Refuse("d", 0, "it has no files"))])
    world.turn([(world.worker("b_0").peer, events.Compiled(plain("b")))])
    assert (world.lines, world.failed) == (["[1/3] model 'b' version 1 READY"], [])
    world.turn([(0, events.Unload("a"))])
    world.downloading = True
    world.turn([(world.worker("c_0").peer, events.Compiled(plain("c")))])
    assert (world.lines[1:], world.failed) == (["[3/3] model 'c' version 1 READY"], []), "others may follow"
    world.downloading = False
    world.turn([])
    assert world.failed == [2], "the refused model, and the one that was unloaded"


def test_paths_in_the_example_commands_are_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "my env" / "python"))
    (tmp_path / "my env").mkdir()
    (tmp_path / "my env" / "shmserve").touch()
    commands = first_steps("my model", Path("/run/my server"), is_default=False, ports={})
    assert f"'{tmp_path}/my env/shmserve' infer 'my model' --random --runtime-dir '/run/my server'\n" in commands
    text = hints(Path("/run/my server"), is_default=False, ports={})
    assert " demo --runtime-dir '/run/my server'\n" in text
    assert "shmserve.Client(runtime_dir='/run/my server')" in text

"""The reason why a model failed is shown by `models`, `ready` and `ready --wait`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shmserve
from tests.support import living
from tests.support.commands import run
from tests.support.launch import Launched
from tests.support.living import answer, generation, identity, index, until

pytestmark = pytest.mark.process

BROKEN = "could not convert string to float"
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@pytest.fixture
def polled(root: Path, tmp_path: Path) -> Iterator[Launched]:
    options = ("--model-control-mode", "poll", "--repository-poll-secs", "0.1")
    generation(root, "m", 1)
    identity(root, "other")
    with Launched(root, tmp_path / "run", *options) as server:
        yield server


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return lambda *words: run(*words, "--runtime-dir", tmp_path / "run")


def test_a_failed_reload_is_shown_until_one_succeeds(root: Path, polled: Launched, command: Command) -> None:
    with shmserve.Client(runtime_dir=polled.runtime_dir) as client:
        until(client, lambda: answer(client, "m") == 1)
        assert index(client, "m")["m/1"]["last_failed_change"] is None
        began = time.time()
        living.renew(root / "m", "three")
        until(client, lambda: index(client, "m")["m/1"]["last_failed_change"])
        entry = index(client, "m")["m/1"]
        assert (entry["state"], entry["reason"]) == ("READY", "")
        assert BROKEN in entry["last_failed_change"]["reason"]
        assert began - 1 < entry["last_failed_change"]["time"] <= time.time()
        shown = command("models")[1]
        assert re.search(rf"^m .* READY .* the change at \d{{4}}-\S+ \S+ failed: .*{BROKEN}", shown, re.MULTILINE)
        assert "failed" not in next(line for line in shown.splitlines() if line.startswith("other "))
        for words, what in ((["ready", "m"], "model 'm'"), (["ready"], "the server")):
            code, out, err = command(*words)
            assert (code, out) == (0, f"{what} is ready\n")
            assert re.match(
                r"shmserve ready: warning: model 'm' still serves its previous version: the change at .* failed: ", err
            )
        assert command("ready", "other") == (0, "model 'other' is ready\n", "")
        living.write(root / "m" / "config.pbtxt", "backend: 7")
        until(client, lambda: "backend" in index(client, "m")["m/1"]["last_failed_change"]["reason"])
        assert re.search(
            r"ERROR load failed for model 'm': .*backend.*; the previous version is still served", polled.log
        )
        assert "not served" not in polled.log
        living.write(root / "m" / "config.pbtxt", living.PYTHON)
        living.renew(root / "m", 3)
        until(client, lambda: answer(client, "m") == 3)
        assert index(client, "m")["m/1"]["last_failed_change"] is None
        assert command("ready", "m") == (0, "model 'm' is ready\n", "")


def test_ready_with_wait_ends_at_a_failed_load(root: Path, polled: Launched, command: Command, tmp_path: Path) -> None:
    """However long the timeout is: here an hour."""
    # Moved into place in one step, because the poll could read a half-written model.
    generation(tmp_path / "aside", "bad", "nothing").rename(root / "bad")
    code, out, err = command("ready", "bad", "--wait", "3600")
    assert (code, out) == (1, "")
    assert "model 'bad' at " in err
    assert " is not ready, and nothing is being loaded: bad 1 is UNAVAILABLE (failed to load: " in err
    assert BROKEN in err
    code, out, err = command("ready", "--wait", "3600")
    assert (code, out) == (1, "")
    assert "the server at " in err
    assert BROKEN in err
    assert command("ready", "m", "--wait", "3600")[0] == 0
    with shmserve.Client(runtime_dir=polled.runtime_dir) as client:
        with pytest.raises(shmserve.Unavailable, match=BROKEN):
            client.wait_ready("bad")
        living.renew(root / "bad", 5)
        until(client, lambda: client.ready("bad"))
        client.wait_ready("bad")
        client.wait_ready()

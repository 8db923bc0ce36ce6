"""The page on the samples: its instructions are run in order, with all samples served."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT

import pytest

from shmserve.repo import samples
from shmserve.testing import Server
from tests import ROOT
from tests.support.commands import COMMAND
from tests.support.docs import pages
from tests.support.shared_server import SharedServer

PAGE = pages.page("examples")
MADE = ROOT / ".venv" / ".samples"
NEWER = [ROOT / name for name in ("setup.cfg", "pyproject.toml")]
IS_MADE = MADE.exists() and all(MADE.stat().st_mtime >= path.stat().st_mtime for path in NEWER)
pytestmark = pytest.mark.process


MODELS = {name for names in samples.SETS.values() for name in names}
SERVED = {name for part in samples.READY_TO_SERVE for name in samples.SETS[part]}


def commands() -> list[list[str]]:
    """Except tune, whose networks have hundreds of megabytes: test_samples.py runs smaller ones."""
    found = [shlex.split(line, comments=True) for line in pages.commands("examples")]
    return [words[1:] for words in found if words[0] == "shmserve" and words[1] not in ("serve", "tune")]


def run(*command: str, cwd: Path = ROOT, **environment: str) -> str:
    given = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))} | environment
    ended = subprocess.run(command, cwd=cwd, env=given, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, text=True)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    if set(samples.build(folder / "build" / "all", lambda text: None, samples.READY_TO_SERVE)) != SERVED:
        pytest.skip("what the larger samples need is not installed: run `make samples`")
    return folder


@pytest.fixture(scope="module")
def server(place: Path, shared_server: SharedServer) -> Iterator[Server]:
    with shared_server.serving(place / "build" / "all") as running:
        yield running


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands(server: Server, place: Path, words: list[str]) -> None:
    command = [*COMMAND, *words]
    said = run(*command, cwd=place, SHMSERVE_RUNTIME_DIR=str(server.runtime_dir))
    if words[:2] == ["infer", "sentiment"]:
        assert re.search("positive.*negative", said)
    if words[0] == "check":
        assert "23 models checked, no problems" in said


def test_programs(server: Server) -> None:
    programs = pages.blocks(PAGE, "python")
    assert len(programs) == 6
    topics, lines, directions, lanes, chat, chances = (pages.run_program(server, one) for one in programs)
    assert [line.partition(" 0.")[0] for line in lines.splitlines()] == [
        "Handles travel, ",
        "tensors stay: 64 MiB, 0 copies",
    ]
    assert [line.partition(" (")[0] for line in topics.splitlines()] == ["cooking", "technology", "sports"]
    assert re.match(r".*:upright\n\(1, 192, 3200\) \d+% of", directions)
    assert lanes == "line 1, column 141 at the lower edge\n"
    assert "Paris" in chat
    assert re.match(r"0\.00 s: 0\.\d+\n0\.03 s: 0\.\d+\n", chances)
    assert len(chances.splitlines()) == 16_000 // samples.VAD_CHUNK


def test_the_page_lists_all_sample_models() -> None:
    rows = PAGE.partition("| set | models | what they show |\n")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", rows))
    assert set(samples.SETS["basic"]) <= named <= MODELS
    assert sorted(re.findall(r"^\| \[?(\w+)", rows, re.MULTILINE)) == sorted(samples.SETS)
    assert [part for part, models in samples.SETS.items() if named.isdisjoint(models)] == []
    words = (samples.EXAMPLES / "sentiment_tokenizer" / "1" / "words.txt").read_text().split()
    assert f"The classifier knows {len(words)} words" in PAGE


@pytest.mark.skipif(not IS_MADE, reason="make has not set this environment up: run `make samples`")
def test_make_samples(tmp_path: Path) -> None:
    said = run("make", "samples", f"ALL_SAMPLES={tmp_path / 'all'}")
    assert {path.name for path in (tmp_path / "all").iterdir()} == set(re.findall(r"^  (\w+)$", said, re.MULTILINE))
    assert set(samples.SETS["sentiment"]) <= {path.name for path in (tmp_path / "all").iterdir()}

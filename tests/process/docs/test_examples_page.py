"""The page on the samples: its instructions are run in order, with all samples served, and results are compared with
what the weights of words or the unchanged network give."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from typing import Any

import numpy as np
import pytest

import shmserve
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


SENTIMENTS = {
    "The tea was excellent, and the staff friendly.": ("positive", 4),
    "It was not good. Not good at all!": ("negative", 4),
    "Nothing wrong with it; it isn't bad": ("positive", 4),
    "We sat at a table by the window": ("neutral", 0),
    "": ("neutral", 0),
    "GOOD bad": ("neutral", 0),
    "Terrible service, slow and rude, but a nice view": ("negative", 5),
    "w\u00f6rds we don't know \u2014 \U0001f600": ("neutral", 0),
    "It works": ("positive", 1),
    " ".join(["so"] * 32 + ["terrible"]): ("neutral", 0),  # only 32 words count
}
"""Text -> its label, and the sum of the weights of its words."""


def test_sentiments(client: shmserve.Client) -> None:
    texts = np.array([[text.encode()] for text in SENTIMENTS], np.object_)
    labels = [label for label, _ in SENTIMENTS.values()]
    powers = np.exp([[0.8, total, -total] for _, total in SENTIMENTS.values()])
    found = client.infer("sentiment", {"TEXT": texts})
    assert [label.decode() for label in found["LABEL"][:, 0]] == labels
    np.testing.assert_allclose(found["SCORE"][:, 0], powers.max(1) / powers.sum(1), rtol=1e-5)
    words = client.infer("sentiment_tokenizer", {"TEXT": texts})["WORDS"]
    assert words.shape == (len(SENTIMENTS), 32)
    best = client.infer("sentiment_classifier", {"WORDS": words}, outputs={"SCORES": shmserve.TopK(1)})["SCORES"]
    assert [text.decode().rpartition(":")[2] for text in best[:, 0]] == labels


def test_the_voice_detector_keeps_the_state_of_each_stream(client: shmserve.Client) -> None:
    """Two streams, in turns. The oracle runs each through the unchanged network, as the wrapper of the package does."""
    import onnxruntime

    network = onnxruntime.InferenceSession(str(samples.vad_model_file()), providers=["CPUExecutionProvider"])
    streams = 0.3 * np.random.default_rng(1).standard_normal((2, 9, samples.VAD_CHUNK)).astype(np.float32)
    expected = []
    for chunks in streams:
        state, last = np.zeros((2, 1, 128), np.float32), np.zeros(samples.VAD_CONTEXT, np.float32)
        for chunk in chunks:
            feeds: dict[str, Any] = {"input": np.concatenate([last, chunk])[None], "state": state}
            probability, state = network.run(None, {**feeds, "sr": np.array(samples.VAD_RATE)})
            expected.append(probability[0, 0])
            last = chunk[-samples.VAD_CONTEXT :]
    futures = {
        (stream, at): client.submit(
            "vad",
            {"CHUNK": streams[stream, at][None]},
            sequence=stream + 1,
            sequence_start=at == 0,
            sequence_end=at == 8,
        )
        for at in range(9)
        for stream in range(2)
    }
    heard = [futures[stream, at].result()["PROBABILITY"][0, 0] for stream in range(2) for at in range(9)]
    np.testing.assert_allclose(heard, expected, atol=1e-5)
    assert max(expected) > 2 * min(expected)


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

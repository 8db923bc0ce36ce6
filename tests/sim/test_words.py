"""Service times, recordings and the command in the form that users write; and docs/sizing.md, command by command."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import fields

from shmserve.errors import InvalidRequest
from shmserve.sim import Affine, Bursts, Constant, Faults, Lognormal, Poisson, Replay, Service, Table, read_recording
from shmserve.sim.command import main, parser
from shmserve.sim.service import PerElement, parse, read_table
from tests import ROOT
from tests.support.cases import cases
from tests.support.docs import pages
from tests.support.hypothesis_profiles import examples

PAGE = pages.page("sizing")
MS = 1_000_000


@cases(
    ("5ms", Constant(5 * MS)),
    ("300us", Constant(300_000)),
    ("1.5s", Constant(1500 * MS)),
    ("1ms+0.2ms/row", Affine(MS, 200_000)),
    ("1ms+5us/element", PerElement(MS, 5000)),
    ("lognormal:4ms", Lognormal(4 * MS, 0.5)),
    ("lognormal:4ms,0.25", Lognormal(4 * MS, 0.25)),
)
def test_service_times_are_parsed(text: str, service: Service) -> None:
    assert parse(text) == service


TIMES = ("", "5", "ms", "5 hours", "1ms+2ms", "lognormal:1ms,x", "other:5ms", "table:/no/such")
TABLES = ("", "[]", "{}", '{"0": 1}', '{"1": []}', '{"1": -1}', '{"a": 1}', '{"1": "x"}')


@cases(
    *((parse, text, None) for text in TIMES),
    *((read_table, text, None) for text in TABLES),
    *(
        (read_recording, f'{{"at": 0, "model": "a"}}\n{line}\n', "line 2")
        for line in ("x", "[]", '{"model": "a"}', '{"at": 1}', '{"at": -1, "model": "a"}', '{"at": 1e999}')
    ),
)
def test_invalid_times_tables_and_recordings_are_refused(
    read: Any, text: str, error: str | None, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(InvalidRequest, match=error):
        read(text if read is parse else tmp_path / "file")


def test_a_table_interpolates_between_measurements(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text('{"8": [8, 10], "1": 2}')
    table = read_table(path)
    assert table == Table(((1, (2 * MS,)), (8, (8 * MS, 10 * MS))))
    draw = Random(1)
    assert table.ns(1, draw) == 2 * MS
    assert {table.ns(8, draw) for _ in range(50)} == {8 * MS, 10 * MS}
    assert all(2 * MS < table.ns(4, draw) < 10 * MS for _ in range(50))
    assert table.ns(16, Random(0)) in (16 * MS, 20 * MS)


def test_means_match_the_drawn_service_times() -> None:
    draw = Random(1)
    table = Table(((8, (8 * MS, 10 * MS)),))
    for service, rows, mean in (
        (Constant(MS), 4, MS),
        (Affine(MS, MS), 4, 5 * MS),
        (Lognormal(3 * MS, 0.6, 1000), 4, 3 * MS * math.exp(0.6**2 / 2) + 4000),
        (table, 8, 9 * MS),
    ):
        drawn = sum(service.ns(rows, draw) for _ in range(20_000)) / 20_000
        assert drawn == pytest.approx(mean, rel=0.02)


@settings(max_examples=examples(20))
@given(st.integers(0, 10), st.floats(10, 1e6))
def test_arrival_times_are_sorted_and_keep_their_rate(seed: int, rate: float) -> None:
    for arrivals in (Poisson(rate), Bursts(rate, 5)):
        drawn = arrivals.arrivals(Random(seed))
        times = [next(drawn)[0] for _ in range(4000)]
        assert times == sorted(times)
        assert 4000 / (times[-1] / 1e9) == pytest.approx(rate, rel=0.15)


def test_a_recording_is_sorted_by_time_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "calls.jsonl"
    lines = [{"at": 0.5, "model": "a", "rows": 2}, {"at": 0.25, "model": "a"}, {"at": 1, "model": "b"}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_recording(path) == {"a": Replay(((250 * MS, 1), (500 * MS, 2))), "b": Replay(((1000 * MS, 1),))}
    told = json.loads(run(capsys, "--recording", str(path), "--model", "a", "--json"))
    assert told["models"]["a"]["batches"] == {"1": 1, "2": 1}


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_models_use_their_configuration_in_the_repository(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--repository", str(ROOT / "repo" / "examples"), "--model", "mlp", "--callers", "64", "--seconds", "0.2")
    told = json.loads(run(capsys, *words, "--json"))
    assert max(map(int, told["models"]["mlp"]["batches"])) == 32  # its max_batch_size
    several = json.loads(run(capsys, *words, "--instances", "3", "--json"))
    assert several["models"]["mlp"]["instances"] == 3


def test_an_ensemble_is_simulated_with_its_steps(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--repository", str(ROOT / "repo" / "examples"), "--model", "sentiment", "--requests", "40", "--json")
    told = json.loads(run(capsys, *words, "--service", "sentiment_classifier=3ms", "--service", "1ms"))
    assert told["models"]["sentiment"]["answered"] == 40
    steps = set(told["models"]) - {"sentiment"}
    assert len(steps) == 3
    assert all(told["models"][name]["batches"] for name in steps)
    assert told["models"]["sentiment"]["latency_ms"]["p50"] > 5


def test_a_model_is_simulated_with_the_models_it_calls(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--repository", str(ROOT / "repo" / "examples"), "--model", "add_sub", "--requests", "40", "--json")
    told = json.loads(run(capsys, *words, "--calls", "add_sub=mlp,cnn", "--service", "cnn=5ms", "--service", "1ms"))
    models = told["models"]
    assert models["add_sub"]["answered"] == 40
    for name in ("mlp", "cnn"):
        assert sum(int(rows) * count for rows, count in models[name]["batches"].items()) == 40
    assert models["add_sub"]["latency_ms"]["p50"] > 7


@cases(
    ["--service", "nonsense"],
    ["--service", "other=5ms"],
    ["--repository", "repo/examples", "--model", "mlp", "--service", "cnn=5ms"],
    ["--repository", "no/such/place"],
    ["--repository", "repo/examples"],
    ["--repository", "repo/examples", "--model", "nobody"],
    ["--repository", "repo/examples", "--model", "mlp", "--max-batch", "4"],
    ["--repository", "repo/examples", "--model", "mlp", "--calls", "nobody=mlp"],
    ["--repository", "repo/examples", "--model", "mlp", "--calls", "mlp=nobody"],
    ["--repository", "repo/examples", "--model", "sentiment", "--calls", "sentiment=mlp"],
    ["--calls", "model=other"],
    ["--callers", "4", "--compare"],
    ["--recording", "no/such/file"],
)
def test_a_failed_simulation_prints_a_one_line_error(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main([*words, "--seconds", "0.1"]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("error: ")
    assert told.err.count("\n") == 1
    assert not told.out


@pytest.mark.parametrize(
    "words", ["--rate 1 --callers 2", "--rows 3-1", "--fault x=1", "--rate 0", "--sweep 1,x", "--calls mlp"]
)
def test_invalid_arguments_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert "error" in capsys.readouterr().err


def commands() -> list[list[str]]:
    text = "\n".join(pages.blocks(PAGE, "sh")).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    return [words[3:] for words in lines if words[:3] == ["python", "-m", "shmserve.sim"]]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_of_the_page(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert run(capsys, *words)


def test_the_program_of_the_page_runs() -> None:
    (block,) = pages.blocks(PAGE, "python")
    ran = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.search(r"\d", ran.stdout)


def test_every_fault_is_documented_on_the_page_and_in_the_help() -> None:
    told = parser().format_help()
    for field in fields(Faults):
        assert field.name in told
        assert f"`{field.name}`" in PAGE

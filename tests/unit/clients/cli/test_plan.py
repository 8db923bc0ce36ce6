"""`shmserve plan`: arguments and output. tests/sim/test_fleet.py tests the simulation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shmserve.clients.cli import main
from shmserve.clients.cli.arguments import plan as arguments
from shmserve.tools.plan import fleet as simulated
from tests.support.docs import pages

QUICK = "plan --servers 4 --instances 2 --service-ms 10 --requests 300"


def printed(words: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> tuple[str, str]:
    assert main.main(words.split()) == code
    found = capsys.readouterr()
    return found.out, found.err


def results(words: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(printed(f"{words} --json", capsys)[0])["results"]
    return found


def test_a_row_for_each_combination(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{QUICK} --servers 4,8 --rate 200,0.4k --policy random,least"
    out, err = printed(words, capsys)
    rows = [line.split() for line in out.splitlines()[1:9]]
    assert [(row[0], row[1], row[2]) for row in rows] == [
        (policy, servers, rate) for servers in "48" for policy in ("random", "least") for rate in ("200", "400")
    ]
    assert "8/8 least, 8 servers, 400 requests/s" in err
    assert "service time 10ms" in out
    found = results(words, capsys)
    assert [(each["policy"], each["servers"], each["rate"]) for each in found] == [
        (row[0], int(row[1]), float(row[2])) for row in rows
    ]
    assert all(each["sent"] == each["in_time"] == 300 for each in found)


def test_the_default_rate_is_a_share_of_the_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    (alone,) = results(QUICK, capsys)
    assert alone["rate"] == pytest.approx(0.7 * 4 * 2 / 0.010)
    (batched,) = results(f"{QUICK} --max-batch 8", capsys)
    assert batched["rate"] == pytest.approx(8 * alone["rate"])
    (tiny,) = results(f"{QUICK} --service-ms 0.001", capsys)
    assert tiny["rate"] == pytest.approx(0.7 * 4 * 125_000)  # what a broker can handle


def test_all_policies(capsys: pytest.CaptureFixture[str]) -> None:
    """Policies by key are only included if there are keys. The page has all of them."""
    assert arguments.POLICIES == simulated.POLICIES
    assert set(re.findall(r"^- `([a-z][a-z-]*)`: ", pages.page("sizing"), re.MULTILINE)) == set(simulated.POLICIES)
    without_keys = ["random", "round-robin", "two-choices", "least"]
    assert [each["policy"] for each in results(f"{QUICK} --policy all", capsys)] == without_keys
    found = results(f"{QUICK} --policy all --keys 50 --cache 20", capsys)
    assert [each["policy"] for each in found][-2:] == ["hash", "bounded-hash"]
    assert all(each["cache_hits"] > 0 for each in found)


def test_failures_and_the_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{QUICK} --rate 300 --seconds 1 --kill-zone 300ms+300ms --detect 100ms --connect 20ms --requests 1M"
    out, _ = printed(words, capsys)
    assert "RECOVERED" in out
    timeline = [line.split() for line in out.partition("Over time:\n")[2].splitlines()[1:25]]
    assert {row[-1] for row in timeline} == {"4", "2"}
    assert "LOST" in out
    (found,) = results(words, capsys)
    assert [row["servers"] for row in found["timeline"]] == [int(row[-1]) for row in timeline]
    (second,) = results(f"{words} --kill-zone 400ms", capsys)
    assert min(row["servers"] for row in second["timeline"]) == 1
    (kept,) = results(f"{words} --retry-lost", capsys)
    assert "LOST" not in kept["failed"]


def test_the_exit_code_is_1_if_no_request_meets_the_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    printed(f"{QUICK} --deadline 5ms", capsys, 1)
    out, _ = printed(f"{QUICK} --exact", capsys)
    assert "the scheduler itself" in out, "--exact simulates it"
    assert "100.000%" in out


def test_times_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = {"count": 10, "ns": 10 * 2_000_000}
    none = {"count": 10, "ns": 0}
    parts = {"compute_input": none, "compute_infer": part, "compute_output": none}
    document = {"model_stats": [{"name": "mlp", "version": "1", "batch_stats": [{"batch_size": 4, **parts}]}]}
    file = tmp_path / "stats.json"
    file.write_text(json.dumps(document))
    words = f"plan --servers 2 --requests 300 --from {file}"
    (found,) = results(words, capsys)
    assert found["rate"] == pytest.approx(0.7 * 2 * 8 * 4 / 0.002)
    assert "statistics of mlp, ms by rows: 4: 2" in printed(words, capsys)[0]
    printed(f"{words} --model cnn", capsys, 1)
    file.write_text("{}")
    assert main.main(words.split()) == 1
    assert "neither from `bench --save`" in capsys.readouterr().err

"""How `bench.endpoints.agreement` compares load generators. Starts no server."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.endpoints import agreement
from bench.lib import clock
from bench.lib.wrk import Turn


def test_medians_are_compared() -> None:
    found = {
        "bench": [Turn(100, 1000, 1000), Turn(104, 1000, 1000), Turn(500, 1, 1)],
        "wrk": [Turn(100, 900, 900), Turn(100, 900, 900), Turn(1, 900, 900)],
    }
    rate, latency = agreement.compared("http, 1 in flight", found)
    assert rate.value == pytest.approx(1.04)
    assert latency.value == pytest.approx(1000 / 900)
    assert (rate.verdict, latency.verdict) == ("ok", "missed")


def test_the_order_is_reversed_each_round() -> None:
    order: list[str] = []

    def take(name: str) -> Turn:
        order.append(name)
        return Turn(1, 1, 1)

    found = clock.in_turn(3, {name: lambda name=name: take(name) for name in "abc"})  # type: ignore[misc]
    assert "".join(order) == "abccbaabc"
    assert {name: len(turns) for name, turns in found.items()} == dict.fromkeys("abc", 3)


def test_the_report_of_wrk_is_parsed(tmp_path: Path) -> None:
    def taken(printed: str) -> Turn:
        path = tmp_path / "wrk"
        path.write_text(f"#!/bin/sh\necho '{printed}'\n")
        path.chmod(0o755)
        return agreement.by_wrk(str(path), "127.0.0.1:1", 2, 1.0, tmp_path)

    result = 'RESULT {"count": 500, "us": 2000000, "p50": 1500, "p99": 1600, "failed": %d}'
    assert taken(result % 0) == Turn(250.0, 1500, 1600)
    assert '"shape": [1, 16]' in (tmp_path / "wrk.body1").read_text()
    with pytest.raises(RuntimeError, match="wrk: 3 of 500 requests failed"):
        taken(result % 3)
    with pytest.raises(RuntimeError, match="wrk printed no result: nothing"):
        taken("nothing")

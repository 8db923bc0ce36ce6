"""The autoscaling queries on series with known results."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.deploy import manifests
from tests.fleet import programs


def histogram(model: str, fast: int, all_: int, pod: str = "a", job: str = "shmserve") -> list[dict[str, str]]:
    """Requests per 15 s: `fast` are in the queue for at most 131 ms; all are for at most 262 ms."""
    name = f'shmserve_queue_duration_seconds_bucket{{job="{job}",pod="{pod}",model="{model}",version="1",le="%s"}}'
    counts = {"0.131072": fast, "0.262144": all_, "+Inf": all_}
    return [{"series": name % le, "values": f"0+{count}x40"} for le, count in counts.items()]


def instances(model: str, ready: int, seconds: float, pod: str = "a") -> list[dict[str, str]]:
    """Ready instances, and how long they run batches in 15 s."""
    labels = f'job="shmserve",pod="{pod}",model="{model}",version="1"'
    return [
        {"series": f"shmserve_batch_duration_seconds_sum{{{labels}}}", "values": f"0+{seconds}x40"},
        {"series": f'shmserve_model_instances{{{labels},state="ready"}}', "values": f"{ready}x40"},
        {"series": f'shmserve_model_instances{{{labels},state="lost"}}', "values": "5x40"},
    ]


CASES: dict[str, tuple[str, list[dict[str, str]], float]] = {
    "the longest queue of any model": (
        "queue-p99",
        # Of 100 requests, 98 are in the lower bucket: the 99th is in the middle of the upper one.
        [*histogram("slow", 98, 100), *histogram("fast", 1000, 1000)],
        (0.131072 + 0.262144) / 2,
    ),
    "the servers are one fleet": (
        "queue-p99",
        # 98 of 100 again, which is not the mean of the pods' percentiles.
        [*histogram("m", 49, 50, "a"), *histogram("m", 49, 50, "b")],
        (0.131072 + 0.262144) / 2,
    ),
    "no requests": ("queue-p99", histogram("idle", 0, 0), 0.0),
    "a server without models": ("queue-p99", [], 0.0),
    "another fleet": ("queue-p99", histogram("slow", 1, 100, job="other"), 0.0),
    "the busiest model": (
        "busy",
        # 13.5 and 4.5 of 15 s in two instances; 1.5 s in two.
        [*instances("hot", 1, 13.5, "a"), *instances("hot", 1, 4.5, "b"), *instances("cold", 2, 1.5)],
        0.6,
    ),
    "a model that is asleep": ("busy", [*instances("asleep", 0, 0), *instances("m", 1, 3)], 0.2),
    "no instances": ("busy", [], 0.0),
}


@pytest.mark.parametrize("case", CASES)
def test_scaling_queries_give_the_expected_values(case: str, tmp_path: Path) -> None:
    promtool = programs.need("promtool")
    trigger, series, expected = CASES[case]
    checked: dict[str, Any] = {
        "expr": manifests.triggers()[trigger][0],
        "eval_time": "10m",
        "exp_samples": [{"labels": "{}", "value": expected}],
    }
    tests = [{"interval": "15s", "input_series": series, "promql_expr_test": [checked]}]
    file = tmp_path / "test.json"
    # Rounded like the expected values, which have no exact representation.
    checked["expr"] = f"round({checked['expr']}, 0.000001)"
    checked["exp_samples"][0]["value"] = round(expected, 6)
    file.write_text(json.dumps({"evaluation_interval": "15s", "tests": tests}))
    done = subprocess.run([str(promtool), "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

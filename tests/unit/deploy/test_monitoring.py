"""Rules, alerts and dashboards name metrics and labels that exist, each alert says what to do, and the dashboards equal
the output of make_dashboards.py. tests/fleet runs them.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from typing import Any

import pytest

from shmserve.clients.cli import parser
from tests import ROOT
from tests.support.observability.promql import metrics_in
from tests.unit.deploy.monitoring import (
    ALWAYS,
    GRAFANA,
    OWN,
    alerts,
    assert_known,
    cases,
    dashboards,
    expressions,
    recorded,
    server_metrics,
    written_dashboards,
)

METRICS = server_metrics()
RECORDED = recorded()
ALERTS = alerts()
PAGE = (ROOT / "docs" / "alerts.md").read_text()
DASHBOARDS = dashboards()
EXPRESSIONS = RECORDED | {name: alert["expr"] for name, alert in ALERTS.items()}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_metrics_and_labels_exist_and_counters_are_only_used_as_rates(name: str) -> None:
    """Their values restart from 0 with the server. One alert also checks whether a series has just begun."""
    assert_known(EXPRESSIONS[name])
    plain = {""} if name == "ShmserveWakesFail" else set()
    for metric in metrics_in(EXPRESSIONS[name]) & METRICS.keys():
        if METRICS[metric].kind in ("counter", "histogram"):
            uses = set(re.findall(rf"(\w*)\(?\b{metric}\b", EXPRESSIONS[name]))
            assert uses <= {"rate", "increase"} | plain, metric


@pytest.mark.parametrize("name", RECORDED)
def test_recording_rules_say_their_labels_and_have_a_case(name: str) -> None:
    """level:metric:operation, as Prometheus recommends; the level is the remaining labels."""
    level, metric, _ = name.split(":")
    assert re.fullmatch("job(_model(_version|_state)?)?|instance(_model(_state|_le)?)?", level)
    assert metric in METRICS.keys() | OWN | {"shmserve_batch_duration_seconds", "shmserve_batch_rows"} | {
        family.removesuffix("_bucket") for family in METRICS
    }
    assert any(name in metrics_in(one["expr"]) for case in cases() for one in case.get("promql_expr_test", ()))


@pytest.mark.parametrize("name", ALERTS)
def test_alerts_say_what_to_do(name: str) -> None:
    alert = ALERTS[name]
    assert name.startswith("Shmserve")
    assert alert["labels"]["severity"] in ("warning", "critical")
    notes = alert["annotations"]
    assert set(notes) == {"summary", "action", "runbook"}
    assert notes["runbook"] == f"docs/alerts.md#{name.lower()}"
    section = re.search(rf"^### {name}\n\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert section, "docs/alerts.md lacks it"
    assert len(section[1]) > 100
    for command in re.findall(r'"(shmserve [^"]*)"', notes["action"]):
        words = shlex.split(re.sub(r"\{\{.*?\}\}", "mlp", command))
        assert parser.parser().parse_args(words[1:]).command == words[1]
    # The labels are those in the cases of tests/fleet/rules, which promtool checks. In one case, the alert fires.
    fired = [
        set(re.findall(r'(\w+)="', sample["labels"]))
        for case in cases()
        for expectation in case.get("promql_expr_test", ())
        for sample in expectation["exp_samples"]
        if f'alertname="{name}"' in sample.get("labels", "") and 'alertstate="firing"' in sample["labels"]
    ]
    assert fired, "no case of tests/fleet/rules"
    assert set(re.findall(r"\$labels\.(\w+)", " ".join(notes.values()))) <= set.intersection(*fired)


def test_the_page_has_no_other_alerts() -> None:
    assert re.findall(r"^### (Shmserve\w+)$", PAGE, re.MULTILINE) == list(ALERTS), "in the order of alerts.yml"
    assert set(re.findall(r"`(\w+:\w+:\w+)`", PAGE)) == set(RECORDED)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_dashboards_show_metrics_and_labels_that_exist(name: str) -> None:
    for expression in expressions(DASHBOARDS[name]):
        used = metrics_in(expression)
        by_model = ("model",) if any("model" in RECORDED[metric] for metric in used & RECORDED.keys()) else ()
        assert_known(expression, "alertname", "alertstate", *by_model)
        for metric in used & METRICS.keys():
            if METRICS[metric].kind in ("counter", "histogram"):
                assert re.search(rf"(rate|increase)\({metric}\b", expression), f"{metric} only rises: {expression}"


def test_dashboards_are_current_and_show_most_metrics() -> None:
    written = {path.name: path.read_text() for path in (GRAFANA / "dashboards").iterdir()}
    assert written == written_dashboards(), "write them with: make dashboards"
    assert len({dashboard["uid"] for dashboard in DASHBOARDS.values()}) == len(DASHBOARDS) == 2
    assert all(dashboard["tags"] == ["shmserve"] for dashboard in DASHBOARDS.values())
    shown = {
        metric for dashboard in DASHBOARDS.values() for text in expressions(dashboard) for metric in metrics_in(text)
    }
    assert len(shown & METRICS.keys()) >= 45
    levels = ("instance_model", "instance_model_le", "instance_model_state")  # steps to others, by model and server
    missing = {name for name in RECORDED if name not in shown and name.split(":")[0] not in levels}
    assert missing == {
        "job_model:nv_inference_request_failure:rate5m",
        "job_model:nv_inference_request_failure:ratio_rate1h",
    }


@pytest.mark.parametrize("name", DASHBOARDS)
def test_variables_are_defined_and_used(name: str) -> None:
    dashboard = DASHBOARDS[name]
    variables = {variable["name"] for variable in dashboard["templating"]["list"]} - {"datasource"}
    texts = " ".join(expressions(dashboard))
    assert set(re.findall(r"\$(\w+)", texts)) - {"__rate_interval"} == variables
    for variable in dashboard["templating"]["list"]:
        asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable.get("definition", ""))
        if variable["name"] != "datasource":
            assert asked
            (metric,) = metrics_in(asked[1])
            assert metric in METRICS
            assert asked[2] in METRICS[metric].labels | ALWAYS


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels(name: str) -> None:
    panels: list[dict[str, Any]] = DASHBOARDS[name]["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    filled: Counter[tuple[int, int]] = Counter()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        filled.update(
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        )
        if panel["type"] != "row":
            assert panel["title"]
            assert panel["description"]
    assert set(filled.values()) == {1}, "panels overlap"

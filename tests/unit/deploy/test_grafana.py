"""The dashboards equal the output of make_dashboards.py, and show existing metrics. tests/fleet runs their queries."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from tests.support.observability.promql import metrics_in
from tests.unit.deploy.monitoring import (
    ALWAYS,
    GRAFANA,
    assert_known,
    dashboards,
    expressions,
    recorded,
    server_metrics,
    written_dashboards,
)

METRICS = server_metrics()
RECORDED = recorded()
DASHBOARDS = dashboards()


@pytest.mark.parametrize("name", DASHBOARDS)
def test_metrics_and_labels_exist(name: str) -> None:
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

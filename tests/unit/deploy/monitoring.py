"""The files of deploy/prometheus and deploy/grafana, and the metrics of servers."""

from __future__ import annotations

import json
import re
import runpy
from functools import cache
from typing import Any, NamedTuple

import yaml

from shmserve.broker.observability.metric_definitions import FAMILIES, VERSION
from shmserve.llm.figures import METRICS
from tests import ROOT
from tests.support.observability.promql import labels_in, metrics_in

PROMETHEUS = ROOT / "deploy" / "prometheus"
GRAFANA = ROOT / "deploy" / "grafana"
CASES = ROOT / "tests" / "fleet" / "rules"
ALWAYS = {"job", "instance", "le"}
"""Labels of Prometheus itself, and of buckets."""
OWN = {"up", "ALERTS"}
"""Metrics of Prometheus itself."""


class Metric(NamedTuple):
    kind: str
    labels: frozenset[str]


@cache
def server_metrics() -> dict[str, Metric]:
    """Name of a series -> its kind and labels, also for gateways, as docs/metrics.md lists them."""
    found: dict[str, Metric] = {}
    for family in FAMILIES:
        metric = Metric(family.kind, frozenset(family.labels))
        ends = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
        found |= {family.name + end: metric for end in ends}
    for one in METRICS:
        more = ("model_instance",) if one.by_instance else (one.label,)
        ends = ("_bucket", "_sum", "_count") if one.edges else ("",)
        found |= {one.name + end: Metric(one.kind, frozenset((*VERSION, *more))) for end in ends}
    page = (ROOT / "docs" / "metrics.md").read_text()
    for name, kind, labels in re.findall(r"^- `(shmserve_gateway_\w+)` \((\w+)([^)]*)\)", page, re.MULTILINE):
        found[name] = Metric(kind, frozenset(re.findall(r"`(\w+)`", labels)))
    return found


def rules(name: str) -> list[dict[str, Any]]:
    document = yaml.safe_load((PROMETHEUS / name).read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


@cache
def recorded() -> dict[str, str]:
    return {rule["record"]: rule["expr"] for rule in rules("rules.yml")}


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules("alerts.yml")}


def assert_known(expression: str, *labels: str) -> None:
    """The metrics and labels of an expression exist. `labels`: also allowed."""
    metrics, rules_ = server_metrics(), recorded()
    used = metrics_in(expression)
    assert used, expression
    assert used <= metrics.keys() | rules_.keys() | OWN, expression
    allowed = ALWAYS | set(labels)
    for metric in used:
        allowed |= metrics[metric].labels if metric in metrics else labels_in(rules_.get(metric, ""))
    assert labels_in(expression) <= allowed, expression


def cases() -> list[dict[str, Any]]:
    """The unit tests of rules, which promtool runs."""
    return [test for file in sorted(CASES.glob("*.yml")) for test in yaml.safe_load(file.read_text())["tests"]]


def dashboards() -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text()) for path in sorted((GRAFANA / "dashboards").glob("*.json"))}


def written_dashboards() -> dict[str, str]:
    """The output of make_dashboards.py."""
    made = runpy.run_path(str(GRAFANA / "make_dashboards.py"))
    return {name: made["text"](dashboard) for name, dashboard in made["DASHBOARDS"].items()}


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]

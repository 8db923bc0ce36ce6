"""Rules and alerts name metrics and labels that exist, and each alert says what to do. tests/fleet runs them."""

from __future__ import annotations

import re
import shlex

import pytest

from shmserve.clients.cli import parser
from tests import ROOT
from tests.support.observability.promql import metrics_in
from tests.unit.deploy.monitoring import OWN, alerts, assert_known, cases, recorded, server_metrics

METRICS = server_metrics()
RECORDED = recorded()
ALERTS = alerts()
PAGE = (ROOT / "docs" / "alerts.md").read_text()
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

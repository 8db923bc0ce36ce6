"""A real Prometheus scrapes two real servers: rules record series, dashboards show data, and an alert fires."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import pytest

from shmserve.testing import Server
from tests.deploy import manifests
from tests.fleet import load, programs, watching
from tests.fleet.watching import Prometheus
from tests.unit.deploy.monitoring import alerts, dashboards, expressions, recorded, server_metrics

pytestmark = pytest.mark.process
SUCCESS = 'nv_inference_request_success{model="twice"}'
WITHOUT_DATA = (
    "nv_gpu_ shmserve_gpu_ shmserve_requests_refused_total shmserve_model_instances_m shmserve_model_wakes_total "
    'shmserve_shadow_requests_total shmserve_gateway_grpc_answers_total state=~"lost|quarantined" llm_'
)
"""The servers of this test have no samples of these, or none that are shown."""


class Watched(NamedTuple):
    servers: list[Server]
    prometheus: Prometheus

    def address(self, server: int) -> str:
        return self.servers[server].endpoints["metrics"]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Prometheus after requests to both servers in more than one scrape, so that rates exist."""
    programs.need("prometheus")
    root = tmp_path_factory.mktemp("watched")
    with ExitStack() as stack:
        servers = []
        for number in range(2):
            load.write_models(root / f"models{number}", number)
            servers.append(stack.enter_context(Server(root / f"models{number}", gateway=True)))
        targets = [server.endpoints["metrics"] for server in servers]
        prometheus = stack.enter_context(watching.running(root, targets))
        for total in (100, 200):
            for server in servers:
                send(server, 50)
            prometheus.until(lambda total=total: prometheus.query(f"sum({SUCCESS}) >= {total}"))  # type: ignore[misc]
        for name in recorded():
            prometheus.until(lambda name=name: prometheus.query(name))  # type: ignore[misc]
        prometheus.until(lambda: len(prometheus.query("instance:nv_inference_request_success:rate5m > 0")) == 2)
        yield Watched(servers, prometheus)


def send(server: Server, count: int) -> None:
    with contextlib.closing(http.client.HTTPConnection(server.endpoints["http"], timeout=60)) as connection:
        connection.request("GET", "/v2/health/ready")
        assert connection.getresponse().status == 200
    with server.client() as client:
        for value in range(count):
            client.infer("twice", {"x": np.full((1, 1), value, np.float32)})


def rules_of(prometheus: Prometheus) -> list[dict[str, Any]]:
    return [rule for group in prometheus.ask("/api/v1/rules")["groups"] for rule in group["rules"]]


def test_rules_are_evaluated_without_errors(watched: Watched) -> None:
    """Every rule has been evaluated without error; the fixture has seen a result of each recording rule."""
    prometheus = watched.prometheus
    assert {rule["name"] for rule in rules_of(prometheus)} == set(recorded()) | set(alerts())
    prometheus.until(lambda: {rule["health"] for rule in rules_of(prometheus)} == {"ok"})
    assert [value for _, value in prometheus.query("job:up:count")] == [2]
    assert [value for _, value in prometheus.query("job:shmserve_ready:sum")] == [2]


def test_scraped_metrics_are_known_to_the_rule_check(watched: Watched) -> None:
    for server in range(2):
        match = {"match[]": f'{{instance="{watched.address(server)}"}}'}
        names = {series["__name__"] for series in watched.prometheus.ask("/api/v1/series", **match)}
        scraped = {name for name in names if ":" not in name and not name.startswith(("up", "scrape_", "ALERTS"))}
        assert len(scraped) > 60
        assert scraped <= server_metrics().keys()


@pytest.mark.parametrize("name", dashboards())
def test_every_panel_query_returns_data(watched: Watched, name: str) -> None:
    empty = []
    for expression in expressions(dashboards()[name]):
        query = expression.replace("$__rate_interval", "1m")
        for variable in ("job", "instance", "model"):
            query = query.replace(f"${variable}", ".*")
        if not watched.prometheus.query(query) and not any(word in query for word in WITHOUT_DATA.split()):
            empty.append(query)
    assert not empty


def test_autoscaling_queries_return_one_value_below_the_threshold(watched: Watched) -> None:
    for query, threshold in manifests.triggers().values():
        (value,) = [value for _, value in watched.prometheus.query(query)]
        assert 0 <= value < threshold, query


def test_an_alert_fires_for_a_killed_server(watched: Watched) -> None:
    prometheus = watched.prometheus
    gone = watched.address(1)
    watched.servers[1].kill()
    prometheus.until(lambda: prometheus.query("job:shmserve_ready:sum == 1"))
    (down,) = prometheus.until(
        lambda: [
            alert
            for alert in prometheus.ask("/api/v1/alerts")["alerts"]
            if alert["labels"]["alertname"] == "ShmserveServerDown" and alert["state"] == "firing"
        ]
    )
    assert down["labels"]["instance"] == gone
    assert down["annotations"]["summary"] == f"{gone} cannot be scraped"
    assert "systemctl status shmserve" in down["annotations"]["action"]

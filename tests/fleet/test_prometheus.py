"""A real Prometheus, with the files of deploy/prometheus, in which only addresses and intervals are replaced, scrapes
two real servers: rules record series, dashboards show data, and an alert fires."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import numpy as np
import pytest

from shmserve.testing import Server
from tests import ROOT
from tests.deploy import manifests
from tests.fleet import load, programs
from tests.fleet.balancers import SERVERS
from tests.support.system.ports import free_ports
from tests.unit.deploy.monitoring import alerts, dashboards, expressions, recorded, server_metrics

pytestmark = pytest.mark.process
SUCCESS = 'nv_inference_request_success{model="twice"}'
WITHOUT_DATA = (
    "nv_gpu_ shmserve_gpu_ shmserve_requests_refused_total shmserve_model_instances_m shmserve_model_wakes_total "
    'shmserve_shadow_requests_total shmserve_gateway_grpc_answers_total state=~"lost|quarantined" llm_'
)
"""The servers of this test have no samples of these, or none that are shown."""

DEPLOY = ROOT / "deploy" / "prometheus"
METRICS = 8002
"""The port in the configuration."""


class Prometheus:
    def __init__(self, port: int, program: programs.Program) -> None:
        self.port = port
        self.until = program.until

    def ask(self, path: str, **arguments: str) -> Any:
        """The data of a response. A refused query raises AssertionError with the reason."""
        document = json.loads(programs.get(self.port, f"{path}?{urlencode(arguments)}")[1])
        assert document["status"] == "success", (arguments, document)
        return document["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and current value of each sample."""
        found = self.ask("/api/v1/query", query=expression)["result"]
        return [(sample["metric"], float(sample["value"][1])) for sample in found]


def configure(place: Path, targets: list[str]) -> Path:
    """Writes the files with these targets, scraped and evaluated every second. An alert with `for: 1m` fires after a
    second."""
    listed = ", ".join(f'"{server}:{METRICS}"' for server in SERVERS)
    changes = {
        "rules.yml": {},
        "alerts.yml": {"for: 1m": "for: 1s"},
        "prometheus.yml": {listed: ", ".join(f'"{target}"' for target in targets), "_interval: 15s": "_interval: 1s"},
    }
    for name, replaced in changes.items():
        (place / name).write_text(programs.changed(DEPLOY / name, replaced))
    return place / "prometheus.yml"


@contextlib.contextmanager
def monitoring(place: Path, targets: list[str]) -> Iterator[Prometheus]:
    file = configure(place, targets)
    (port,) = free_ports(1)
    web = programs.PLACE / "prometheus" / "usr" / "share" / "prometheus" / "web"
    options = [
        f"--config.file={file}", f"--storage.tsdb.path={place / 'data'}", "--log.level=warn",
        f"--web.listen-address=127.0.0.1:{port}", f"--web.console.templates={web}", f"--web.console.libraries={web}",
    ]  # fmt: skip
    with programs.running("prometheus", place, *options) as program:
        program.until(lambda: programs.get(port, "/-/ready")[0] == 200)
        yield Prometheus(port, program)


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
        prometheus = stack.enter_context(monitoring(root, targets))
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

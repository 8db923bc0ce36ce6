"""Runs Prometheus with the files of deploy/prometheus, in which only addresses and intervals are replaced."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from tests import ROOT
from tests.fleet import programs
from tests.fleet.balancers import PAUSE_S, SERVERS, await_end
from tests.support.patience import CLUSTER_PATIENCE_S
from tests.support.system.ports import free_ports

DEPLOY = ROOT / "deploy" / "prometheus"
METRICS = 8002
"""The port in the configuration."""


class Prometheus(NamedTuple):
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def ask(self, path: str, **arguments: str) -> Any:
        """The data of a response. A refused query raises AssertionError with the reason."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("GET", f"{path}?{urlencode(arguments)}")
            answer = connection.getresponse()
            document = json.loads(answer.read())
        assert document["status"] == "success", (arguments, document)
        return document["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and current value of each sample."""
        found = self.ask("/api/v1/query", query=expression)["result"]
        return [(sample["metric"], float(sample["value"][1])) for sample in found]

    def until(self, holds: Callable[[], Any]) -> Any:
        """Polls until `holds` returns something true, and returns it. Prometheus has no event for that."""
        end = time.monotonic() + CLUSTER_PATIENCE_S
        while not (found := holds()):
            await_end(self.process, PAUSE_S)
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
        return found


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
        text = (DEPLOY / name).read_text()
        for old, new in replaced.items():
            assert old in text, f"{name} has no '{old}'"
            text = text.replace(old, new)
        (place / name).write_text(text)
    return place / "prometheus.yml"


@contextlib.contextmanager
def running(place: Path, targets: list[str]) -> Iterator[Prometheus]:
    program = programs.need("prometheus")
    file = configure(place, targets)
    (port,) = free_ports(1)
    web = programs.PLACE / "prometheus" / "usr" / "share" / "prometheus" / "web"
    command = [
        str(program), f"--config.file={file}", f"--storage.tsdb.path={place / 'data'}", "--log.level=warn",
        f"--web.listen-address=127.0.0.1:{port}", f"--web.console.templates={web}", f"--web.console.libraries={web}",
    ]  # fmt: skip
    log = place / "prometheus.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=place)
    made = Prometheus(port, process, log)
    try:
        made.until(lambda: _ready(made))
        yield made
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(CLUSTER_PATIENCE_S)


def _ready(made: Prometheus) -> bool:
    with (
        contextlib.suppress(OSError, http.client.HTTPException),
        contextlib.closing(http.client.HTTPConnection("127.0.0.1", made.port, timeout=60)) as connection,
    ):
        connection.request("GET", "/-/ready")
        return connection.getresponse().status == 200
    return False

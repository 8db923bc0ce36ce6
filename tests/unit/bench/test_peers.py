"""`bench.peers`: the table, the requests, and servers that rest. Starts no server that it compares."""

from __future__ import annotations

import base64
import json
import select
import sys
from http.client import HTTPConnection
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from bench.lib import table
from bench.lib.charts import RANKED_BAR
from bench.lib.wrk import Post, Turn
from bench.peers import chart, report, workloads
from bench.peers.report import Cell
from bench.peers.running import running
from tests.support.system.ports import free_ports

ANSWERS = """
import http.server, subprocess, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Inference-Header-Content-Length", self.headers.get("Head-Size", "0"))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass

subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_the_best_of_a_row_is_bold_and_gaps_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    cells = [
        Cell.of("mlp", 1, "shmserve", [Turn(1000, 900, 2000), Turn(3000, 1100, 4000), Turn(2000, 1000, 3000)]),
        Cell.of("mlp", 1, "mosec", [Turn(1500, 500, 700)]),
        Cell.of("mlp", 8, "shmserve", []),
    ]
    assert report.markdown(cells).splitlines() == [
        "| load | shmserve | mosec |",
        "| --- | --- | --- |",
        "| mlp, 1 in flight | **2,000/s, 1 (3) ms** | 1,500/s, 0.5 (0.7) ms |",
        "| mlp, 8 in flight | failed | - |",
    ]
    path = report.save(cells[1:2], "the command", {"servers": "mosec 1"})
    assert "- servers: mosec 1" in path.read_text()
    (cell,) = json.loads(path.with_suffix(".json").read_text())["cells"]
    assert cell == {"model": "mlp", "flight": 1, "server": "mosec", "per_s": 1500, "p50_us": 500, "p99_us": 700}


def test_the_chart_sorts_servers_and_leaves_out_failed_ones() -> None:
    cells = [
        Cell(model, flight, server, rate, us, us)
        for model, flight in (("mlp", 1), ("mlp", 64))
        for server, rate, us in (("mosec", 500.0, 900.0), ("shmserve", 1000.0, 450.0), ("ray", None, None))
    ]
    svg = ElementTree.fromstring(chart.chart(cells, "a machine"))
    space = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in svg.iter(f"{space}text")]
    assert texts == [
        "mlp, 64 in flight: requests/s", "shmserve", "1,000", "mosec", "500",
        "mlp, one in flight: median ms", "shmserve", "0.45", "mosec", "0.90", "a machine",
    ]  # fmt: skip
    widths = [float(bar.attrib["width"]) for bar in svg.iter(f"{space}rect") if "x" in bar.attrib]
    assert widths == [RANKED_BAR, RANKED_BAR / 2, RANKED_BAR / 2, RANKED_BAR]


@pytest.mark.parametrize("workload", workloads.WORKLOADS, ids=lambda workload: workload.name)
def test_every_request_format_carries_the_same_values(workload: workloads.PeerWorkload) -> None:
    payloads = workload.payloads()
    kserve, raw = workloads.kserve_post("http://x", workload), workloads.raw_post("/p")("http://x", workload)
    lists = workloads.json_post("/p")("http://x", workload)
    assert lists.url == "http://x/p"
    size = int(kserve.headers["Inference-Header-Content-Length"])
    for payload, own, alone, text in zip(payloads, kserve.bodies, raw.bodies, lists.bodies, strict=True):
        (x,) = json.loads(own[:size])["inputs"]
        (value,) = json.loads(text)["x"]
        assert x["shape"] == ([1] if workload.batches else []) + list(workload.shape)
        if isinstance(payload, bytes):
            assert own[size:] == len(payload).to_bytes(4, "little") + payload
            assert alone == payload == (value.encode() if workload.name == "texts" else base64.b64decode(value))
        else:
            assert own[size:] == alone == payload.tobytes()
            assert (np.array(value, np.float32) == payload).all()


def test_a_server_pauses_and_ends_with_its_daemons(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    post = Post(f"http://127.0.0.1:{port}/", {"Content-Type": "text/plain"}, (b"hello",))
    with running("it", [sys.executable, "-c", ANSWERS, str(port)], {}, tmp_path) as server:
        assert server.await_answer(post) == b"hello"
        members = server.members()
        assert len(members) == 2
        server.pause()
        for pid in members:  # polled, because the kernel only notifies parents
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                select.select([], [], [], 0.01)
        server.resume()
        assert server.await_answer(Post(post.url, {"Head-Size": "2"}, (b"{}hello",))) == b"hello"
    assert not server.members()
    with pytest.raises(ConnectionRefusedError):
        HTTPConnection("127.0.0.1", port).connect()

"""A server with all endpoints and models to put load on, and short runs of `shmserve bench`."""

from __future__ import annotations

from pathlib import Path

from shmserve.testing import Server
from shmserve.tools.load import record
from shmserve.tools.load.measure import measure
from shmserve.tools.load.plan import SECOND, Endpoint, LoadPlan, MeasureSettings
from tests.support.ensemble_models import config_text
from tests.support.model_files import parameters

END_S = 60
SERVICE_NS = 20_000_000
QUICK = MeasureSettings(warmup_ns=SECOND // 50, window_ns=SECOND // 20, min_windows=2, max_windows=2, min_responses=3)
SHORT = ["--warmup", "20ms", "--window", "50ms", "--windows", "2:2", "--no-echo"]
KINDS = ("lane", "ipc", "tcp", "http", "grpc")
SLOW = config_text("identity", "x:FP32:[1]", "y:FP32:[1]", parameters(delay_us=str(SERVICE_NS // 1000)))
SEQUENCE = "sequence_batching { direct { } max_sequence_idle_microseconds: 60000000 }"


class BenchServer:
    def __init__(self, server: Server, keys: Path) -> None:
        self.server = server
        own, theirs = str(keys / "alice.key"), str(keys / "server.pub")
        address = server.endpoints
        self.endpoints = {
            "lane": Endpoint(url=server.url),
            "ipc": Endpoint(url=server.zmq_url),
            "tcp": Endpoint(url=f"tcp://{address['zmq']}", server_key=theirs, key_file=own),
            "http": Endpoint(url=f"http://{address['http']}"),
            "grpc": Endpoint(url=f"grpc://{address['grpc']}"),
        }

    @property
    def has_chat(self) -> bool:
        """Whether the engine of language models is installed."""
        with self.server.client() as client:
            return any(entry["name"] == "chat" for entry in client.models())

    def requests(self, name: str) -> int:
        """Successful requests to the model since its start."""
        with self.server.client() as client:
            (entry,) = client.statistics(name)["model_stats"]
        return int(entry["inference_stats"]["success"]["count"])


def one_point(plan: LoadPlan) -> record.Point:
    (point,) = measure(plan).points
    return point

"""The metrics of a core, read by Prometheus's own parser, and requests to be counted."""

from __future__ import annotations

import os
import re
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families as parsed

from shmserve.broker.observability.metric_definitions import FAMILIES
from shmserve.broker.observability.metrics import Metrics, MetricSettings
from shmserve.core.policy import BatchPolicy, ModelPolicy, TensorSpec
from shmserve.protocol.messages import Infer, Tensor
from shmserve.shm.arena import Arena
from shmserve.shm.extents import memfd
from tests.support.core.fakes.client import FakeClient
from tests.support.core.world import World

MS = 1_000_000
DEFAULTS = MetricSettings()
Labels = frozenset[tuple[str, str]]


class Seen:
    """The parser's result for a text. No sample occurs twice, and each belongs to a metric in the table."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples: dict[tuple[str, Labels], float] = {}
        known = {family.name: family for family in FAMILIES}
        for metric in parsed(text):
            for sample in metric.samples:
                name = sample.name if f"\n{sample.name}" in text else sample.name.removesuffix("_total")  # parser's own
                key = name, frozenset(sample.labels.items())
                assert key not in self.samples, key
                self.samples[key] = sample.value
                family = known[name if name in known else re.sub("_(bucket|sum|count)$", "", name)]
                assert (metric.type, set(sample.labels) - {"le", "quantile"}) == (family.kind, set(family.labels)), (
                    sample
                )
        headers = Counter(line.rsplit(" ", 1)[0] for line in text.splitlines() if line.startswith("# TYPE "))
        assert set(headers.values()) <= {1}
        assert "nan" not in text.lower()

    def __call__(self, name: str, /, **labels: str) -> float:
        return self.samples[name, frozenset(labels.items())]

    def all(self, name: str, /, **labels: str) -> dict[Labels, float]:
        wanted = set(labels.items())
        return {key[1]: value for key, value in self.samples.items() if key[0] == name and wanted <= key[1]}


def metrics_text(world: World, shown: MetricSettings = DEFAULTS, arena: Arena | None = None) -> str:
    arena = arena or Arena(0, memfd.create, limit_bytes=1 << 20)
    pid = os.getpid()
    made = Metrics(world.core.state, arena, 1 << 20, lambda peer: pid, lambda pid: 1 << 20, lambda: True, shown)
    text = made.text()
    arena.close()
    return text


def metrics(world: World, arena: Arena | None = None, shown: MetricSettings = DEFAULTS) -> Seen:
    return Seen(metrics_text(world, shown, arena))


def policy(name: str = "m", most: int = 8) -> ModelPolicy:
    return ModelPolicy(name, 1, most, (TensorSpec("x", "FP32", (1,)),), (TensorSpec("y", "FP32", (1,)),), BatchPolicy())


def infer(client: FakeClient, number: int, model: str = "m", rows: int = 1) -> tuple[int, Infer]:
    client.sends(number)
    return client.peer, Infer(number, model, 0, (Tensor("x", "FP32", (rows, 1), bytes(4 * rows)),))


def finish(world: World, took: int = 0) -> None:
    (busy,) = (worker for worker in world.workers.values() if worker.running is not None)
    busy.finish(world.now, took)
    world.settle()

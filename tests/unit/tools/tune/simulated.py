"""A Bench on the simulator, with service times that the tuner does not know, so that the optimum can be calculated."""

from __future__ import annotations

import math
from collections.abc import Callable

from shmserve.core.policy import ModelPolicy
from shmserve.repo.compile import compile_instances, compile_policy
from shmserve.repo.config.schema import ModelConfig, parameter
from shmserve.repo.load import ModelContext, examine
from shmserve.sim import Closed, Load, Measured, Plan, Poisson, SimModel, simulate
from shmserve.tools.tune.bench import Observation
from shmserve.tools.tune.space import TunedModel

MS = 1_000_000
MIB = 1 << 20
EACH_MIB = 100
"""Memory of an instance."""
GPU_MIB = 7
"""Memory of an instance on a GPU."""
SPREAD = (0.95, 1.0, 1.0, 1.05)
SIZES = (1, 2, 4, 8, 16, 32)
CONFIG = """# A model for these tests.
name: "net"
backend: "onnxruntime"
max_batch_size: 32  # the most
input [ { name: "x" data_type: TYPE_FP32 dims: [ 16 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 16 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
dynamic_batching { }
parameters { key: "intra_op_thread_count" value: { string_value: "1" } }
"""
GROUPS = CONFIG.replace("KIND_CPU }", 'KIND_CPU }, { count: 1 kind: KIND_CPU host_policy: "b" }')
STREAM = CONFIG + "model_transaction_policy { decoupled: true }\n"

Service = Callable[[int, int, int], float]
"""Instances, threads, rows -> ms."""


def tuned(text: str = CONFIG, cores: int = 2, name: str = "net") -> TunedModel:
    text = text.replace('name: "net"', f'name: "{name}"')
    context = ModelContext(name, frozenset({"onnxruntime"}), ["model.onnx"], ())
    return TunedModel(text, examine(text.encode(), "config.pbtxt", context).require(), cores)


def _instances(config: ModelConfig) -> int:
    return sum(group.count for group in config.instance_group)


class SimulatedBench:
    def __init__(
        self,
        service: Service,
        failing: Callable[[int], bool] = lambda count: False,
        requests: int = 2000,
        lasts_s: float = 0.0,
    ) -> None:
        """A measurement at a rate has at least this many `requests`, and lasts at least so long."""
        self._service = service
        self._requests = requests
        self._lasts_s = lasts_s
        self._failing = failing
        self._seed = 100
        self.applied: list[ModelConfig] = []
        self.opened: list[float] = []

    def apply(self, config: ModelConfig) -> None:
        self.applied.append(config)

    def memory(self) -> int:
        return EACH_MIB * MIB * _instances(self.applied[-1])

    def gpu_memory(self) -> int:
        return GPU_MIB * MIB * _instances(self.applied[-1])

    def closed(self, callers: int, seconds: float, length: int = 0) -> Observation:
        return self._run(Closed(callers), max(300, 4 * callers))

    def open(self, rate: float, seconds: float, give_up_ns: float) -> Observation:
        self.opened.append(rate)
        return self._run(Poisson(rate), max(self._requests, round(self._lasts_s * rate)))

    def model(self) -> SimModel:
        """The model as it is served now."""
        config = self.applied[-1]
        count, threads = _instances(config), int(parameter(config, "intra_op_thread_count") or 1)
        entries = tuple((rows, self._service(count, threads, rows) * MS) for rows in SIZES)
        policy: ModelPolicy = compile_policy(config, 1)
        return SimModel(policy, compile_instances(config), Measured(entries, 0.0, SPREAD))

    def _run(self, arrivals: Closed | Poisson, requests: int) -> Observation:
        config = self.applied[-1]
        if self._failing(config.instance_group[0].count):
            return Observation(0.0, 1.0, 0.0, 0.0, failed=3, error="out of memory")
        model = self.model()
        self._seed += 1
        plan = Plan((model,), (Load(config.name, arrivals),), requests=requests, seed=self._seed)
        result = simulate(plan).models[config.name]
        latency, batches = result.latency, sum(result.batches.values())
        known = tuple(latency.quantile(share / 200) for share in range(1, 200))
        refused, in_time = sum(result.failed.values()), 0.99 * result.sent / result.answered
        p99 = latency.quantile(in_time) if in_time <= 1 else math.inf
        return Observation(
            result.answered / result.elapsed_s, result.elapsed_s, latency.quantile(0.5), p99, known,
            batches, sum(rows * times for rows, times in result.batches.items()),
            refused=refused, refusal="Exceeds maximum queue size" if refused else "",
        )  # fmt: skip

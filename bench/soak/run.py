"""The mixed soak: eight client processes, every dtype, random sizes, batches, cancels and timeouts, over both links.

Two of the eight use the raw protocol and count the responses to each request; the others use the public clients. The
oracle is the input itself. The output is compared on arrival and again when the response is dropped, which reveals
memory that was reused too early.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from bench.lib import models, processes
from bench.lib.child import Child, ChildFailed, Team
from bench.lib.random_tensors import DTYPES
from bench.lib.setting import serving

SLOW = """\
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    # Takes its time, so that cancels and timeouts find requests in the queue, waiting at the worker, and running.
    def execute(self, requests):
        time.sleep(0.003)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(r, "x").as_numpy())])
            for r in requests
        ]
"""
BATCH = 8
KINDS = ("lane", "lane", "lane", "zmq", "zmq", "async", "raw lane", "raw zmq")


@dataclass
class Soak:
    """The result. All fields except `sent` and `counts` should be 0 or empty."""

    sent: int = 0
    lost: int = 0
    twice: int = 0
    wrong: int = 0
    leaked: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def text(self) -> str:
        counts = ", ".join(f"{key} {count:,}" for key, count in sorted(self.counts.items()))
        words = f"{self.sent:,} requests ({counts}); lost {self.lost}, twice {self.twice}, wrong {self.wrong}"
        return "; ".join([words, *self.examples[:3]])


def write_repository(root: Path) -> None:
    """Writes an identity for each dtype, every third without batching, and a slow Python model."""
    for number, dtype in enumerate(DTYPES):
        config = "STRING" if dtype == "BYTES" else dtype
        batch = 0 if number % 3 == 2 else BATCH
        models.write(root, f"identity_{dtype}", models.identity(config, max_batch=batch), {})
    slow = models.Model("python", {"x": ("FP32", [-1])}, {"y": ("FP32", [-1])}, max_batch=4, dynamic=True)
    models.write(root, "slow", slow, {"model.py": SLOW})


def batch_of(model: str) -> int:
    """max_batch_size of a model of this repository."""
    if model == "slow":
        return 4
    return 0 if DTYPES.index(model.removeprefix("identity_")) % 3 == 2 else BATCH


def run_soak(repository: Path, seconds: float, largest: int = 2 << 20) -> Soak:
    write_repository(repository)
    result = Soak()
    segments = processes.segments()
    with serving(repository) as server:
        broker = server.broker_pid()
        workers = processes.descendants(broker)
        before = processes.descriptors(broker)
        living = processes.Living([broker, *workers])
        urls = {"lane": server.lane, "zmq": server.zmq, "async": server.lane}
        children = []
        for number, kind in enumerate(KINDS):
            if kind.startswith("raw"):
                place = str(server.runtime_dir / ("lane.sock" if kind == "raw lane" else "broker.sock"))
                children.append(
                    Child("bench.soak.raw_clients:raw", link=kind.removeprefix("raw "), path=place, seed=number)
                )
            else:
                target = "bench.soak.clients:awaiting" if kind == "async" else "bench.soak.clients:waiting"
                children.append(Child(target, url=urls[kind], seed=number, largest=largest))
        with Team(children) as team:
            try:
                answers = team.ask(seconds=seconds)
            except ChildFailed as error:
                answers = [{"sent": 1, "lost": 1, "examples": [str(error)]}]
        if set(processes.descendants(broker)) != set(workers):
            result.wrong += 1
            result.examples.append("a worker process ended or was started during the soak")
        # Memory may have grown, because workers keep their buffers; connections may not.
        extra = Counter(processes.descriptors(broker)) - Counter(before)
        result.counts["broker descriptors more than before"] = sum(
            count for kind, count in extra.items() if not kind.startswith(("/memfd:", "/dev/shm/shmserve-"))
        )
    for kind, answer in zip(KINDS, answers, strict=False):
        result.sent += answer["sent"]
        result.lost += answer["lost"]
        result.twice += answer.get("twice", 0)
        result.wrong += answer.get("wrong", 0)
        result.counts.update(answer.get("counts", {}))
        result.examples += [f"{kind}: {text}" for text in answer.get("examples", [])]
    result.leaked = len(processes.segments() - segments) + living.still_there()
    return result

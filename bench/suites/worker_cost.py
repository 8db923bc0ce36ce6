"""The overhead of the worker over the bare engine: `python -m bench.suites.worker_cost [ROUNDS]`.

This process sends batches to a worker over its link, so that the next batch is always available, as with a busy broker.
The bare engine runs the same model in this process, on the same core, alternating with the worker. Stage times are
reported by the worker: from accepting a batch until its outputs are placed, and `between` from there until it accepts
the next batch (link, decode, encode). Invariant: only work that the real server would also do per batch is timed.
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.lib.bare_engine import session
from bench.lib.models import make_mlp
from shmserve.protocol import codec
from shmserve.protocol.messages import Tensor
from shmserve.protocol.worker_messages import Done, Execute, Load, Loaded, Rows, Stop, Work, WorkerReport
from shmserve.repo.config.schema import ModelConfig, ModelInput, ModelOutput, ModelParameter, encode_config

BATCHES = 300
WORKER = 7


class WorkerLink:
    """One worker on one core, and the link to it."""

    def __init__(self, config: ModelConfig, folder: Path, cpu: int) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shmserve.workers.main", "--link", str(theirs.fileno()), "--cpus", str(cpu)],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self.decode = codec.Codec(WorkerReport).decode
        self.number = 0
        descriptor = os.memfd_create("config")
        os.pwrite(descriptor, encode_config(config), 0)
        load = Load(WORKER, config.name, 1, "m_0_0", str(folder), {})
        socket.send_fds(self.sock, [codec.encode([load])], [descriptor])
        os.close(descriptor)
        data, descriptors, _, _ = socket.recv_fds(self.sock, 1 << 18, 4)
        for fd in descriptors:
            os.close(fd)
        assert isinstance(self.decode(data)[0], Loaded), data

    def packet(self, rows: int, data: bytes, shape: tuple[int, ...], dtype: str) -> bytes:
        self.number += 1
        tensor = (Tensor("x", dtype, shape, data),)
        works = tuple(Work(self.number * 1000 + row, 1, tensor, None, "uid:1000") for row in range(rows))
        return codec.encode([Execute(self.number, 0, works, open=True)])

    def run(self, rows: int, data: bytes, shape: tuple[int, ...], dtype: str = "FP32") -> dict[str, float]:
        """Median microseconds of each stage, and mean CPU time per batch (`cpu`). Two batches are always pending, so
        the worker never waits.
        """
        clock = (~self.process.pid << 3) | 2  # the CPU-time clock of the worker process
        packets = [self.packet(rows, data, shape, dtype) for _ in range(BATCHES)]
        dones: list[Done] = []
        for packet in packets[:2]:
            self.sock.send(packet)
        sent = 2
        spent = -time.clock_gettime_ns(clock)
        while len(dones) < BATCHES:
            for message in self.decode(self.sock.recv(1 << 18)):
                if isinstance(message, Done):
                    dones.append(message)
                    if sent < BATCHES:
                        self.sock.send(packets[sent])
                        sent += 1
                elif isinstance(message, Rows):
                    continue
        spent += time.clock_gettime_ns(clock)
        times = [done.times for done in dones[10:]]
        whole = [later[0] - sooner[0] for sooner, later in itertools.pairwise(times)]
        return {
            "gather": median(t[1] - t[0] for t in times) / 1e3,
            "engine": median(t[2] - t[1] for t in times) / 1e3,
            "scatter": median(t[3] - t[2] for t in times) / 1e3,
            "between": median(later[0] - sooner[3] for sooner, later in itertools.pairwise(times)) / 1e3,
            "whole": median(whole) / 1e3,
            "cpu": spent / BATCHES / 1e3,
        }

    def close(self) -> None:
        self.sock.send(codec.encode([Stop()]))
        while self.sock.recv(1 << 18):
            continue
        self.process.wait()
        self.sock.close()


def bare(model: Path, cpu: int, batch: int) -> Any:
    """Returns a function that runs the engine in this process, on the worker's core, while the worker is idle. The
    function returns the median wall time and the mean CPU time per batch, in microseconds.
    """
    run = session(str(model)).run
    feed = {"x": np.random.default_rng(1).standard_normal((batch, 256)).astype(np.float32)}

    def measure() -> tuple[float, float]:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {cpu})
        taken = []
        spent = -time.process_time_ns()
        for _ in range(BATCHES):
            start = time.perf_counter_ns()
            run(None, feed)
            taken.append(time.perf_counter_ns() - start)
        spent += time.process_time_ns()
        os.sched_setaffinity(0, before)
        return median(taken) / 1e3, spent / BATCHES / 1e3

    return measure


def mlp_config(backend: str, dims: int = 64) -> ModelConfig:
    return ModelConfig(
        name="mlp",
        backend=backend,
        max_batch_size=32,
        input=(ModelInput(name="x", data_type="TYPE_FP32", dims=(256,)),),
        output=(ModelOutput(name="y", data_type="TYPE_FP32", dims=(dims,)),),
        parameters={"intra_op_thread_count": ModelParameter(string_value="1")},
    )


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    cpu = max(os.sched_getaffinity(0))
    data = np.random.default_rng(2).standard_normal(256).astype(np.float32).tobytes()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "1", "model.onnx")
        make_mlp(model)
        onnx = WorkerLink(mlp_config("onnxruntime"), Path(folder), cpu)
        identity = WorkerLink(mlp_config("identity", 256), Path(folder), cpu)
        engines = {batch: bare(model, cpu, batch) for batch in (1, 32)}
        columns = ("bare", "cpu", "gather", "engine", "scatter", "between", "whole", "cpu", "over", "cpu")
        print(f"{'us a batch':24}" + "".join(f"{column:>8}" for column in columns))
        for _ in range(rounds):
            for batch, engine in engines.items():
                alone = engine()
                found = onnx.run(batch, data, (1, 256))
                _show(f"mlp, {batch} x 1 KB", alone, found)
            _show("identity, 32 x 1 KB", (0.0, 0.0), identity.run(32, data, (1, 256)))
        onnx.close()
        identity.close()


def _show(what: str, alone: tuple[float, float], found: dict[str, float]) -> None:
    numbers = [*alone, *found.values(), found["whole"] - alone[0], found["cpu"] - alone[1]]
    print(f"{what:24}" + "".join(f"{number:8.1f}" for number in numbers))


if __name__ == "__main__":
    main()

"""`python -m bench.endpoints.grpc_servers`: the cost of a gRPC call in the gateway, on grpc.aio and on h2.

The gateway does its full work for each call: it decodes the request, sends it to the broker, and encodes the response
of the identity model. The others respond with constant bytes. The three take turns, so that the ratios hold on a
machine whose speed varies. docs/adr/http2.md contains the result.
"""

from __future__ import annotations

import argparse
import base64
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.endpoints import servers as compared
from bench.lib import models
from bench.lib.processes import own_seconds
from shmserve.protobuf_pools import pool_of
from shmserve.protocol.grpc import __file__ as grpc_file

ROOT = Path(__file__).parents[2]
PEERS = Path(__file__).with_name("grpc_peers.py")
ENVIRONMENT = ROOT / "build" / "grpc-servers-env"
PACKAGES = ("grpcio", "h2", "uvloop")
LOADS = (1, 64)
"""Calls in flight."""


def messages() -> tuple[bytes, bytes]:
    """A request to the identity model, and its response."""
    from google.protobuf import message_factory

    pool = pool_of(Path(grpc_file).with_name("grpc.binpb"))
    row = np.arange(compared.ROW, dtype=np.float32).tobytes()

    def made(kind: str, tensors: str, raw: str, name: str) -> bytes:
        message: Any = message_factory.GetMessageClass(pool.FindMessageTypeByName(f"inference.{kind}"))()
        message.model_name = "identity"
        tensor = getattr(message, tensors).add(name=name, datatype="FP32")
        tensor.shape.extend([1, compared.ROW])
        getattr(message, raw).append(row)
        return bytes(message.SerializeToString())

    request = made("ModelInferRequest", "inputs", "raw_input_contents", "x")
    return request, made("ModelInferResponse", "outputs", "raw_output_contents", "y")


def environment() -> Path:
    """The Python with the peers' packages, which are installed on the first call."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PACKAGES], check=True)
    return python


@contextmanager
def peer(python: Path, what: str, answer: bytes) -> Iterator[tuple[int, str]]:
    """A running peer: its pid and address."""
    command = [str(python), str(PEERS), what, base64.b64encode(answer).decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.pid, f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def measured(python: Path, pid: int, address: str, request: bytes, in_flight: int, seconds: float) -> tuple[int, float]:
    """The number of answered calls, and the server's processor time per call in microseconds."""
    before = own_seconds(pid)
    command = [
        str(python),
        str(PEERS),
        "load",
        base64.b64encode(request).decode(),
        address,
        str(in_flight),
        str(seconds),
    ]
    count = int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return count, (own_seconds(pid) - before) * 1e6 / count


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.endpoints.grpc_servers", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="the median of which counts (default %(default)s)")
    chosen = parser.parse_args(argv)
    python, (request, answer) = environment(), messages()
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        models.write(work, "identity", models.identity(dims=[compared.ROW], max_batch=compared.BATCH), {})
        ours = stack.enter_context(compared.ours(work))
        servers = {
            "gateway": (ours.pids["gateway"], ours.grpc),
            "grpc.aio": stack.enter_context(peer(python, "aio", answer)),
            "h2": stack.enter_context(peer(python, "h2", answer)),
        }
        print("| server | in flight | calls/s | us of processor a call |", "| --- | ---: | ---: | ---: |", sep="\n")
        for in_flight in LOADS:
            found: dict[str, list[tuple[int, float]]] = {name: [] for name in servers}
            for _ in range(chosen.rounds):
                for name, (pid, address) in servers.items():
                    found[name].append(measured(python, pid, address, request, in_flight, chosen.seconds))
            for name, taken in found.items():
                rate, cost = (statistics.median(values) for values in zip(*taken, strict=True))
                print(f"| {name} | {in_flight} | {rate / chosen.seconds:,.0f} | {cost:.0f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

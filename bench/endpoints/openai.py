"""`python -m bench.endpoints.openai`: the cost of the OpenAI-compatible endpoints, compared with generate_stream.

All endpoints are measured in turn, with one connection and one model, which sends its tokens as fast as it can.
Measured for each: the gateway's processor time per request and per additional token, and the time to the first event.
The model receives the same inputs from all endpoints: the request to generate_stream contains the inputs that the
gateway creates for the other endpoints.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

from bench.endpoints.servers import Serving, ours
from bench.lib import table
from bench.lib.clock import alternate
from bench.lib.table import Row, micros
from tests.support.model_files import write_model

MODEL = """\
import json

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def response(last):
    reason = b"length" if last else b"None"
    tensors = {"text_output": b" token", "finish_reason": reason}
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor(name, np.array([value], object)) for name, value in tensors.items()]
    )


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "sampling_parameters").as_numpy()[0]
            sender = request.get_response_sender()
            for left in reversed(range(json.loads(given)["max_tokens"])):
                sender.send(response(not left), flags=0 if left else FINAL)
"""
CONFIG = """\
backend: "python" max_batch_size: 0 model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
input [ { name: "messages" data_type: TYPE_STRING dims: [ 1 ] optional: true } ]
input [ { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true } ]
input [ { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true } ]
input [ { name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [ 1 ] optional: true } ]
input [ { name: "return_finish_reason" data_type: TYPE_BOOL dims: [ 1 ] optional: true } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "finish_reason" data_type: TYPE_STRING dims: [ -1 ] } ]
"""
PROMPT = "Why is the sky blue? " * 10
LONG = 200
"""Tokens of the long responses; the short ones have one."""
PLAIN = "generate_stream"
MOST = 1.0
"""Maximum cost of an endpoint, relative to generate_stream."""
_END = b"0\r\n\r\n"
TIMEOUT_S = 60


def _generate(tokens: int) -> tuple[str, Any]:
    flags = dict.fromkeys(("stream", "exclude_input_in_output", "return_finish_reason"), True)
    sampling = json.dumps({"max_tokens": tokens})
    return "/v2/models/tokens/generate_stream", {"text_input": PROMPT, "sampling_parameters": sampling, **flags}


def _complete(tokens: int) -> tuple[str, Any]:
    return "/v1/completions", {"model": "tokens", "prompt": PROMPT, "max_tokens": tokens, "stream": True}


def _chat(tokens: int) -> tuple[str, Any]:
    messages = [{"role": "user", "content": PROMPT}]
    return "/v1/chat/completions", {"model": "tokens", "messages": messages, "max_tokens": tokens, "stream": True}


WAYS: dict[str, Callable[[int], tuple[str, Any]]] = {
    PLAIN: _generate, "/v1/completions": _complete, "/v1/chat/completions": _chat
}  # fmt: skip


@dataclass
class EndpointCost:
    """Costs in microseconds, one value per turn."""

    request: list[float] = field(default_factory=list)
    token: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)


def repository(work: Path) -> Path:
    root = work / "models"
    write_model(root, "tokens", CONFIG, MODEL)
    return root


def _processor_ns(pid: int) -> int:
    """Processor time of the main thread, the only thread of the gateway that does work."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


class OpenAiMeasures:
    def __init__(self, server: Serving, rounds: int, requests: int) -> None:
        self._gateway = server.pids["gateway"]
        self._rounds = rounds
        self._requests = requests
        host, _, port = server.http.partition(":")
        self._socket = socket.create_connection((host, int(port)), TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def rows(self) -> Iterator[Row]:
        costs = {name: EndpointCost() for name in WAYS}
        for name in WAYS:
            self._turn(name, 1, self._requests)  # warm-up

        def party(name: str) -> Callable[[], float]:
            return lambda: self._measure(name, costs[name])

        alternate(self._rounds, *map(party, WAYS))
        for name, cost in costs.items():
            plain = costs[PLAIN]
            beside = ", ".join(
                f"{what} {micros(median(values))}"
                for what, values in (("a request", cost.request), ("a token", cost.token), ("first event", cost.first))
            )
            for what in ("request", "token"):
                share = median(
                    ours / theirs for ours, theirs in zip(getattr(cost, what), getattr(plain, what), strict=True)
                )
                limit = None if name == PLAIN else MOST
                yield Row(f"{name}, gateway's time of a {what}", share, f"of {PLAIN}", at_most=limit, beside=beside)

    def _measure(self, name: str, cost: EndpointCost) -> float:
        short, first = self._turn(name, 1, self._requests)
        long, _ = self._turn(name, LONG, max(1, self._requests // 10))
        cost.request.append(short)
        cost.token.append((long - short) / (LONG - 1))
        cost.first.append(first)
        return short

    def _turn(self, name: str, tokens: int, requests: int) -> tuple[float, float]:
        """The gateway's processor time per request and the median time to the first event, in microseconds."""
        path, document = WAYS[name](tokens)
        body = json.dumps(document).encode()
        data = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body)
        firsts, before = [], _processor_ns(self._gateway)
        for _ in range(requests):
            firsts.append(self._ask(data, tokens))
        return (_processor_ns(self._gateway) - before) / requests / 1e3, median(firsts) / 1e3

    def _ask(self, data: bytes, tokens: int) -> int:
        """Sends a request. Returns the nanoseconds to the first event."""
        began = perf_counter_ns()
        self._socket.sendall(data)
        answer = self._received()
        while b"data: " not in answer:
            answer += self._received()
        first = perf_counter_ns() - began
        while not answer.endswith(_END):
            answer += self._received()
        if not answer.startswith(b"HTTP/1.1 200") or answer.count(b" token") != tokens:
            raise RuntimeError(f"not {tokens} tokens: {answer[-300:]!r}")
        return first

    def _received(self) -> bytes:
        data = self._socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the gateway closed the connection")
        return data

    def close(self) -> None:
        self._socket.close()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.endpoints.openai", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each way (default 9)")
    parser.add_argument("--requests", type=int, default=300, help="requests of a turn (default 300)")
    chosen = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="bench-") as work, ours(repository(Path(work))) as server:
        measures = OpenAiMeasures(server, chosen.rounds, chosen.requests)
        try:
            result = list(measures.rows())
        finally:
            measures.close()
    print(table.plain(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Callers of a slow model cannot use up the gateway's capacity for callers of other models."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import hpack
import numpy as np
import pytest

from shmserve.gateway.auth import tokens
from shmserve.testing import Server
from tests.support.gateway import http2_frames as h2
from tests.support.gateway.rpc import Rpcs, infer_request
from tests.support.gateway.running_gateway import Gateway, model, open_gate, wait_in_flight
from tests.support.shared_server import SharedServer

pytestmark = pytest.mark.process

SEQUENCE = "sequence_batching { max_sequence_idle_microseconds: 60000000 direct { } }\n"
CONNECTIONS, CALLS = 9, 1000


@pytest.fixture(scope="module")
def server(shared_server: SharedServer, repository: Path, gate: Path) -> Iterator[Server]:
    delay = 'parameters { key: "delay_us" value: { string_value: "2000000" } }\n'
    model(repository, "slow", ["FP32"], "[ -1 ]", 1, delay)
    model(repository, "quick", ["FP32"], "[ -1 ]", 8)
    model(repository, "sequence", ["FP32"], "[ -1 ]", 8, SEQUENCE)
    with shared_server.serving(repository) as running:
        yield running


def request(name: str) -> Any:
    array = np.ones((1, 4), np.float32)
    return infer_request(name, {"i_FP32": ("FP32", array, array.tobytes())})


def attack(port: int) -> socket.socket:
    """Sends many calls to the slow model at once. Returns when the gateway has received all of them."""
    made = socket.create_connection(("127.0.0.1", port), 30)
    head = [(":method", "POST"), (":scheme", "http"), (":path", "/inference.GRPCInferenceService/ModelInfer"),
            (":authority", "here"), ("content-type", "application/grpc"), ("te", "trailers")]  # fmt: skip
    body = request("slow").SerializeToString()
    encoder = hpack.Encoder()
    parts = [h2.HELLO, h2.frame(h2.WINDOW, 0, 0, h2.number(1 << 30))]
    for stream in range(1, 2 * CALLS, 2):
        block = encoder.encode(head, huffman=False)
        parts += [h2.frame(h2.HEAD, h2.END_HEADERS, stream, block), h2.frame(h2.DATA, h2.END, stream, h2.message(body))]
    made.sendall(b"".join([*parts, h2.frame(h2.PING, 0, 0, b"allofit.")]))
    seen = b""
    while h2.frame(h2.PING, 1, 0, b"allofit.") not in seen:
        more = made.recv(1 << 16)
        assert more, "the gateway closed the connection"
        seen += more
    return made


def test_a_flood_of_calls_to_a_slow_model_does_not_block_other_clients(server: Server) -> None:
    gateway = Gateway(server)
    with contextlib.ExitStack() as stack:
        for _ in range(CONNECTIONS):
            stack.enter_context(contextlib.closing(attack(gateway.grpc)))
        for _ in range(3):
            status, text = gateway.ask("POST", "/v2/models/quick/infer", {
                "inputs": [{"name": "i_FP32", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}]
            })  # fmt: skip
            assert status == 200, text
            assert gateway.ask("GET", "/v2/models/quick/config")[0] == 200
        with Rpcs(gateway.grpc) as rpcs:
            assert rpcs.ModelInfer(request("quick")).outputs[0].name == "o_FP32"
        with contextlib.closing(gateway.connection(gateway.metrics)) as made:
            made.request("GET", "/metrics")
            page = made.getresponse().read().decode().splitlines()
        found = dict(line.rsplit(" ", 1) for line in page if line.startswith("shmserve_gateway"))
        assert 4096 <= int(found["shmserve_gateway_requests"]) <= 7300
        assert int(found['shmserve_gateway_share_refusals_total{share="connection"}']) > 0
    gateway.stop()


def with_tokens(server: Server, folder: Path, *options: str) -> tuple[Gateway, dict[str, str]]:
    """A gateway for two callers, and the credentials of each."""
    made = {name: tokens.new(name, "infer") for name in ("alice", "bob")}
    (folder / "tokens").write_text("".join(f"{line}\n" for _, line in made.values()))
    (folder / "tokens").chmod(0o600)
    gateway = Gateway(server, f"--tokens-file={folder / 'tokens'}", *options)
    return gateway, {name: f"Bearer {token}" for name, (token, _) in made.items()}


def test_sequence_ids_are_separate_for_each_token(server: Server, tmp_path: Path) -> None:
    gateway, header = with_tokens(server, tmp_path)

    def step(name: str, start: bool = False, end: bool = False) -> int:
        options = {"sequence_id": 7, "sequence_start": start, "sequence_end": end}
        tensor = {"name": "i_FP32", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}
        body = {"inputs": [tensor], "parameters": options}
        status, _ = gateway.ask("POST", "/v2/models/sequence/infer", body, Authorization=header[name])
        return status

    with Rpcs(gateway.grpc) as rpcs:
        asked = request("sequence")
        asked.parameters["sequence_id"].int64_param = 7
        bob = [("authorization", header["bob"])]
        assert step("alice", start=True) == 200
        assert step("bob") == 400, "it is not bob's"
        with pytest.raises(grpc.RpcError, match="must specify the START flag"):
            rpcs.ModelInfer(asked, metadata=bob)
        assert step("bob", start=True) == 200
        assert step("alice") == 200
        assert rpcs.ModelInfer(asked, metadata=bob).model_name == "sequence"
        assert step("bob", end=True) == 200
        assert step("alice", end=True) == 200
    gateway.stop()


def test_the_token_share_covers_http_and_grpc(server: Server, gate: Path, tmp_path: Path) -> None:
    gateway, header = with_tokens(server, tmp_path, "--token-share=0.0002")
    body = {"inputs": [{"name": "i_FP32", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}]}
    with Rpcs(gateway.grpc) as rpcs:
        alice = [("authorization", header["alice"])]
        first = rpcs.ModelInfer.future(request("gated"), metadata=alice)
        wait_in_flight(server, 1, 1)
        # When a share is full, a connection with nothing in flight may still send one call, but no second one.
        second = rpcs.ModelInfer.future(request("gated"), metadata=alice)
        assert "of this token are in flight, its share (--token-share)" in second.exception().details()
        for name in ("bob", "alice"):
            status, text = gateway.ask("POST", "/v2/models/quick/infer", body, Authorization=header[name])
            assert status == 200, text
        assert rpcs.ModelInfer(request("quick"), metadata=[("authorization", header["bob"])]).model_name == "quick"
        open_gate(gate)
        assert first.result().model_name == "gated"
    gateway.stop()

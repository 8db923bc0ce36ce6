"""Shares and sequences of the callers of a real gateway, by token."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from shmserve.gateway.auth import tokens
from shmserve.testing import Server
from tests.support.commands import COMMAND
from tests.support.gateway.rpc import Rpcs, infer_request
from tests.support.gateway.running_gateway import Gateway, model, open_gate, wait_in_flight
from tests.support.living import until

pytestmark = pytest.mark.process

SEQUENCE = "sequence_batching { max_sequence_idle_microseconds: 60000000 direct { } }\n"
TENSOR = {"name": "i_FP32", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}


def write_models(repository: Path) -> None:
    model(repository, "quick", ["FP32"], "[ -1 ]", 8)
    model(repository, "sequence", ["FP32"], "[ -1 ]", 8, SEQUENCE)


def request(name: str) -> Any:
    array = np.ones((1, 4), np.float32)
    return infer_request(name, {"i_FP32": ("FP32", array, array.tobytes())})


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
        body = {"inputs": [TENSOR], "parameters": options}
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


def test_the_share_of_a_caller_covers_http_and_grpc(server: Server, gate: Path, tmp_path: Path) -> None:
    gateway, header = with_tokens(server, tmp_path, "--limit=caller_share=0.0002")
    with Rpcs(gateway.grpc) as rpcs:
        alice = [("authorization", header["alice"])]
        first = rpcs.ModelInfer.future(request("gated"), metadata=alice)
        wait_in_flight(server, 1, 1)
        # When a share is full, a connection with nothing in flight may still send one call, but no second one.
        second = rpcs.ModelInfer.future(request("gated"), metadata=alice)
        assert "of this connection are in flight, its share (--limit caller_share)" in second.exception().details()
        for name in ("bob", "alice"):
            status, text = gateway.ask(
                "POST", "/v2/models/quick/infer", {"inputs": [TENSOR]}, Authorization=header[name]
            )
            assert status == 200, text
        open_gate(gate)
        assert first.result().model_name == "gated"
    gateway.stop()


def test_operators_see_what_the_callers_of_proxies_use(server: Server, gate: Path) -> None:
    gateway = Gateway(server, "--trusted-proxies=127.0.0.0/8")
    body = json.dumps({"inputs": [TENSOR]}).encode()
    head = f"POST /v2/models/gated/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    with contextlib.ExitStack() as stack:
        callers = [stack.enter_context(gateway.socket()) for _ in range(2)]
        callers[0].sendall(b"PROXY TCP4 192.0.2.1 192.0.2.80 40000 80\r\n" + head.encode() + b"\r\n" + body)
        wait_in_flight(server, 1, 1)
        callers[1].sendall(head.encode() + b"X-Forwarded-For: 192.0.2.2\r\n\r\n" + body)
        wait_in_flight(server, 2, 2)

        def shown(*options: str) -> str:
            command = [*COMMAND, "stats", "--callers", "--url", server.url]
            return subprocess.run([*command, *options], check=True, capture_output=True, text=True).stdout

        found = json.loads(shown("--json"))["caller_stats"]
        user = f"uid:{os.getuid()}"  # of the gateway, which is not one of the server's own
        in_flight = {entry["user"]: entry["in_flight"] for entry in found if entry["in_flight"]}
        assert in_flight == {f"{user} 192.0.2.1": 1, f"{user} 192.0.2.2": 1}
        for caller in callers:
            open_gate(gate)
            assert b"200 OK" in caller.recv(4096)
        answered = re.compile(rf"^ *\d+ +{user} 192\.0\.2\.1 +0 +0 +1 ", re.MULTILINE)
        with server.client() as client:
            until(client, lambda: answered.search(shown()), "the end of its request")
    gateway.stop()


@pytest.mark.parametrize("told_apart", ["by token", "by a proxy"])
def test_a_caller_waits_for_what_runs_and_not_for_the_queue_of_another_one(
    server: Server, gate: Path, tmp_path: Path, told_apart: str
) -> None:
    if told_apart == "by token":
        gateway, header = with_tokens(server, tmp_path)
        metadata = {name: [("authorization", value)] for name, value in header.items()}
    else:
        gateway = Gateway(server, "--trusted-proxies=127.0.0.0/8")
        metadata = {"alice": [("x-forwarded-for", "192.0.2.1")], "bob": [("x-forwarded-for", "192.0.2.2")]}
    answered: list[str] = []
    with Rpcs(gateway.grpc) as rpcs:
        waiting = [rpcs.ModelInfer.future(request("gated"), metadata=metadata["alice"]) for _ in range(20)]
        wait_in_flight(server, 20, 20)
        waiting.append(rpcs.ModelInfer.future(request("gated"), metadata=metadata["bob"]))
        wait_in_flight(server, 21, 21)
        for call in waiting:
            name = "bob" if call is waiting[-1] else "alice"
            call.add_done_callback(lambda _, name=name: answered.append(name))
        for count in range(len(waiting)):
            open_gate(gate)
            while len(answered) == count:  # callbacks run in a thread of grpcio
                continue
        for call in waiting:
            assert call.result().model_name == "gated"
    assert answered.index("bob") <= 5, answered
    gateway.stop()

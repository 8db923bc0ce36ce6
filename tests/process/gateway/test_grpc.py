"""The gRPC endpoint of a real gateway, with grpcio and stubs generated from the .proto as its client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from shmserve import Client
from shmserve.testing import Server
from tests.support.gateway.rpc import Rpcs, infer_request, outputs, talk
from tests.support.gateway.running_gateway import Gateway, model, open_gate, wait_in_flight
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.process

GATEWAY = ("--grpc-infer-response-compression-level=low",)


def write_models(repository: Path) -> None:
    model(repository, "row", ["FP32"], "[ -1 ]", 8, "dynamic_batching { }\n")


@pytest.fixture(scope="module")
def rpcs(gateway: Gateway) -> Iterator[Rpcs]:
    with Rpcs(gateway.grpc) as made:
        yield made


def succeeded(client: Client, model: str) -> int:
    """The number of requests to a model that have succeeded."""
    (found,) = client.statistics(model)["model_stats"]
    return int(found["inference_stats"]["success"]["count"])


def row(width: int, value: float = 0.0, name: str = "row", **more: Any) -> Any:
    array = np.full((1, width), value, np.float32)
    return infer_request(name, {"i_FP32": ("FP32", array, array.tobytes())}, **more)


def test_large_messages_with_and_without_compression(rpcs: Rpcs) -> None:
    large = row(5_000_000, 1.5)
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
        assert outputs(rpcs.ModelInfer(large, compression=compression))["o_FP32"] == large.raw_input_contents[0]


def test_no_call_is_lost_when_a_connection_reaches_its_maximum_age(server: Server) -> None:
    """A call that grpcio was about to send when the connection ended fails in the client. None that the gateway has
    received does."""
    gateway = Gateway(server, "--grpc-max-connection-age", "50")
    with Rpcs(gateway.grpc) as rpcs, server.client() as client:
        before, answered = succeeded(client, "row"), 0
        states: list[Any] = []
        rpcs.channel.subscribe(states.append)
        while states.count(grpc.ChannelConnectivity.READY) < 4:
            sent = [row(500, number) for number in range(20)]
            calls = [rpcs.ModelInfer.future(request) for request in sent]
            for request, call in zip(sent, calls, strict=True):
                if call.exception(PATIENCE_S) is None:
                    assert outputs(call.result())["o_FP32"] == request.raw_input_contents[0]
                    answered += 1
                else:
                    assert call.details().startswith("Stream removed"), call.details()
        assert answered == succeeded(client, "row") - before > 0
    assert "Traceback" not in gateway.stop().decode()


@pytest.mark.parametrize("way", ["cancel", "deadline", "stream", "channel"])
def test_a_disconnected_client_cancels_its_requests(gateway: Gateway, server: Server, gate: Path, way: str) -> None:
    with Rpcs(gateway.grpc) as rpcs:
        if way == "stream":
            with talk(rpcs) as stream:
                stream.say(*[row(4, name="gated") for _ in range(6)])
                wait_in_flight(server, 6, 6)
        else:
            calls = [rpcs.ModelInfer.future(row(30_000, name="gated"))]
            wait_in_flight(server, 1, 1)  # on a busy machine, none of those with a deadline might arrive
            limit = 0.5 if way == "deadline" else 60.0
            calls += [rpcs.ModelInfer.future(row(30_000, name="gated"), timeout=limit) for _ in range(5)]
            if way == "deadline":
                for call in calls[1:]:
                    assert call.exception(PATIENCE_S).code() is grpc.StatusCode.DEADLINE_EXCEEDED
            else:
                wait_in_flight(server, 6, 6)
            if way != "channel":
                for call in calls:
                    call.cancel()
    wait_in_flight(server, 1, 2)  # the worker has one running and one waiting request, and reads orders when it is done
    open_gate(gate)
    wait_in_flight(server, 0, 0)


def test_a_stream_of_many_requests(rpcs: Rpcs) -> None:
    """More requests than may be in flight, small and large, with one error, are answered in order."""
    with talk(rpcs) as stream:
        widths = [20_000 if number % 7 == 0 else 4 for number in range(600)]
        for number, width in enumerate(widths):
            stream.say(row(width, number, id=str(number)) if number != 300 else row(4, name="nothing", id="300"))
        answers = stream.rest()
    assert [answer.infer_response.id for answer in answers] == [str(number) for number in range(600)]
    for number, (answer, width) in enumerate(zip(answers, widths, strict=True)):
        if number == 300:
            assert "'nothing'" in answer.error_message
            continue
        assert answer.infer_response.parameters["triton_final_response"].bool_param
        assert outputs(answer.infer_response)["o_FP32"] == np.full(width, number, np.float32).tobytes()

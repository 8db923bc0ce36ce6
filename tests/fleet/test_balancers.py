"""Three servers behind each balancer of deploy/balancers. When a server stops, clients notice nothing, unless they have
a sequence on it."""

from __future__ import annotations

import json
import ssl
import subprocess
import urllib.request
from pathlib import Path

import grpc
import numpy as np
import pytest

from shmserve.testing import Server
from tests.fleet.balancers import HERE, Balancer
from tests.fleet.load import HEADER, SEQUENCE_ERRORS, WAYS, Load, Sequence
from tests.support.commands import COMMAND
from tests.support.gateway.rpc import INFERENCE, Rpcs, infer_request, message, outputs, refused, talk
from tests.support.load import Failed
from tests.support.patience import CLUSTER_PATIENCE_S

pytestmark = pytest.mark.process


def drain(server: Server, *options: str) -> subprocess.Popen[str]:
    command = [*COMMAND, "drain", "--runtime-dir", str(server.runtime_dir)]
    return subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_killed_server_fails_only_its_sequences(own_servers: tuple[list[Server], Balancer]) -> None:
    """Only requests of sequences on that server fail, with an error that says why."""
    fleet, balancer = own_servers
    with Load(balancer) as load, WAYS["http"](balancer) as send:
        load.until_each_serves(len(fleet))
        ours = Sequence(send)
        chosen = ours.step(1.0)
        fleet[chosen].kill()
        load.until_more(600)
        with pytest.raises(Failed) as failed:
            ours.step(2.0)
        load.broken.append(str(failed.value))
        fleet[chosen].restart()
        load.until_each_serves(len(fleet))
    assert not load.failed
    assert not {text for text in load.broken if not any(known in text for known in SEQUENCE_ERRORS)}


def test_draining_and_upgrading_a_server_loses_no_request(own_servers: tuple[list[Server], Balancer]) -> None:
    """No request fails. HAProxy lets the sequences on that server end there."""
    fleet, balancer = own_servers
    sticks = balancer.name == "haproxy"
    with Load(balancer, sequences=sticks) as load, WAYS["http"](balancer) as send:
        load.until_each_serves(len(fleet))
        ours = Sequence(send)
        chosen = ours.step(1.0) if sticks else 1
        with drain(fleet[chosen], "--quiet", "2", "--timeout", str(CLUSTER_PATIENCE_S)) as waiting:
            load.until_avoided(chosen)
            if sticks:
                assert waiting.poll() is None, "our sequence has not ended"
                assert ours.step(2.0) == chosen
                ours.step(3.0, end=True)
            said, _ = waiting.communicate(timeout=CLUSTER_PATIENCE_S)
        assert (waiting.returncode, said.startswith("the server is empty")) == (0, True), said
        fleet[chosen].restart()
        load.until_each_serves(len(fleet))
    assert not load.failed
    assert not load.broken


@pytest.mark.parametrize("way", WAYS)
def test_sequences_stay_on_their_servers(way: str, balancer: Balancer) -> None:
    with WAYS[way](balancer) as send:
        sequences = [Sequence(send) for _ in range(30)]
        for value in (1.0, 2.0, 3.0):
            for sequence in sequences:
                sequence.step(value, end=value == 3.0)
    assert {sequence.server for sequence in sequences} == set(range(len(HERE)))


def test_streams_and_large_requests(balancer: Balancer) -> None:
    """Several requests in one stream, and a tensor that exceeds the balancer's buffers."""
    rows = 200_000
    with Rpcs(balancer.ports.grpc) as rpcs:
        with talk(rpcs) as stream:
            for value in (1.0, 2.0, 3.0):
                x = np.array([[value]], np.float32)
                stream.say(infer_request("twice", {"x": ("FP32", x, x.tobytes())}))
                (answer,) = stream.hear(1)
                assert not answer.error_message
                assert np.frombuffer(outputs(answer.infer_response)["y"], np.float32)[0] == 2 * value
        x = np.zeros((9, rows), np.float32)
        request = infer_request("twice", {"x": ("FP32", x, x.tobytes())})
        code, text = refused(rpcs.ModelInfer, request)
    assert (code, "twice" in text) == ("INVALID_ARGUMENT", True), "it has reached a server, which says what is wrong"


def test_operations_on_a_single_server_are_refused(balancer: Balancer) -> None:
    for path in (
        "/v2/repository/models/twice/load",
        "/v2/repository/models/twice/unload",
        "/v2/systemsharedmemory/region/r/register",
        "/v2/trace/setting",
        "/v2/models/twice/trace/setting",
        "/v2/logging",
    ):
        status, body = balancer.status(path, "POST")
        assert (status, json.loads(body)) == (403, {"error": "send this to a server, not to the balancer"}), path
    for path in ("/v2/logging", "/v2/models/twice/config", "/v2"):
        assert balancer.status(path)[0] == 200, path
    with Rpcs(balancer.ports.grpc) as rpcs:
        for call, request in (
            (rpcs.RepositoryModelLoad, message("RepositoryModelLoadRequest", model_name="twice")),
            (rpcs.LogSettings, message("LogSettingsRequest")),
        ):
            assert refused(call, request)[0] == "PERMISSION_DENIED"


def test_tls_for_http_and_grpc_on_one_port(balancer: Balancer, certificate: Path) -> None:
    port = balancer.ports.tls
    trust = ssl.create_default_context(cafile=str(certificate))
    with urllib.request.urlopen(f"https://127.0.0.1:{port}/v2/health/ready", context=trust, timeout=60) as answer:
        assert answer.status == 200
    credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        ask = channel.unary_unary(f"/{INFERENCE}/ServerReady")
        assert ask(b"", timeout=60, metadata=[(HEADER, "7")]) == b"\x08\x01"

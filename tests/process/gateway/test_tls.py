"""Access control of a real gateway: TLS, client certificates, tokens, restricted APIs."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import trustme

from shmserve.testing import Server
from tests.support.ensemble_models import tensors
from tests.support.gateway.credentials import digest
from tests.support.gateway.rpc import Rpcs, infer_request, message, refused
from tests.support.gateway.running_gateway import Gateway, binary, model, outputs, rows
from tests.support.model_files import python_model, write_model
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.process

TOLD = python_model("return self.respond(np.array([request.parameters()], object))")
CONFIG = f'backend: "python" input {tensors("x:FP32:[1]")} output {tensors("y:STRING:[1]")}'
FORWARD = ("--http-header-forward-pattern", "x-.*", "--grpc-header-forward-pattern", "x-.*")
RESTRICTED = (
    "--http-restricted-api",
    "model-config:admin-key=open sesame",
    "--grpc-restricted-protocol",
    "model-config:admin-key=open sesame",
)


class Place:
    """Certificates and tokens in files, and a client that trusts them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.certificate, self.tokens = folder / "certificate", folder / "tokens"
        self.issue()
        self.write_tokens("user", "admin")

    def issue(self) -> None:
        issued = self.authority.issue_cert("localhost", "127.0.0.1")
        issued.private_key_and_cert_chain_pem.write_to_path(str(self.certificate))
        self.certificate.chmod(0o600)

    def write_tokens(self, user: str, admin: str) -> None:
        lines = f"user infer {digest(user)}\nadmin infer,observe,operate {digest(admin)}\n"
        self.tokens.write_text(f"# two\n{lines}")

    def client(self) -> ssl.SSLContext:
        made = ssl.create_default_context()
        self.authority.configure_trust(made)
        return made


class SecureGateway(Gateway):
    def __init__(self, place: Place, server: Server, *options: str) -> None:
        super().__init__(server, "--tls-cert", str(place.certificate), *options)
        self.context = place.client()
        self.root = place.authority.cert_pem.bytes()

    def connection(self, port: int = 0) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("127.0.0.1", port or self.http, timeout=PATIENCE_S, context=self.context)

    def rpcs(self, own: trustme.LeafCert | None = None) -> Rpcs:
        chain, key = (own.cert_chain_pems[0].bytes(), own.private_key_pem.bytes()) if own else (None, None)
        return Rpcs(self.grpc, "localhost", grpc.ssl_channel_credentials(self.root, key, chain))

    def secure(self) -> ssl.SSLSocket:
        return self.context.wrap_socket(self.socket(), server_hostname="localhost")


def write_models(repository: Path) -> None:
    model(repository, "row", ["FP32"], "[ -1 ]", 8)
    write_model(repository, "told", CONFIG, TOLD)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def gateway(server: Server, place: Place) -> Iterator[SecureGateway]:
    made = SecureGateway(place, server, "--tokens-file", str(place.tokens), *FORWARD, *RESTRICTED)
    yield made
    log = made.stop().decode()
    assert "Traceback" not in log
    assert "sesame" not in log


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_large_requests_and_responses_on_one_connection(gateway: SecureGateway) -> None:
    """Large bodies are received straight into shared memory and sent from it, with small ones in between."""
    with contextlib.closing(gateway.connection()) as made:
        for width in (1_000_000, 4, 300_000, 4):
            given = rows(width)
            body, headers = binary(given)
            made.request("POST", "/v2/models/row/infer", body, headers | bearer("user"))
            _, found = outputs(made.getresponse())
            np.testing.assert_array_equal(np.frombuffer(found["o_FP32"], np.float32), given["i_FP32"][1][0])


def test_tokens_and_restrictions_apply_to_http(gateway: SecureGateway) -> None:
    """Models get the matching headers of an admitted request, and neither the token nor the key."""
    assert gateway.ask("GET", "/v2/health/ready") == (200, b"")
    config, stats, key = "/v2/models/row/config", "/v2/models/row/stats", {"admin-key": "open sesame"}
    large, lengths = binary(rows(500_000))
    for path, body, headers, status, text in (
        (stats, None, {}, 401, "needs a token"),
        (stats, None, bearer("nobody"), 401, "unknown token"),
        (stats, None, bearer("user"), 403, "needs the role"),
        (stats, None, bearer("admin"), 200, ""),
        (config, None, bearer("admin"), 403, "This API is restricted, expecting header 'admin-key'"),
        (config, None, bearer("admin") | {"admin-key": "wrong"}, 403, "restricted"),
        (config, None, key, 401, "needs a token"),
        (config, None, bearer("admin") | key, 200, ""),
        ("/v2/models/row/infer", large, lengths, 401, "needs a token"),
    ):
        found, answer = gateway.ask("POST" if body else "GET", path, body, **headers)
        assert (found, text in answer.decode()) == (status, True), (path, headers)
    for headers, status in (({}, 401), (bearer("user"), 403), (bearer("admin"), 200)):
        with contextlib.closing(gateway.connection(gateway.metrics)) as made:
            made.request("GET", "/metrics", headers=headers)
            assert made.getresponse().status == status
    request: dict[str, Any] = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}
    request["parameters"] = {"a": 1, "x-user": "me"}
    sent = bearer("user") | key | {"X-User": "J\xf6rg", "y": "z"}
    found, answer = gateway.ask("POST", "/v2/models/told/infer", request, **sent)
    assert (found, json.loads(json.loads(answer)["outputs"][0]["data"][0])) == (200, {"a": 1, "X-User": "J\xf6rg"})


def test_tokens_and_restrictions_apply_to_grpc(gateway: SecureGateway) -> None:
    user, admin = ((("authorization", f"Bearer {token}"),) for token in ("user", "admin"))
    key = (("triton-grpc-protocol-admin-key", "open sesame"),)
    config, stats = message("ModelConfigRequest", name="row"), message("ModelStatisticsRequest", name="row")
    infer = infer_request("told", {"x": ("FP32", np.zeros(1), bytes(4))}, parameters={"a": 1})
    with gateway.rpcs() as rpcs:
        assert rpcs.ServerLive(message("ServerLiveRequest")).live
        for metadata, code in (
            ((), "UNAUTHENTICATED"),
            ((("authorization", "Bearer nobody"),), "UNAUTHENTICATED"),
            (user, "PERMISSION_DENIED"),
        ):
            assert refused(rpcs.ModelStatistics, stats, metadata=metadata)[0] == code
        assert rpcs.ModelStatistics(stats, metadata=admin).model_stats
        text = "This protocol is restricted, expecting header 'triton-grpc-protocol-admin-key'"
        assert refused(rpcs.ModelConfig, config, metadata=admin) == ("PERMISSION_DENIED", text)
        assert rpcs.ModelConfig(config, metadata=admin + key).config.name == "row"
        answer = rpcs.ModelInfer(infer, metadata=(*admin, *key, ("x-user", "me"), ("y", "z")))
    assert json.loads(answer.raw_output_contents[0][4:]) == {"a": 1, "x-user": "me"}


def serial(gateway: SecureGateway) -> str:
    with gateway.secure() as made:
        found: Any = made.getpeercert()
        return str(found["serialNumber"])


def reload(gateway: SecureGateway, said: str) -> str:
    """Reloads the files. Returns the line of the log with this text."""
    gateway.process.send_signal(signal.SIGHUP)
    assert gateway.process.stderr is not None
    return next(line for line in map(bytes.decode, gateway.process.stderr) if said in line)


def test_changed_certificates_and_tokens_are_reloaded_without_disconnects(gateway: SecureGateway, place: Place) -> None:
    body, headers = binary(rows(4))
    before = serial(gateway)
    with contextlib.closing(gateway.connection()) as made:

        def status(token: str) -> int:
            made.request("POST", "/v2/models/row/infer", body, headers | bearer(token))
            answer = made.getresponse()
            answer.read()
            return answer.status

        assert status("user") == 200
        whole = place.certificate.read_bytes()
        place.certificate.write_bytes(whole[: len(whole) // 2])
        place.write_tokens("another", "admin")
        assert str(place.certificate) in reload(gateway, "the previous certificates and tokens stay in use")
        assert (serial(gateway), status("user")) == (before, 200)
        place.issue()
        reload(gateway, "certificates and tokens reloaded")
        assert serial(gateway) != before
        assert (status("user"), status("another")) == (401, 200)
    place.write_tokens("user", "admin")
    reload(gateway, "certificates and tokens reloaded")


def test_tls_client_ca_requires_a_client_certificate(server: Server, place: Place) -> None:
    root = place.folder / "root"
    place.authority.cert_pem.write_to_path(str(root))
    gateway = SecureGateway(place, server, "--tls-client-ca", str(root))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        gateway.ask("GET", "/v2/health/live")
    trustme.CA().issue_cert("stranger").configure_cert(gateway.context)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        gateway.ask("GET", "/v2/health/live")
    gateway.context = place.client()
    place.authority.issue_cert("friend").configure_cert(gateway.context)
    assert gateway.ask("GET", "/v2/health/live") == (200, b"")
    live = message("ServerLiveRequest")
    with gateway.rpcs() as rpcs, gateway.rpcs(place.authority.issue_cert("friend")) as known:
        assert refused(rpcs.ServerLive, live)[0] == "UNAVAILABLE"
        assert known.ServerLive(live).live
    assert "Traceback" not in gateway.stop().decode()

"""The same commands over the lane, and over HTTPS with a token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from shmserve.clients.cli.contexts import token_of
from shmserve.testing import Server
from tests.support.cases import cases
from tests.support.commands import run
from tests.support.gateway.credentials import digest
from tests.support.gateway.running_gateway import Gateway
from tests.support.living import identity

pytestmark = pytest.mark.process


@pytest.fixture
def contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The contexts local, operator and observer of one server."""
    folder = tmp_path / "models"
    for name in ("a", "b"):
        identity(folder, name)
    authority = trustme.CA()
    certificate, trusted, tokens = tmp_path / "certificate", tmp_path / "trusted", tmp_path / "tokens"
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(certificate))
    certificate.chmod(0o600)
    authority.cert_pem.write_to_path(str(trusted))
    users = {"operator": "infer,observe,operate", "observer": "infer,observe"}
    tokens.write_text("".join(f"{name} {roles} {digest(name)}\n" for name, roles in users.items()))
    monkeypatch.delenv("SHMSERVE_URL", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    options = ("--tokens-file", str(tokens), "--tls-cert", str(certificate), "--tls-key", str(certificate))
    with Server(folder, "--model-control-mode", "explicit", "--load-model", "*") as server:
        gateway = Gateway(server, *options)
        try:
            assert run("context", "add", "local", f"unix://{server.runtime_dir}/lane.sock")[0] == 0
            for name in users:
                (tmp_path / name).write_text(name)
                url = f"https://localhost:{gateway.http}"
                assert run("context", "add", name, url, "--token-file", str(tmp_path / name))[0] == 0
            yield
        finally:
            gateway.stop()


TASKS = (
    ("ready", "the server is ready"),
    ("models a b", "READY"),
    ("infer a --random --seed 1 --json", '"model": "a"'),
    ("infer a --random --stream", "part 1 after"),
    ("config a", "max_batch_size"),
    ("stats a b", "requests"),
    ("stats --prometheus", "nv_inference_request_success"),
    ("top --once", "READY"),
    ("load a", "a"),
    ("traffic a 1=100", "100 %"),
    ("unload b --no-wait", "b"),
    ("logs a --lines 1", "INFO"),
    ("drain --no-wait", "out of service"),
    ("drain --undrain", "in service again"),
    ("restart a", "a"),
)
"""Commands, and a part of what they print."""


@pytest.mark.usefixtures("contexts")
def test_commands_over_https_do_what_they_do_locally() -> None:
    for words, part in TASKS:
        results = [run(*words.split(), "--context", name) for name in ("local", "operator")]
        assert [(code, part in out, err) for code, out, err in results] == [(0, True, "")] * 2, (words, results)


@cases(
    ("http://models.example", True),
    ("http://127.0.0.1:1", False),
    ("http://localhost:1", False),
    ("https://models.example", False),
)
def test_a_token_without_encryption_is_warned_of(
    url: str, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("secret")
    assert token_of(tmp_path / "token", url) == "secret"
    assert ("without encryption; use https://" in capsys.readouterr().err) is warned


@pytest.mark.usefixtures("contexts")
def test_roles_and_private_fields_are_those_of_the_token() -> None:
    code, out, _ = run("models", "a", "--json", "--context", "observer")
    assert (code, json.loads(out)[0]["state"]) == (0, "READY")
    for words in ("unload a", "logs", "restart a", "traffic a 1=100", "drain --no-wait"):
        code, _, err = run(*words.split(), "--context", "observer")
        assert (code, "role operate" in err) == (1, True), words
    assert run("ready", "--context", "local")[0] == 0


@pytest.mark.usefixtures("contexts")
def test_the_history_is_that_of_the_gateway() -> None:
    assert run("infer", "a", "--random", "--context", "operator")[0] == 0
    code, out, err = run("stats", "a", "--history", "--context", "observer")
    assert (code, err) == (0, "")
    assert [line.split()[:2] for line in out.splitlines()[1:]][-2:] == [["all", "models"], ["a", "1"]]
    (whole, _) = json.loads(run("stats", "a", "--history", "--json", "--context", "operator")[1])
    assert len(whole["fine"]["requests"]) == 300
    code, _, err = run("stats", "--history", "--context", "local")
    assert (code, "by --url, with --token-file" in err or "--allow-http" in err) == (1, True)

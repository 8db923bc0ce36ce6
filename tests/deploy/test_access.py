"""A pod with the components tls and tokens. Secrets are mounted and updated as in a cluster."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from tests.deploy.manifests import one
from tests.deploy.pod import Pod, running
from tests.support.commands import COMMAND
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.process
GROUP = 10001
NAMES = ("tls.crt", "tls.key", "ca.crt")


class Secret:
    """A volume with the files of a secret: readable by the pod's group, and replaced as a whole by an update."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._updates = 0
        folder.mkdir()
        folder.chmod(0o3777)

    def write(self, files: dict[str, bytes]) -> None:
        self._updates += 1
        made = self.folder / f"..{self._updates}"
        made.mkdir()
        for name, data in files.items():
            (made / name).write_bytes(data)
            os.chown(made / name, 0, GROUP)
            (made / name).chmod(0o440)
        made.chmod(0o755)
        link = self.folder / "..data_tmp"
        link.symlink_to(made.name)
        link.rename(self.folder / "..data")
        for name in files:
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")


def new_token(name: str, roles: str) -> tuple[str, str]:
    """A token, and its line for the file."""
    words = [*COMMAND, "gateway", "--new-token", f"{name}={roles}"]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return done.stderr.split()[-1], done.stdout


def certificate(authority: trustme.CA) -> dict[str, bytes]:
    issued = authority.issue_cert("shmserve")
    chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
    made = (chain, issued.private_key_pem.bytes(), authority.cert_pem.bytes())
    return dict(zip(NAMES, made, strict=True))


@pytest.fixture
def secured(built: str, models: Path, tmp_path: Path) -> Iterator[tuple[Pod, Secret, str, str]]:
    """A pod, the secret with the tokens, a line of that secret, and the line's token."""
    spec = one("overlays/production", "Deployment")["spec"]["template"]["spec"]
    # The models are a volume, because the store of the overlay cannot be reached.
    base = one("base", "Deployment")["spec"]["template"]["spec"]
    (container,), (of_base,) = spec["containers"], base["containers"]
    container["args"], container["envFrom"] = of_base["args"], []
    container["volumeMounts"] += [mount for mount in of_base["volumeMounts"] if mount["name"] == "models"]
    spec["volumes"].append({"name": "models"})
    config = tmp_path / "config"
    config.mkdir()
    (config / "shmserve.toml").write_text(one("base", "ConfigMap")["data"]["shmserve.toml"])
    tls, tokens = Secret(tmp_path / "tls"), Secret(tmp_path / "tokens")
    tls.write(certificate(trustme.CA()))
    token, line = new_token("alice", "infer,observe")
    tokens.write({"tokens": line.encode()})
    files = {"config": config, "models": models, "tls": tls.folder, "tokens": tokens.folder}
    with running(tmp_path, spec, files) as pod:
        yield pod, tokens, line, token


def ask(pod: Pod, path: str, port: str, token: str = "") -> int:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return pod.ask(path, pod.port(port), tls=True, headers=headers).status


def test_tokens_are_required_except_by_probes_and_reloaded_on_sighup(secured: tuple[Pod, Secret, str, str]) -> None:
    """Only probes need no token. A token added to the secret is known after SIGHUP."""
    pod, secret, line, token = secured
    assert [pod.probe(name) for name in ("startupProbe", "readinessProbe", "livenessProbe")] == [200, 200, 200]
    for path, port in (("/v2/models/mlp", "http"), ("/metrics", "metrics")):
        assert ask(pod, path, port) == 401
        assert ask(pod, path, port, token) == 200
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [0.0]}]}).encode()
    for headers, status in (({}, 401), ({"Authorization": f"Bearer {token}"}, 200)):
        answer = pod.ask("/v2/models/waits/infer", pod.port("http"), body, tls=True, headers=headers)
        assert answer.status == status, answer.body
    added, more = new_token("bob", "infer,observe")
    assert ask(pod, "/v2/models/mlp", "http", added) == 401
    secret.write({"tokens": (line + more).encode()})
    hang_up = pod.execute("python3", "-c", "import os; os.kill(1, 1)")
    assert hang_up.communicate(timeout=PATIENCE_S)[0] == ""
    pod.until_logged("certificates and tokens reloaded")
    assert ask(pod, "/v2/models/mlp", "http", added) == 200
    assert ask(pod, "/v2/models/mlp", "http", token) == 200

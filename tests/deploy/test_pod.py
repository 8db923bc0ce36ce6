"""The image, run as the manifests specify: a kubelet's probes and hooks, what clients notice when the pod stops, the
components tls and tokens with secrets that are updated as in a cluster, and KServe's runtime with its clients."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import trustme

from tests.deploy import image, programs
from tests.deploy.manifests import KSERVE, one, read
from tests.deploy.pod import Pod, running
from tests.support.commands import COMMAND
from tests.support.gateway.rpc import Rpcs, infer_request, message
from tests.support.load import Load, over_http
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.process
ALWAYS = ("add_sub", "mlp", "twice", "waits")


@pytest.fixture(scope="module")
def volumes(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The volumes that are not empty."""
    config = tmp_path_factory.mktemp("config")
    config.chmod(0o755)
    (config / "shmserve.toml").write_text(one("base", "ConfigMap")["data"]["shmserve.toml"])
    return {"config": config, "models": models}


@pytest.fixture(scope="module")
def lasting(built: str, volumes: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    """A pod that tests do not change."""
    spec = one("base", "Deployment")["spec"]["template"]["spec"]
    with running(tmp_path_factory.mktemp("lasting"), spec, volumes) as pod:
        yield pod


@pytest.fixture
def mortal(built: str, volumes: dict[str, Path], tmp_path: Path) -> Iterator[Pod]:
    """A pod that the test may stop."""
    with running(tmp_path, one("base", "Deployment")["spec"]["template"]["spec"], volumes) as pod:
        yield pod


def body(seconds: float) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [seconds]}
    return json.dumps({"inputs": [tensor]}).encode()


def test_a_ready_pod_answers_probes_and_requests(lasting: Pod) -> None:
    assert [lasting.probe(name) for name in ("startupProbe", "readinessProbe", "livenessProbe")] == [200, 200, 200]
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 64], "data": list(map(float, range(64)))}
    asked = json.dumps({"inputs": [tensor]}).encode()
    status, text = lasting.ask("/v2/models/mlp/infer", lasting.port("http"), asked)
    assert status == 200, text
    assert json.loads(text)["outputs"][0]["shape"] == [1, 10]
    x = np.array([1.5], np.float32)
    with Rpcs(lasting.port("grpc"), lasting.address) as rpcs:
        answer = rpcs.ModelInfer(infer_request("waits", {"x": ("FP32", x, x.tobytes())}), timeout=PATIENCE_S)
        assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [1.5]
        assert rpcs.ServerReady(message("ServerReadyRequest"), timeout=PATIENCE_S).ready
    status, text = lasting.ask("/metrics", lasting.port("metrics"))
    assert status == 200
    assert b"\nshmserve_ready 1\n" in text


def test_every_process_is_restricted(lasting: Pod) -> None:
    """The server, its gateway and its workers: not root, without capabilities, and system calls are filtered."""
    command = "cat /proc/[0-9]*/status 2>/dev/null; true"
    seen = []
    for status in re.split(r"^Name:", lasting.output("sh", "-c", command), flags=re.MULTILINE)[1:]:
        fields = dict(re.findall(r"^(\w+):\s*(.*)$", "Name:" + status, re.MULTILINE))
        assert fields["Uid"].split() == ["10001"] * 4
        assert {fields[name] for name in fields if name.startswith("Cap")} == {"0" * 16}
        assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
        seen.append(fields["Name"])
    assert len(seen) >= 2 + len(ALWAYS), seen


def test_only_the_volumes_are_written_to_and_have_their_size(lasting: Pod) -> None:
    """The root file system is read-only. Nothing has tried to write to it, or the log would show an error."""
    tried = lasting.execute("sh", "-c", "touch /new /etc/new /opt/shmserve/new /models/new /etc/shmserve/new")
    said, _ = tried.communicate(timeout=PATIENCE_S)
    assert said.count("Read-only file system") == 5, said
    assert "Read-only" not in lasting.log.read_text()
    assert (lasting.root / "run" / "shmserve" / "lane.sock").is_socket()
    words = ("python3", "-c", "import os; found = os.statvfs('/dev/shm'); print(found.f_blocks * found.f_frsize)")
    assert int(lasting.output(*words)) == 1 << 30, "the size of the manifest"


def test_the_cli_works_in_the_pod(lasting: Pod) -> None:
    states = json.loads(lasting.output("shmserve", "models", "--json"))
    assert {model["name"]: model["state"] for model in states} == dict.fromkeys(ALWAYS, "READY")
    assert "shmserve_ready 1" in lasting.output("shmserve", "stats", "--prometheus")
    lasting.output("shmserve", "ready")
    lasting.output("shmserve", "check", "/models")
    lasting.output("shmserve", "infer", "mlp", "--random")


def test_the_image_contains_only_the_program(built: str) -> None:
    (found,) = json.loads(image.call("image", "inspect", built))
    assert found["User"] == "10001:10001"
    assert set(found["Config"]["ExposedPorts"]) == {"8000/tcp", "8001/tcp", "8002/tcp"}
    assert found["Config"]["Entrypoint"] == ["shmserve"]
    listed = image.call("run", "--rm", "--network", "none", *image.limits(), "--entrypoint", "sh", built, "-c",
                        "ls / /opt/shmserve/bin; id -u")  # fmt: skip
    assert "pip" not in listed.split()
    assert "src" not in listed.split()
    assert "10001" in listed.split()


def test_the_pre_stop_drain_loses_no_request(mortal: Pod) -> None:
    """preStop takes the pod out of service. Requests of clients that have not noticed yet are answered, including long
    ones. Then the pod is empty, and SIGTERM ends it at once."""

    def call() -> None:
        with over_http(mortal.port("http"), address=mortal.address) as send:
            load.send_all("http", send)

    load = Load(dict.fromkeys(("first", "second", "third"), call))
    answers: list[int] = []
    long = threading.Thread(target=lambda: answers.append(mortal.ask("/v2/models/waits/infer", 8000, body(3.0)).status))
    with load:
        load.until_more(15)
        long.start()
        stopping = mortal.pre_stop()
        while mortal.probe("readinessProbe") == 200:  # as a kubelet does, at longer intervals
            assert stopping.poll() is None, "preStop has ended, and the pod is ready"
        load.until_more(60)  # this pod is still among the endpoints
    long.join()
    said, _ = stopping.communicate(timeout=PATIENCE_S)
    assert (stopping.returncode, said.startswith("the server is empty")) == (0, True), said
    assert mortal.probe("livenessProbe") == 200
    assert answers == [200]
    assert not load.failed
    assert mortal.terminate() == 0
    assert '"stopped"' in mortal.log.read_text()


def test_a_request_in_flight_at_sigterm_is_answered(mortal: Pod) -> None:
    """Without a drain, as if preStop had failed, the request is answered and the pod ends by itself."""
    answers: list[int] = []
    long = threading.Thread(target=lambda: answers.append(mortal.ask("/v2/models/waits/infer", 8000, body(8.0)).status))
    long.start()
    in_flight = re.compile(rb'^shmserve_model_requests_in_flight\{model="waits",version="1"\} 1$', re.MULTILINE)
    while not in_flight.search(mortal.ask("/metrics", 8002).body):
        assert long.is_alive()
    assert mortal.terminate() == 0
    long.join()
    assert answers == [200]


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
def secured(built: str, volumes: dict[str, Path], tmp_path: Path) -> Iterator[tuple[Pod, Secret, str, str]]:
    """A pod, the secret with the tokens, a line of that secret, and the line's token."""
    spec = one("overlays/production", "Deployment")["spec"]["template"]["spec"]
    # The models are a volume, because the store of the overlay cannot be reached.
    base = one("base", "Deployment")["spec"]["template"]["spec"]
    (container,), (of_base,) = spec["containers"], base["containers"]
    container["args"], container["envFrom"] = of_base["args"], []
    container["volumeMounts"] += [mount for mount in of_base["volumeMounts"] if mount["name"] == "models"]
    spec["volumes"].append({"name": "models"})
    tls, tokens = Secret(tmp_path / "tls"), Secret(tmp_path / "tokens")
    tls.write(certificate(trustme.CA()))
    token, line = new_token("alice", "infer,observe")
    tokens.write({"tokens": line.encode()})
    files = volumes | {"tls": tls.folder, "tokens": tokens.folder}
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


GRPC_PORT = 9000
VOLUME = "kserve-provision-location"


def test_the_kserve_client_gets_the_results_of_the_model(built: str, models: Path, tmp_path: Path) -> None:
    interpreter = programs.cluster()
    if interpreter is None:
        pytest.skip("KServe's client is not installed; `make test-fleet` installs it")
    (runtime,) = read(KSERVE / "clusterservingruntime.yaml")
    spec = runtime["spec"]
    (container,) = spec["containers"]
    assert f"--grpc-port={GRPC_PORT}" in container["args"]
    # KServe adds the volume into which its storage initializer has downloaded storageUri.
    container["volumeMounts"].append({"name": VOLUME, "mountPath": "/mnt/models", "readOnly": True})
    spec["volumes"].append({"name": VOLUME})
    with running(tmp_path, spec, {VOLUME: models}) as pod:
        script = Path(__file__).with_name("of_kserve.py")
        addresses = (f"http://{pod.address}:{container['ports'][0]['containerPort']}", f"{pod.address}:{GRPC_PORT}")
        done = subprocess.run(
            [str(interpreter), str(script), *addresses], capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stderr
        assert pod.terminate() == 0
    session = onnxruntime.InferenceSession(str(models / "mlp/1/model.onnx"), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": np.arange(64, dtype=np.float32).reshape(1, 64)})
    for way, answers in json.loads(done.stdout).items():
        assert np.allclose(np.array(answers.pop("y")).reshape(expected.shape), expected, atol=1e-5), way
        assert answers == {"model": True, **({"live": True, "ready": True} if way == "grpc" else {})}, way

"""The servers that are compared: their packages, and how to start them and send requests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.endpoints import servers as endpoints
from bench.lib.wrk import Post
from bench.peers.report import RELAY
from bench.peers.running import Running, running
from bench.peers.workloads import APPS, PeerWorkload, json_post, kserve_post, network, raw_post, repository

ENVIRONMENTS = Path(__file__).parents[2] / "build" / "peers"
BATCH = endpoints.BATCH
ENGINE = ("onnxruntime", "tokenizers", "pillow")


@dataclass(frozen=True)
class Start:
    """The parameters for starting a server. `batch`: the largest batch."""

    workload: PeerWorkload
    batch: int
    port: int
    work: Path
    python: Path


Command = tuple[list[str], dict[str, str]]


@dataclass(frozen=True)
class PeerServer:
    """`packages` are installed in a separate environment; without any, the server runs in this one."""

    name: str
    command: Callable[[Start], Command]
    post: Callable[[str, PeerWorkload], Post]
    packages: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    """The workloads that it supports, if not all."""
    one_for_all: bool = False
    """Batching does not delay a single request, so one server is used for all loads."""
    interpreter: Path = Path(sys.executable)
    """For a server without packages."""

    @property
    def python(self) -> Path:
        return ENVIRONMENTS / self.name / "bin" / "python" if self.packages else self.interpreter

    def is_installed(self) -> bool:
        stamp = ENVIRONMENTS / self.name / ".made"
        return not self.packages or (stamp.exists() and stamp.read_text() == " ".join(self.packages))

    def install(self) -> None:
        place = ENVIRONMENTS / self.name
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
        subprocess.run([*pip, *self.packages], check=True)
        (place / ".made").write_text(" ".join(self.packages))

    def versions(self) -> str:
        """The version of its first package, e.g. "mosec 0.9.8"."""
        name = self.packages[0].partition("[")[0].partition("=")[0] if self.packages else "shmserve"
        code = f"from importlib.metadata import version; print(version({name!r}))"
        result = subprocess.run([str(self.python), "-c", code], capture_output=True, text=True, check=True).stdout
        return f"{name} {result.strip()}"

    @contextmanager
    def started(self, workload: PeerWorkload, batch: int, work: Path) -> Iterator[tuple[Running, str]]:
        """Starts the server. Yields its processes and address."""
        place = work / f"{self.name}-{workload.name}-{batch}"
        place.mkdir()
        port = endpoints.free_port()
        command, environment = self.command(Start(workload, batch, port, place, self.python))
        with running(self.name, command, environment, place) as server:
            yield server, f"http://127.0.0.1:{port}"


def _shmserve(start: Start) -> Command:
    root = repository(start.workload, start.work.parent)
    options = ["--model-repository", str(root), "--runtime-dir", str(start.work / "run")]
    options += ["--http-port", str(start.port), "--grpc-port", "0", "--metrics-port", "0"]
    return [str(start.python), "-m", "shmserve.clients.cli.main", "serve", *options], {}


def _triton(start: Start) -> Command:
    ports = {"http": start.port, "grpc": endpoints.free_port(), "metrics": endpoints.free_port()}
    root = repository(start.workload, start.work.parent)
    return endpoints.triton_command(root, start.python, start.work, ports)


def _app(name: str, *options: str) -> Callable[[Start], Command]:
    """A script in `apps`. {port} in its options is the port."""

    def command(start: Start) -> Command:
        words = [str(start.python), str(APPS / name), *(option.format(port=start.port) for option in options)]
        return words, _environment(start)

    return command


def _bentoml(start: Start) -> Command:
    words = ["serve", "bentoml_app:Peer", "--host", "127.0.0.1", "--port", str(start.port)]
    home = {"BENTOML_HOME": str(start.work), "BENTOML_DO_NOT_TRACK": "True", "PYTHONPATH": str(APPS)}
    return [str(start.python), "-m", "bentoml", *words, "--working-dir", str(APPS)], _environment(start) | home


def _environment(start: Start) -> dict[str, str]:
    onnx = network(start.workload, start.work.parent)
    return {
        "PEER_WORKLOAD": start.workload.name,
        "PEER_BATCH": str(start.batch),
        "PEER_ONNX": str(onnx or ""),
        "PYTHONDONTWRITEBYTECODE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


SERVERS = (
    PeerServer("shmserve", _shmserve, kserve_post, one_for_all=True),
    PeerServer(
        "triton",
        _triton,
        kserve_post,
        ("nvidia-pytriton==0.7.0", "tritonclient[all]==2.73.0", *ENGINE, "numpy<2"),
        one_for_all=True,
    ),
    PeerServer(
        "mosec",
        _app("mosec_app.py", "--address", "127.0.0.1", "--port", "{port}"),
        raw_post("/inference"),
        ("mosec", *ENGINE),
    ),
    PeerServer("litserve", _app("litserve_app.py", "{port}"), raw_post("/predict"), ("litserve", *ENGINE)),
    PeerServer("bentoml", _bentoml, json_post("/infer"), ("bentoml", *ENGINE)),
    PeerServer("ray", _app("ray_app.py", "{port}"), raw_post("/"), ("ray[serve]", *ENGINE)),
    PeerServer(RELAY, _app("relay_app.py", "{port}"), kserve_post, only=("identity", "mlp"), one_for_all=True),
)


def on_python(interpreter: str) -> PeerServer:
    """shmserve on another Python; an environment in which it is installed."""
    code = "import platform; print(platform.python_version())"
    version = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return PeerServer(f"python {version}", _shmserve, kserve_post, one_for_all=True, interpreter=Path(interpreter))

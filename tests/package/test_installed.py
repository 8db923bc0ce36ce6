"""The wheel on every supported Python: first alone, as a client of a running server, then with the extra `server`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from shmserve.repo.samples import EXAMPLES
from shmserve.testing import Server
from tests.package import pythons
from tests.package.conftest import TOOLS, run

MODEL = EXAMPLES / "mlp" / "1" / "model.onnx"
CLIENT = """
import asyncio, json, sys
import numpy as np
import shmserve

x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 64)
with shmserve.Client(sys.argv[1]) as client:
    outputs = [client.infer("model", {"x": x})["y"].tolist()]

async def ask():
    async with shmserve.AsyncClient(sys.argv[2]) as client:
        return (await client.infer("model", {"x": x}))["y"].tolist()

outputs.append(asyncio.run(ask()))
print(json.dumps({"file": shmserve.__file__, "outputs": outputs, "modules": sorted(sys.modules)}))
"""
SERVER = """
import json, sys, urllib.request
import shmserve
from shmserve.testing import Server

x = [value / 8 for value in range(64)]
document = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 64], "data": x}]}
with Server(sys.argv[1], gateway=True) as server:
    url = f"http://{server.endpoints['http']}/v2/models/model/infer"
    with urllib.request.urlopen(url, json.dumps(document).encode(), timeout=60) as answer:
        print(json.dumps(json.load(answer)["outputs"][0]["data"]))
"""


class Installed(NamedTuple):
    version: str
    python: Path
    variables: dict[str, str]

    def install(self, requirement: str) -> None:
        pip = (TOOLS, "-m", "pip", "--python", self.python, "--quiet", "--disable-pip-version-check", "--no-input")
        run(*pip, "install", requirement, cwd=self.python.parent, variables=self.variables)


@pytest.fixture(scope="module", params=pythons.VERSIONS)
def client(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    version: str = request.param
    python = pythons.find(version)
    if python is None:
        pytest.skip(f"Python {version}: {pythons.reason(version)}")
    place = tmp_path_factory.mktemp(f"python{version}")
    run(python, "-m", "venv", "--without-pip", place / "venv", cwd=place)
    installed = Installed(version, place / "venv" / "bin" / "python", pythons.variables(version))
    installed.install(str(wheel))
    return installed


@pytest.fixture(scope="module")
def server(client: Installed, wheel: Path) -> Installed:
    """The same environment with the extra, after the tests of the client."""
    client.install(f"{wheel}[server]")
    return client


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    """A server of this checkout."""
    with Server(MODEL) as server:
        yield server


def expected(x: NDArray[np.floating]) -> list[float]:
    """The result of the engine without shmserve."""
    found: list[float] = (
        onnxruntime.InferenceSession(str(MODEL)).run(["y"], {"x": x.astype(np.float32).reshape(1, 64)})[0][0].tolist()
    )
    return found


def test_the_installed_client_runs_inference(client: Installed, running: Server, tmp_path: Path) -> None:
    found = json.loads(run(client.python, "-c", CLIENT, running.url, running.zmq_url, cwd=tmp_path))
    assert Path(found["file"]).is_relative_to(client.python.parents[1])
    wanted = expected(np.linspace(-1, 1, 64))
    for output in found["outputs"]:
        assert np.allclose(output, [wanted], rtol=1e-5, atol=1e-6)


def test_the_installed_cli_works_without_the_server_extra(
    client: Installed, running: Server, wheel: Path, tmp_path: Path
) -> None:
    command = client.python.with_name("shmserve")
    place = ("--runtime-dir", running.runtime_dir)
    assert "model" in run(command, "models", *place, cwd=tmp_path)
    assert "FP32" in run(command, "infer", "model", "--random", *place, cwd=tmp_path)
    refused = run("sh", "-c", f"! {command} serve {MODEL} 2>&1", cwd=tmp_path)
    assert f"pip install './{wheel.name}[server]' in the directory of that file" in refused


def test_the_installed_server_serves_a_model(server: Installed, tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    model.write_bytes(MODEL.read_bytes())
    found = json.loads(run(server.python, "-c", SERVER, model, cwd=tmp_path))
    assert np.allclose(found, expected(np.arange(64) / 8), rtol=1e-5, atol=1e-6)

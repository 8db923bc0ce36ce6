"""Shadow requests through a real server: inputs of every kind of client, and the results for operators."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from prometheus_client.parser import text_string_to_metric_families

import shmserve
from shmserve.errors import InvalidRequest
from shmserve.testing import Server
from tests.support.commands import run
from tests.support.gateway.served_gateways import ask
from tests.support.living import PYTHON, generation, policy, until, write
from tests.support.model_files import python_model, write_model

pytestmark = pytest.mark.process

MODEL = python_model(
    """
    y = 2 * x
    if self.version == 2:
        y = y * np.float32(1.00001)
    if self.version == 3 and x[0, 0] == 5:
        y[0, 0] += 1
    if self.version == 3 and x[0, 0] == 6:
        raise ValueError("six is too much")
    return self.respond(y)
    """,
    'self.version = int(args["model_version"])',
)
LARGE = 50_000
"""Number of elements of an input that is placed in shared memory."""


@pytest.fixture(scope="module", autouse=True)
def models(root: Path) -> None:
    for version in (1, 2, 3):
        folder = generation(root, "m", version, policy("all { }"), version)
        write(folder / str(version) / "model.py", MODEL)
    write_model(root, "stream", PYTHON + "model_transaction_policy { decoupled: true }\n", MODEL)


@pytest.fixture
def client(client: shmserve.Client) -> shmserve.Client:
    """Version 1 of the model "m" answers."""
    client.load("m")
    client.traffic("m", shares={1: 100})
    return client


def counts(client: shmserve.Client, shadow: int) -> dict[str, int]:
    """Result -> number of requests that version 1 has answered, according to the metrics."""
    wanted = {"model": "m", "version": "1", "shadow": str(shadow)}
    return {
        sample.labels["result"]: int(sample.value)
        for family in text_string_to_metric_families(client.metrics())
        for sample in family.samples
        if sample.name == "shmserve_shadow_requests_total" and wanted.items() <= sample.labels.items()
    }


def await_counts(client: shmserve.Client, shadow: int, **expected: int) -> None:
    until(client, lambda: counts(client, shadow) == expected, f"{expected}, found {counts(client, shadow)}")


def over_http(server: Server, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": x.shape, "data": x.ravel().tolist()}]}
    found = json.loads(ask(int(server.endpoints["http"].rpartition(":")[2]), "/v2/models/m/infer", body)[1])
    assert found["model_version"] == "1"
    return np.array(found["outputs"][0]["data"], np.float32)


def cli(server: Server, *words: str) -> str:
    code, out, err = run(*words, "--runtime-dir", server.runtime_dir)
    assert code == 0, err
    return out


def test_differences_and_failures_of_the_shadow_are_counted_and_logged(server: Server, client: shmserve.Client) -> None:
    assert "100 % also go to version 3" in cli(server, "traffic", "m", "--shadow", "3=100")
    expected = {"equal": 0, "different": 0, "failed": 0}
    for value, result in ((4, "equal"), (5, "different"), (6, "failed")):
        x = np.full((1, 8), value, np.float32)
        assert (client.infer("m", {"x": x})["y"] == 2 * x).all(), "clients do not see it"
        expected[result] = 1
        await_counts(client, 3, **{name: count for name, count in expected.items() if count})
    assert "version 3 compared with 1: 1 equal, 1 different, 1 failed, 0 skipped" in cli(server, "traffic", "m")
    logs = "\n".join(record["text"] for record in client.logs("m")["records"])
    assert "version 3 answers differently from version 1: output 'y' differs by 10 % of its largest value" in logs
    found = json.loads(cli(server, "traffic", "m", "--no-shadow", "--json"))
    assert found["shadow"] == {}
    assert [pair["different"] for pair in found["compared"]] == [1]


def test_large_inputs_are_kept_for_the_shadow(server: Server, client: shmserve.Client) -> None:
    """Inputs from the gateway, and frames in the broker, are kept until the shadow has read them. Inputs in the memory
    of an application are not compared, because the application may change them after the answer."""
    client.traffic("m", shadow={2: 100})
    x = np.arange(LARGE, dtype=np.float32).reshape(1, LARGE)
    for count in (1, 2, 3):
        assert (over_http(server, x) == 2 * x[0]).all()
        await_counts(client, 2, equal=count)
    with shmserve.Client(server.zmq_url, memory="frames") as framed:
        assert (framed.infer("m", {"x": x})["y"] == 2 * x).all()
    await_counts(client, 2, equal=4)
    assert (client.infer("m", {"x": x})["y"] == 2 * x).all()
    await_counts(client, 2, equal=4, skipped=1)


def test_invalid_shadows_are_refused(client: shmserve.Client) -> None:
    client.load("stream")
    with pytest.raises(InvalidRequest, match="a decoupled model cannot have a shadow"):
        client.traffic("stream", shadow={1: 5})
    for shadow, text in (({2: 5, 3: 5}, "2 shadows, expected at most one"), ({2: 0}, "invalid body")):
        with pytest.raises(InvalidRequest, match=text):
            client.traffic("m", shadow=shadow)
    assert client.traffic("m")["shadow"] == {}

"""Files that are served as models, and functions in them, on one server that follows changes."""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import check_output
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

import shmserve
from shmserve.clients.cli import main
from shmserve.testing import Server
from tests.support.cases import cases
from tests.support.docs import pages
from tests.support.gateway.running_gateway import Gateway
from tests.support.living import until, write
from tests.support.workers.models.worker_models import Graph

pytestmark = pytest.mark.process

APP = """
import asyncio
import dataclasses
from dataclasses import dataclass
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TypedDict

import numpy as np
import polars as pl
from PIL import Image

import shmserve
from factors import FACTOR

Row = shmserve.Tensor["FP32", 3]


@shmserve.model
def add(a: float, b: float = 1.0) -> float:
    return a + b


@shmserve.model(batch=True, max_batch_size=16)
def scale(x: Row) -> Row:
    return x * np.float32(FACTOR)


@shmserve.model(batch=True)
async def lengths(texts: list[str] = ()) -> list[int]:
    await asyncio.sleep(0)
    return [len(text) for text in texts]


@shmserve.model
def words(text: str) -> Iterator[str]:
    yield from text.split()


@shmserve.model
async def count(to: int) -> AsyncIterator[int]:
    for number in range(to):
        yield number


class Scores(TypedDict):
    label: str
    scores: list[float]


@shmserve.model(name="classify", instances=2)
class Classify:
    def __init__(self) -> None:
        self.labels = Path(__file__).with_name("labels.txt").read_text().split()

    async def __call__(self, image: bytes) -> Scores:
        index = len(image) % 2
        return {"label": self.labels[index], "scores": [float(index), 1.0 - index]}


@shmserve.model
def wrong(how: str) -> tuple[shmserve.Tensor["FP32", 2], int]:
    if how == "invalid":
        raise shmserve.InvalidRequest("no such word")
    results = {
        "dtype": (np.zeros(2), 0),
        "shape": (np.zeros(3, np.float32), 0),
        "count": (1,),
        "value": (np.zeros(2, np.float32), 0.5),
    }
    return results[how]


@dataclass
class Order:
    name: str
    count: int = 1


@shmserve.model
def order(item: Order) -> Order:
    if item.count > 9:
        raise RuntimeError("too many")
    return Order(item.name, item.count + 1)


@shmserve.model
def sheet(table: pl.DataFrame, picture: Image.Image, orders: list[Order]) -> pl.DataFrame:
    column = [picture.width, *(order.count for order in orders)]
    return table.with_columns(pl.Series("more", column))


@shmserve.model
def unfinished(x) -> int:
    return 1
"""


def matmul(path: Path, factor: float) -> None:
    """y = x * factor, with the factor in a separate file."""
    graph = Graph().input("x", "FP32", [-1, 2]).output("y", "FP32", [-1, 2])
    graph.weight("w", np.eye(2, dtype=np.float32) * np.float32(factor)).node("MatMul", ["x", "w"], ["y"])
    with TemporaryDirectory() as place:
        model = onnx.load(graph.save(Path(place)))
    name = f"{path.name}.data"
    path.with_name(name).unlink(missing_ok=True)
    onnx.save(model, path, save_as_external_data=True, location=name, size_threshold=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "app.py").write_text(APP)
    (folder / "factors.py").write_text("FACTOR = 2")
    (folder / "labels.txt").write_text("cat dog")
    matmul(folder / "my net.onnx", 3)
    model = folder / "more" / "identity"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(
        'backend: "identity" input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } ] '
        'output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]'
    )
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    words = [str(folder / "my net.onnx"), "--model-repository", str(folder / "more"), "--model-control-mode", "poll"]
    polling = ("--repository-poll-secs", "0.1", "--strict-readiness", "false")
    before = sorted(path.name for path in folder.rglob("*"))
    with Server(folder / "app.py", *words, *polling) as server:
        yield server
    assert sorted(path.name for path in folder.rglob("*") if path.suffix != ".new") == before, (
        "nothing is written there"
    )


@pytest.fixture
def client(server: Server) -> Iterator[shmserve.Client]:
    with server.client() as client:
        yield client


def states(client: shmserve.Client) -> dict[str, str]:
    return {entry["name"]: entry["state"] for entry in client.models()}


def outputs(result: Any) -> dict[str, Any]:
    return {name: array.tolist() for name, array in result.items()}


def test_functions_and_files_become_models(client: shmserve.Client) -> None:
    ready = {"add", "scale", "lengths", "words", "count", "classify", "wrong", "order", "sheet", "my_net", "identity"}
    assert states(client) == dict.fromkeys(ready, "READY") | {"unfinished": "UNAVAILABLE"}
    reason = next(entry["reason"] for entry in client.models() if entry["name"] == "unfinished")
    assert "'unfinished' in app.py, line " in reason
    assert "parameter 'x' has no type: write x: shmserve.Tensor" in reason


def test_an_onnx_file_with_external_weights(client: shmserve.Client) -> None:
    assert outputs(client.infer("my_net", {"x": [[1, 2]]})) == {"y": [[3, 6]]}
    assert client.metadata("my_net")["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]
    assert client.infer("identity", {"x": [0.5, 1]})["y"].tolist() == [0.5, 1]


def test_functions_with_defaults_bytes_and_several_outputs(client: shmserve.Client) -> None:
    assert outputs(client.infer("add", {"a": 1.5})) == {"output": [2.5]}
    assert outputs(client.infer("add", {"a": 1.5, "b": 2})) == {"output": [3.5]}
    assert outputs(client.infer("classify", {"image": b"abc"})) == {"label": [b"dog"], "scores": [1, 0]}
    assert client.config("classify")["instance_group"][0]["count"] == 2


def test_records_images_and_tables(client: shmserve.Client) -> None:
    assert outputs(client.infer("order", {"name": "a"})) == {"name": [b"a"], "count": [2]}
    with pytest.raises(shmserve.ModelFailed, match=r"RuntimeError: too many \(app.py, line \d+\)"):
        client.infer("order", {"name": "a", "count": 10})
    picture = io.BytesIO()
    Image.new("L", (5, 1)).save(picture, "PNG")
    more = {"picture": picture.getvalue(), "orders": ['{"name": "b", "count": 7}']}
    program = "import polars, sys; polars.DataFrame({'a': [1, 2]}).write_%s(sys.stdout.buffer)"
    kinds = ("csv", "json", "parquet", "ipc")
    for table in [check_output([sys.executable, "-c", program % kind]) for kind in kinds]:
        result = client.infer("sheet", {"table": table, **more})["output"]
        assert json.loads(result.item()) == [{"a": 1, "more": 5}, {"a": 2, "more": 7}]
    with pytest.raises(shmserve.InvalidRequest, match=r"input 'orders' is not valid: .*`name`"):
        client.infer("sheet", {"table": b"a\n1\n", **more, "orders": ["{}"]})


def test_batches(client: shmserve.Client) -> None:
    assert client.config("scale")["max_batch_size"] == 16
    futures = [client.submit("scale", {"x": [[number, 0, 1]]}) for number in range(40)]
    assert [future.result()["output"].tolist() for future in futures] == [[[2 * n, 0, 2]] for n in range(40)]
    assert outputs(client.infer("lengths", {"texts": [["a"], ["four"]]})) == {"output": [[1], [4]]}


def test_streams(client: shmserve.Client) -> None:
    with client.stream("words", {"text": "as it is"}) as parts:
        assert [part["output"][0] for part in parts] == [b"as", b"it", b"is"]
    with client.stream("count", {"to": 100}) as parts:
        assert [part["output"][0] for part in parts] == list(range(100))
    with client.stream("words", {"text": "x " * 10_000}, window=2) as parts:
        next(parts)
    assert [part["output"][0] for part in client.stream("words", {"text": "again"})] == [b"again"]


@cases(
    (
        "dtype",
        r"'wrong' in app.py, line \d+ returned for output 'output_0' an array of FP64, the type hint says FP32: ",
    ),
    ("shape", r"the shape \[3\], the type hint says \[2\]"),
    ("count", "not a tuple of 2 items"),
    ("value", "0.5 is not an integer, as INT64 needs"),
)
def test_results_that_do_not_match_the_type_hints_are_refused(how: str, text: str, client: shmserve.Client) -> None:
    with pytest.raises(shmserve.ModelFailed, match=text):
        client.infer("wrong", {"how": how})


def test_exceptions_in_functions_fail_the_request(client: shmserve.Client) -> None:
    with pytest.raises(shmserve.InvalidRequest, match=r"^no such word$"):
        client.infer("wrong", {"how": "invalid"})
    with pytest.raises(shmserve.ModelFailed, match="KeyError: 'other'"):
        client.infer("wrong", {"how": "other"})
    with pytest.raises(shmserve.InvalidRequest, match="input 'texts' is not UTF-8 text"):
        client.infer("lengths", {"texts": [[b"\xff"]]})
    with pytest.raises(shmserve.InvalidRequest, match="a request must have at least one of its inputs"):
        client.infer("lengths", {})


GENERATED = """
import io, sys
from add_client import Client
from add_client.api.default import generate as add
from add_client.models import GenerateBody
from order_client.api.default import generate as order
from order_client.models import GenerateJsonBody as OrderBody
from classify_client.api.default import generate as classify
from classify_client.models import GenerateFilesBody, GenerateJsonBody
from classify_client.types import File

client = Client(base_url=sys.argv[1])
print(add.sync(client=client, body=GenerateBody(a=1.5, b=2)).output)
print(order.sync(client=client, body=OrderBody("a", 2)).count)
for body in (GenerateFilesBody(File(io.BytesIO(b"\\xffab"), "f")), GenerateJsonBody("abcd")):
    print(classify.sync(client=client, body=body).label)
"""


def test_generated_clients(server: Server, tmp_path: Path) -> None:
    """A generator makes Python classes of the OpenAPI documents: for JSON, and for bytes in a form."""
    pytest.importorskip("openapi_python_client", reason="it needs Python 3.11")
    gateway = Gateway(server)
    try:
        url = f"http://127.0.0.1:{gateway.http}"
        for model in ("add", "order", "classify"):
            document, target = f"{url}/v2/models/{model}/openapi.json", tmp_path / f"{model}_client"
            words = ("generate", "--url", document, "--output-path", str(target), "--meta", "none")
            check_output([sys.executable, "-m", "openapi_python_client", *words])
        printed = check_output([sys.executable, "-c", GENERATED, url], cwd=tmp_path).split()
        assert printed == [b"3.5", b"3", b"dog", b"cat"]
    finally:
        gateway.stop()


def test_changed_files_are_reloaded(folder: Path, client: shmserve.Client) -> None:
    """Runs last, because it changes the files. An unreadable file changes nothing, and its models report the reason."""
    app = folder / "app.py"
    write(app, "def broken(:\n")
    until(client, lambda: "app.py, line 1" in str([entry["last_failed_change"] for entry in client.models()]))
    assert outputs(client.infer("add", {"a": 1.0})) == {"output": [2]}
    write(app, APP.replace("a + b", "a - b").replace("def words", "def terms"))
    until(client, lambda: states(client).get("terms") == "READY" and states(client).get("words") != "READY")
    until(client, lambda: outputs(client.infer("add", {"a": 1.0})) == {"output": [0]})
    write(folder / "factors.py", "FACTOR = 3")
    until(client, lambda: outputs(client.infer("scale", {"x": [[1, 0, 1]]})) == {"output": [[3, 0, 3]]})
    matmul(folder / "my net.onnx", 5)
    until(client, lambda: outputs(client.infer("my_net", {"x": [[1, 2]]})) == {"y": [[5, 10]]})


def test_functions_of_the_pages(tmp_path: Path) -> None:
    (app,) = [block for block in pages.blocks(pages.page("models"), "python") if "def normalize" in block]
    (classifier,) = [block for block in pages.blocks(pages.page("python"), "python") if "class Classifier" in block]
    (tmp_path / "app.py").write_text(app)
    (tmp_path / "classifier.py").write_text(classifier)
    section = pages.page("models").partition("## A function\n")[2].partition("\n## ")[0]
    lines = [line for block in pages.blocks(section, "sh") for line in block.splitlines() if " infer " in line]
    assert len(lines) == 2
    with Server(tmp_path / "app.py", str(tmp_path / "classifier.py")) as server, server.client() as client:
        for line in lines:
            words = [*shlex.split(line)[1:], "--runtime-dir", str(server.runtime_dir)]
            assert main.main(words) == 0
        assert outputs(client.infer("classify", {"image": b"abc"})) == {"label": [b"dog"], "scores": [0, 1]}
        rows = client.infer("normalize", {"x": [[3, 4, 0]]})["output"]
        np.testing.assert_allclose(rows, [[0.6, 0.8, 0]], rtol=1e-6)

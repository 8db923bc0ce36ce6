"""The workloads for every server: four models, two pipelines, and the numbers of requests in flight.

`first` takes 1 MiB and returns its first number, which measures the cost of a large input alone. `texts` tokenizes
texts of mixed lengths and embeds them with MiniLM; `images` decodes a JPEG and classifies it.
"""

from __future__ import annotations

import base64
import io
import json
import runpy
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.endpoints import servers
from bench.lib import models
from bench.lib.wrk import Post
from shmserve.repo import minilm
from shmserve.repo.ocr import package_file

Array = NDArray[np.float32]
Payload = Array | bytes
APPS = Path(__file__).parent / "apps"
MIB = 1 << 20
WORDS = ("tea", "small", "town", "rose", "again", "because", "ships", "were", "late", "rain", "fell", "on", "field")
PIPELINES = ("images", "texts")
MODEL = """

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        folder = os.path.join(args["model_repository"], args["model_version"])
        self.run = PIPELINES[args["model_name"]](folder)

    def execute(self, requests):
        parts = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        y = self.run([row for part in parts for (row,) in part])
        ends = np.cumsum([len(part) for part in parts])[:-1]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", part)]) for part in np.split(y, ends)]
"""


@dataclass(frozen=True)
class PeerWorkload:
    name: str
    shape: tuple[int, ...]
    flights: tuple[int, ...]
    batches: bool = True
    """Whether requests may share a batch; otherwise the model takes one request at a time."""

    def payloads(self) -> tuple[Payload, ...]:
        """What the requests carry, in turn."""
        if self.name == "texts":
            return some_texts()
        if self.name == "images":
            return (picture(),)
        return (np.random.default_rng(1).standard_normal(self.shape).astype(np.float32),)


WORKLOADS = (
    PeerWorkload("identity", (servers.ROW,), (1, 8, 64)),
    PeerWorkload("mlp", tuple(models.MLP_SHAPE), (1, 8, 64)),
    PeerWorkload("cnn", tuple(models.CNN_SHAPE), (1, 8)),
    PeerWorkload("first", (MIB // 4,), (1, 8), batches=False),
    PeerWorkload("texts", (1,), (1, 8)),
    PeerWorkload("images", (1,), (1, 8)),
)


def some_texts() -> tuple[bytes, ...]:
    """Sixteen texts of 4 to 100 words."""
    random = np.random.default_rng(1)
    counts = random.integers(4, 101, 16)
    return tuple(" ".join(random.choice(WORDS, count)).encode() for count in counts)


def picture() -> bytes:
    """A JPEG of 640 x 480."""
    from PIL import Image

    coarse = np.random.default_rng(1).integers(0, 256, (12, 16, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((640, 480), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def network(workload: PeerWorkload, work: Path) -> Path | None:
    """The ONNX file of a workload that has one."""
    cnn = models.make_cnn
    makers: dict[str, Callable[[Path], None]] = {"mlp": models.make_mlp, "cnn": cnn, "images": cnn, "texts": make_texts}
    if workload.name not in makers:
        return None
    path = work / workload.name / "model.onnx"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        makers[workload.name](path)
    return path


def make_texts(path: Path) -> None:
    """MiniLM, and its tokenizer beside it, from the package of the sample `topics`."""
    weights, tokenizer = (package_file(minilm.PACKAGE, name) for name in (minilm.WEIGHTS, minilm.TOKENIZER))
    if weights is None or tokenizer is None:
        raise RuntimeError("MiniLM is not installed: `make samples` installs it")
    path.write_bytes(minilm.model(weights))
    (path.parent / "tokenizer.json").write_bytes(tokenizer.read_bytes())


def repository(workload: PeerWorkload, work: Path) -> Path:
    """A repository, for servers that use one: a `model.py` with the same engine."""
    root = work / f"models-{workload.name}"
    if root.exists():
        return root
    onnx = network(workload, work)
    if workload.name == "first":
        models.write(root, "first", models.first_element(), {"model.py": models.FIRST})
        return root
    if workload.name in PIPELINES:
        assert onnx is not None
        inputs, outputs = {"x": ("STRING", [1])}, {"y": ("FP32", [-1])}
        source = (APPS / "pipelines.py").read_text() + MODEL
        pipeline: dict[str, str | Path] = {"model.py": source, **{path.name: path for path in onnx.parent.iterdir()}}
        model = models.Model("python", inputs, outputs, max_batch=servers.BATCH, dynamic=True)
        models.write(root, workload.name, model, pipeline)
        return root
    outer = {"identity": servers.ROW, "mlp": 64, "cnn": 1000}[workload.name]
    tensors = {"x": ("FP32", list(workload.shape))}, {"y": ("FP32", [outer])}
    model = models.Model("python", *tensors, max_batch=servers.BATCH, dynamic=True)
    files: dict[str, str | Path] = {"model.py": servers.MLP if onnx else models.IDENTITY}
    models.write(root, workload.name, model, files | ({"model.onnx": onnx} if onnx else {}))
    return root


def expected(workload: PeerWorkload, row: Payload, work: Path) -> Array:
    """The correct output, computed by ONNX Runtime in this process."""
    onnx = network(workload, work)
    if isinstance(row, bytes):
        assert onnx is not None
        run: Any = runpy.run_path(str(APPS / "pipelines.py"))["PIPELINES"][workload.name](str(onnx.parent))
        return np.asarray(run([row])[0], np.float32)
    if onnx is None:
        return row[:1] if workload.name == "first" else row
    import onnxruntime

    session: Any = onnxruntime.InferenceSession(str(onnx), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": row[None]})[0][0], np.float32)


# ---------------------------------------------------------------------------------------- on the wire


def _bytes(payload: Payload) -> bytes:
    return payload if isinstance(payload, bytes) else payload.tobytes()


def raw_post(path: str) -> Callable[[str, PeerWorkload], Post]:
    """Posts the numbers, or the text or image, as bytes."""
    headers = {"Content-Type": "application/octet-stream"}
    return lambda url, workload: Post(url + path, headers, tuple(map(_bytes, workload.payloads())))


def json_post(path: str) -> Callable[[str, PeerWorkload], Post]:
    """Posts a batch of one as nested lists, or as a string, in Base64 for an image."""
    headers = {"Content-Type": "application/json"}

    def body(workload: PeerWorkload, payload: Payload) -> bytes:
        if isinstance(payload, bytes):
            value: Any = payload.decode() if workload.name == "texts" else base64.b64encode(payload).decode()
        else:
            value = payload.tolist()
        return json.dumps({"x": [value]}).encode()

    return lambda url, workload: Post(url + path, headers, tuple(body(workload, one) for one in workload.payloads()))


def kserve_post(url: str, workload: PeerWorkload) -> Post:
    """Posts a KServe request, with binary tensors in both directions."""
    heads, tensors = [], []
    for payload in workload.payloads():
        if isinstance(payload, bytes):
            data, datatype, shape = struct.pack("<I", len(payload)) + payload, "BYTES", [1, 1]
        else:
            data, datatype = payload.tobytes(), "FP32"
            shape = [1, *payload.shape] if workload.batches else list(payload.shape)
        x = {"name": "x", "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(data)}}
        head = {"inputs": [x], "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}
        heads.append(json.dumps(head).encode())
        tensors.append(data)
    length = max(map(len, heads))  # one header for all
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(length)}
    bodies = tuple(head.ljust(length) + data for head, data in zip(heads, tensors, strict=True))
    return Post(f"{url}/v2/models/{workload.name}/infer", headers, bodies)

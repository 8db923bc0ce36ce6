"""The models of the text pipeline: a tokenizer, a classifier and labels, in several forms each, and their ensemble."""

from __future__ import annotations

from pathlib import Path

from bench.lib import models
from bench.lib.models import Model
from bench.published import texts
from bench.published.texts import LENGTH, TEXTS, WORDS

HIDDEN = 64
TOKENIZER = """
import triton_python_backend_utils as pb_utils

from . import texts


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "text").as_numpy()) for request in requests]

    def answer(self, rows):
        ids, mask = texts.tokens_{way}([text.decode() for (text,) in rows])
        return pb_utils.InferenceResponse([pb_utils.Tensor("input_ids", ids), pb_utils.Tensor("attention_mask", mask)])
"""
LABELS = """
import triton_python_backend_utils as pb_utils

from . import texts


class TritonPythonModel:
    def execute(self, requests):
        vectors = [pb_utils.get_input_tensor_by_name(request, "vector").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("label", texts.labels_{way}(some))]) for some in vectors]
"""
ENSEMBLE = """
platform: "ensemble" max_batch_size: 64
input [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "label" data_type: TYPE_STRING dims: [ 1 ] } ]
ensemble_scheduling { step [
  { model_name: "tokenizer_fast" input_map { key: "text" value: "text" }
    output_map { key: "input_ids" value: "ids" } output_map { key: "attention_mask" value: "mask" } },
  { model_name: "encoder" input_map { key: "input_ids" value: "ids" } input_map { key: "attention_mask" value: "mask" }
    output_map { key: "text" value: "vector" } },
  { model_name: "labels_numpy" input_map { key: "vector" value: "vector" } output_map { key: "label" value: "label" } }
] }
"""


def write(root: Path, encoder: Path) -> None:
    """The models, in a repository. `encoder`: the path for the file of the network."""
    models.make_transformer(encoder, HIDDEN, 2, 4, WORDS)
    steps = Path(texts.__file__).read_text()
    tokens = {name: ("INT64", [LENGTH]) for name in ("input_ids", "attention_mask")}
    for way in ("fast", "loop"):
        tokenizer = Model("python", {"text": ("STRING", [1])}, tokens, TEXTS)
        models.write(root, f"tokenizer_{way}", tokenizer, {"model.py": TOKENIZER.format(way=way), "texts.py": steps})
    for way in ("numpy", "loop"):
        labels = Model("python", {"vector": ("FP32", [HIDDEN])}, {"label": ("STRING", [1])}, TEXTS)
        models.write(root, f"labels_{way}", labels, {"model.py": LABELS.format(way=way), "texts.py": steps})
    network = Model("onnxruntime", tokens, {"text": ("FP32", [HIDDEN])}, TEXTS)
    network.parameters["intra_op_thread_count"] = "1"
    models.write(root, "encoder", network, {"model.onnx": encoder})
    (root / "texts" / "1").mkdir(parents=True)
    (root / "texts" / "config.pbtxt").write_text(ENSEMBLE)

"""`shmserve convert`, `quantize` and `describe`: the models that they write answer like the original.

Tests of a framework are skipped without it or its converter; `make test-engines` has them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.repo.samples import EXAMPLES
from tests.support import foreign_models
from tests.support.commands import COMMAND

pytestmark = pytest.mark.process

END_S = 240
MLP = EXAMPLES / "mlp" / "1" / "model.onnx"
PROGRAMS = {
    "tensorflow": """
import tensorflow as tf
module = tf.Module()
module.w = tf.Variable(tf.random.stateless_normal([6, 3], [1, 2]))
def answer(x):
    return {"y": tf.nn.softmax(tf.matmul(x, module.w)), "total": tf.reduce_sum(x, 1, keepdims=True)}
signature = [tf.TensorSpec([None, 6], tf.float32, name="x")]
module.answer = tf.function(answer, input_signature=signature, autograph=False)
tf.saved_model.save(module, "net", signatures=module.answer.get_concrete_function())
""",
    "paddle": """
import paddle
paddle.seed(1)
network = paddle.nn.Sequential(paddle.nn.Linear(5, 4), paddle.nn.Softmax())
network.eval()
paddle.jit.save(network, "net", input_spec=[paddle.static.InputSpec([None, 5], "float32", name="x")])
""",
}


def run(*words: str | Path) -> tuple[int, str, str]:
    """In a process of its own: engines leave threads behind."""
    ran = subprocess.run([*COMMAND, *map(str, words)], capture_output=True, text=True, check=False, timeout=END_S)
    return ran.returncode, ran.stdout, ran.stderr


def written(folder: Path, *words: str | Path) -> Any:
    code, out, err = run(*words, "--repository", folder / "models", "--json")
    assert code == 0, err
    return json.loads(out)


def assert_same(document: Any, *outputs: str) -> None:
    assert [one["output"] for one in document["outputs"]] == list(outputs)
    for one in document["outputs"]:
        assert one["largest"] <= 1e-4 * max(one["value"], 1.0)
    assert all(Path(file).is_file() for file in document.get("files", ()))


def test_torch(tmp_path: Path) -> None:
    """The sizes that the traced file leaves open stay open in the ONNX file."""
    pytest.importorskip("torch")
    image, words, program = foreign_models.make("torch", tmp_path)
    source = ("convert", "image", "--from", image, "--shape", "image=1,3,48,32")
    code, out, err = run(*source, "--repository", tmp_path / "models", "--tolerance", "1e-12", "--json")
    assert (code, (tmp_path / "models").exists()) == (1, False)
    assert_same(json.loads(out), "OUTPUT__0")
    assert "the outputs differ by more than --tolerance 1e-12, so image is not written" in err
    assert_same(written(tmp_path, *source), "OUTPUT__0")
    assert "dims: [ 3, -1, -1 ]" in (tmp_path / "models" / "image" / "config.pbtxt").read_text()
    assert "exists, and is not overwritten" in run(*source, "--repository", tmp_path / "models")[2]
    pytest.importorskip("onnxscript")
    assert_same(written(tmp_path, "convert", "program", "--from", program), "OUTPUT__0")
    assert_same(written(tmp_path, "convert", "words", "--from", words), "OUTPUT__0", "OUTPUT__1")


def test_sklearn(tmp_path: Path) -> None:
    pytest.importorskip("skl2onnx")
    numbers, _, line = foreign_models.make("sklearn", tmp_path)
    assert_same(written(tmp_path, "convert", "numbers", "--from", numbers), "label", "probabilities")
    assert_same(written(tmp_path, "convert", "line", "--from", line), "variable")


@pytest.mark.parametrize(
    ("kind", "file", "converter"), [("tensorflow", "", "tf2onnx"), ("paddle", ".json", "paddle2onnx")]
)
def test_tensorflow_and_paddle(kind: str, file: str, converter: str, tmp_path: Path) -> None:
    pytest.importorskip(kind)
    pytest.importorskip(converter)
    subprocess.run([sys.executable, "-c", PROGRAMS[kind]], cwd=tmp_path, check=True, capture_output=True)
    document = written(tmp_path, "convert", "onnx_net", "--from", tmp_path / f"net{file}")
    assert_same(document, *[one["output"] for one in document["outputs"]])
    assert len(document["outputs"]) == (2 if kind == "tensorflow" else 1)


@pytest.mark.parametrize("precision", ["int8", "int8-static", "fp16"])
def test_quantize(precision: str, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    source = tmp_path / "mlp.onnx"
    onnx.save(onnx.load(MLP), source, save_as_external_data=True, location="weights", size_threshold=0)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((40, 64), np.float32))
    rows = ("--input", f"x=@{tmp_path / 'x.npy'}") if precision == "int8-static" else ()
    document = written(tmp_path, "quantize", "small", "--from", source, "--precision", precision, *rows)
    (output,) = document["outputs"]
    assert 0 < output["largest"] < 0.1 * output["value"]
    assert output["same_class"] > 0.5
    assert document["bytes"]["original"] > MLP.stat().st_size - 1000, "the weights are in a file of their own"
    assert document["bytes"]["new"] < 0.6 * document["bytes"]["original"]
    assert set(document["seconds"]) == ({"8"} if rows else {"1", "3", "8"})


def test_describe() -> None:
    pytest.importorskip("onnx")
    code, out, err = run("describe", MLP.parents[1], "--rows", "1", "--rows", "4", "--json")
    assert code == 0, err
    document = json.loads(out)
    one, four = document["work"]
    assert (four["flops"], four["input_bytes"]) == (4 * one["flops"], 4 * one["input_bytes"])
    assert one["flops"] > 2 * (document["parameters"] - 200)
    assert one["bound"] in ("arithmetic", "memory")
    for shape in ("z=1,64", "x=1", "x=0,64"):
        assert run("describe", MLP, "--shape", shape)[0] == 2


def test_sources_that_cannot_be_converted(tmp_path: Path) -> None:
    (tmp_path / "model.txt").touch()
    code, _, err = run("convert", "net", "--from", tmp_path / "model.txt", "--repository", tmp_path)
    assert (code, "expected a model directory, a SavedModel, or a file" in err) == (1, True)
    code, _, err = run("convert", "net", "--from", tmp_path / "none.pt", "--repository", tmp_path)
    assert (code, "no such file or directory" in err) == (2, True)
    code, _, err = run("convert", "net", "--from", MLP, "--repository", tmp_path)
    assert (code, "backend 'onnxruntime' cannot be converted" in err) == (1, True)

"""Writes a network with random weights as its framework does: `python -m bench.published.foreign KIND PATH SIZE`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.published.texts import LABELS, LENGTH, WORDS

GRAPH_OUTPUT = "Identity"
"""TensorFlow's name of the output of a frozen graph."""
IDS, SCORES = "ids", "fetch_name_0"
"""Names of the network of PaddlePaddle, which numbers its outputs."""
LAYERS, HEADS, OPSET = 4, 4, 17


def write_graphdef(path: Path, size: int) -> None:
    """Inception v3 for images of `size`, frozen."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    tf.keras.utils.set_random_seed(1)
    network = tf.keras.applications.InceptionV3(weights=None, input_shape=(size, size, 3))
    answer = tf.function(lambda x: network(x, training=False))
    concrete = answer.get_concrete_function(tf.TensorSpec([None, size, size, 3], tf.float32, name="x"))
    frozen = convert_variables_to_constants_v2(concrete)
    path.write_bytes(frozen.graph.as_graph_def().SerializeToString())


def write_paddle(path: Path, width: int) -> None:
    """A classifier of texts, ids -> scores: PATH.json, PATH.pdiparams, and PATH.onnx from its converter."""
    os.environ.setdefault("GLOG_minloglevel", "2")
    import paddle
    import paddle2onnx

    class Classifier(paddle.nn.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.words = paddle.nn.Embedding(WORDS, width)
            self.places = paddle.nn.Embedding(LENGTH, width)
            layer = paddle.nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, activation="gelu")
            self.encoder = paddle.nn.TransformerEncoder(layer, LAYERS)
            self.scores = paddle.nn.Linear(width, len(LABELS))

        def forward(self, ids: Any) -> Any:
            x = self.words(ids) + self.places(paddle.arange(LENGTH).unsqueeze(0))
            return self.scores(self.encoder(x).mean(1))

    paddle.seed(1)
    network = Classifier()
    network.eval()
    paddle.jit.save(network, str(path), input_spec=[paddle.static.InputSpec([None, LENGTH], "int64", IDS)])
    files = [str(path.with_suffix(suffix)) for suffix in (".json", ".pdiparams", ".onnx")]
    # The optimizer, on by default, installs packages.
    paddle2onnx.export(*files, opset_version=OPSET, optimize_tool="None")


WRITERS: Mapping[str, Callable[[Path, int], None]] = {"graphdef": write_graphdef, "paddle": write_paddle}


if __name__ == "__main__":
    WRITERS[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))

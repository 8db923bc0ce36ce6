"""Models for TensorFlow, made from graphs without variables, so that saving them needs no session."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shmserve.repo.config.schema import ModelConfig
from tests.support.workers.worker_harness import config, echo_config

INSTALLED = importlib.util.find_spec("tensorflow") is not None
if INSTALLED:  # imported now: the import and the first graph start threads, which would count as leaks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tensorflow as tf
        from tensorflow.core.protobuf import saved_model_pb2
    tf.get_logger().setLevel("ERROR")
    tf.function(lambda: tf.zeros(1) + tf.zeros(1))()

Tensors = Mapping[str, Any]
X, Y = {"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,))}


def data_type(dtype: str) -> Any:
    names = {"FP16": "float16", "FP32": "float32", "FP64": "float64", "BF16": "bfloat16", "BYTES": "string"}
    return tf.dtypes.as_dtype(names.get(dtype, dtype.lower()))


def placeholder(name: str, dtype: str, dims: Sequence[int] | None) -> Any:
    shape = None if dims is None else [None if dim == -1 else dim for dim in dims]
    return tf.compat.v1.placeholder(data_type(dtype), shape, name)


def saved_model(
    folder: Path,
    make: Callable[[], tuple[Tensors, Tensors]],
    *,
    signature: str = "serving_default",
    tags: Sequence[str] = ("serve",),
) -> Path:
    """Writes a SavedModel with the graph that `make` creates, or adds the graph to an existing one."""
    path = folder / "1" / "model.savedmodel"
    path.mkdir(parents=True, exist_ok=True)
    file, proto = path / "saved_model.pb", saved_model_pb2.SavedModel(saved_model_schema_version=1)
    if file.exists():
        proto.ParseFromString(file.read_bytes())
    meta = proto.meta_graphs.add()
    meta.meta_info_def.tags.extend(tags)
    with tf.Graph().as_default() as graph:
        inputs, outputs = make()
        described = tf.compat.v1.saved_model.build_tensor_info
        found = tf.compat.v1.saved_model.build_signature_def(
            {name: described(tensor) for name, tensor in inputs.items()},
            {name: described(tensor) for name, tensor in outputs.items()},
            "tensorflow/serving/predict",
        )
    meta.graph_def.CopyFrom(graph.as_graph_def())
    meta.signature_def[signature].CopyFrom(found)
    file.write_bytes(proto.SerializeToString())
    return path


def frozen_graph(folder: Path, make: Callable[[], object]) -> Path:
    path = folder / "1" / "model.graphdef"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tf.Graph().as_default() as graph:
        make()
    path.write_bytes(graph.as_graph_def().SerializeToString())
    return path


def echo(folder: Path, dtypes: Sequence[str], dims: Sequence[int], max_batch: int) -> ModelConfig:
    full = [-1, *dims] if max_batch else list(dims)

    def make() -> tuple[Tensors, Tensors]:
        inputs = {f"x{dtype}": placeholder(f"x{dtype}", dtype, full) for dtype in dtypes}
        return inputs, {f"y{name[1:]}": tf.identity(tensor, f"y{name[1:]}") for name, tensor in inputs.items()}

    saved_model(folder, make)
    return echo_config("tensorflow", dtypes, dims, max_batch)


def failing(folder: Path) -> ModelConfig:
    """y = x, from a frozen graph; fails if a value is 77."""

    def make() -> None:
        x = placeholder("x", "FP32", [-1, -1])
        told = tf.reduce_any(tf.equal(x, 77))
        with tf.control_dependencies([tf.raw_ops.Assert(condition=tf.logical_not(told), data=["told to"])]):
            tf.identity(x, "y")

    frozen_graph(folder, make)
    return config("tensorflow", X, Y, max_batch=8)


def adding(folder: Path) -> None:
    def make() -> tuple[Tensors, Tensors]:
        a = placeholder("a", "FP32", [-1, 2])
        b = tf.compat.v1.placeholder_with_default(tf.constant([[100.0, 100.0]]), [None, 2], "b")
        return {"a": a, "b": b}, {"sum": a + b}

    saved_model(folder, make)

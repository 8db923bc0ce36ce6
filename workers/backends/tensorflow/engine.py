"""The engine, and the descriptions of its files."""

from __future__ import annotations

import importlib
import os
from typing import Any


def _imported() -> Any:
    """Imports the engine with reduced logging, since its messages would appear in the log at every start."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    import tensorflow

    tensorflow.get_logger().setLevel("ERROR")  # it considers sessions deprecated
    return tensorflow


tf = _imported()
v1 = tf.compat.v1
config_pb2 = importlib.import_module("tensorflow.core.protobuf.config_pb2")
graph_pb2 = importlib.import_module("tensorflow.core.framework.graph_pb2")
saved_model_pb2 = importlib.import_module("tensorflow.core.protobuf.saved_model_pb2")

_FURTHER = "Original stack trace"


def engine_text(error: Exception) -> str:
    """Returns the engine's error text in one line, without the location in the program that created the graph."""
    text = str(getattr(error, "message", error))
    return " ".join(text.partition(_FURTHER)[0].split())

"""The models of `bench.peers` as functions of a batch, for servers that run Python code.

The same models as in the repository that shmserve and Triton serve: the same files, and one thread for the engine.
"""

import base64
import os

import numpy as np
from pipelines import PIPELINES

WORKLOAD = os.environ["PEER_WORKLOAD"]
BATCH = int(os.environ["PEER_BATCH"])
"""The largest batch; 1: no batching."""
WAIT_MS = 1
"""Maximum time that a batch waits for more requests: the smallest value that all servers permit."""
SHAPES = {"identity": (16,), "mlp": (256,), "cnn": (3, 224, 224), "first": (-1,)}


def make():
    """A function from a batch of inputs to their outputs."""
    if WORKLOAD == "identity":
        return lambda x: x
    if WORKLOAD == "first":
        return lambda x: x[:, :1].copy()
    if WORKLOAD in PIPELINES:
        return PIPELINES[WORKLOAD](os.path.dirname(os.environ["PEER_ONNX"]))
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(os.environ["PEER_ONNX"], options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"x": x})[0]


def decode(data):
    if WORKLOAD in PIPELINES:
        return bytes(data)
    return np.frombuffer(data, np.float32).reshape(SHAPES[WORKLOAD])


def decode_text(text):
    """The bytes of a pipeline that JSON carries."""
    return base64.b64decode(text) if WORKLOAD == "images" else text.encode()


def stacked(rows):
    if WORKLOAD in PIPELINES:
        return rows
    return rows[0][None] if len(rows) == 1 else np.stack(rows)

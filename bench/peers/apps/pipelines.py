"""The pipelines of `bench.peers`, as functions from a list of bytes to an array with a row for each: a text to its
embedding by a tokenizer and MiniLM, and a JPEG to classes by a decoder and a CNN.

This file is also a part of the `model.py` that shmserve and Triton serve.
"""

import io
import os

import numpy as np

LENGTH = 128
"""Longest text in tokens."""
SIZE = 224


def session(folder):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    path = os.path.join(folder, "model.onnx")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def texts(folder):
    from tokenizers import Tokenizer

    network, tokenizer = session(folder), Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(LENGTH)

    def run(rows):
        encoded = tokenizer.encode_batch([row.decode() for row in rows])
        ids = np.array([one.ids for one in encoded], np.int64)
        mask = np.array([one.attention_mask for one in encoded], np.int64)
        return network.run(None, {"input_ids": ids, "attention_mask": mask})[0]

    return run


def images(folder):
    from PIL import Image

    network = session(folder)

    def pixels(data):
        image = Image.open(io.BytesIO(data)).convert("RGB").resize((SIZE, SIZE))
        return np.asarray(image, np.float32).transpose(2, 0, 1) / 255

    return lambda rows: network.run(None, {"x": np.stack([pixels(row) for row in rows])})[0]


PIPELINES = {"images": images, "texts": texts}

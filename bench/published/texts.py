"""The steps of the text pipeline, as functions that the models and the callers share, and the hand-made service that
teams move from: `python -m bench.published.texts NETWORK PORT`.

Invariant: this file imports nothing of this project, because it is also copied beside the models.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
WORDS = 1000
LENGTH = 64
TEXTS = 64
LABELS = ("negative", "neutral", "positive")
WORD = [f"w{number}" for number in range(WORDS)]
KNOWN = {word: number for number, word in enumerate(WORD)}


def some_texts() -> Array:
    words = np.random.default_rng(0).integers(0, WORDS, (TEXTS, LENGTH - 4))
    return np.array([[" ".join(WORD[word] for word in row).encode()] for row in words], object)


def tokens_fast(texts: list[str]) -> tuple[Array, Array]:
    from tokenizers import Tokenizer, models as kinds, pre_tokenizers  # noqa: I001 - one import of a large package

    if not _TOKENIZER:
        tokenizer = Tokenizer(kinds.WordLevel({word: number for number, word in enumerate(WORD)}, "w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.enable_padding(length=LENGTH)
        tokenizer.enable_truncation(LENGTH)
        _TOKENIZER.append(tokenizer)
    encoded = _TOKENIZER[0].encode_batch(texts)
    return np.array([one.ids for one in encoded], np.int64), np.array([one.attention_mask for one in encoded], np.int64)


_TOKENIZER: list[Any] = []
"""The tokenizer, made at the first text."""


def tokens_loop(texts: list[str]) -> tuple[Array, Array]:
    ids = np.zeros((len(texts), LENGTH), np.int64)
    mask = np.zeros_like(ids)
    for row, text in enumerate(texts):
        for place, word in enumerate(text.lower().split()[:LENGTH]):
            ids[row, place], mask[row, place] = KNOWN.get(word, 0), 1
    return ids, mask


def labels_numpy(vectors: Array) -> Array:
    names = np.array([label.encode() for label in LABELS], object)
    chosen: Array = names[np.argmax(vectors, axis=1) % len(LABELS)][:, None]
    return chosen


def labels_loop(vectors: Array) -> Array:
    chosen = []
    for vector in vectors.tolist():
        best = 0
        for place, value in enumerate(vector):
            if value > vector[best]:
                best = place
        chosen.append([LABELS[best % len(LABELS)].encode()])
    return np.array(chosen, object)


def serve(network: str, port: int) -> None:
    """A service as teams write it with Flask: a thread per connection, JSON, a slow tokenizer, one text at a time."""
    import onnxruntime
    from flask import Flask, request
    from werkzeug.serving import make_server

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(network, options)
    app = Flask(__name__)

    @app.post("/")
    def labels() -> dict[str, list[str]]:
        results = []
        for text in request.get_json()["texts"]:
            ids, mask = tokens_loop([text])
            (vector,) = session.run(["text"], {"input_ids": ids, "attention_mask": mask})
            results.append(labels_loop(vector)[0, 0].decode())
        return {"labels": results}

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", port, app, threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))

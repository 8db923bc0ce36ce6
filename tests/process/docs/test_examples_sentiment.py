"""The sentiment samples: the label of a text, and its score from the weights of its words."""

from __future__ import annotations

import numpy as np
import pytest

import shmserve

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.process

SAMPLES = ("sentiment",)
TEXTS = {
    "The tea was excellent, and the staff friendly.": ("positive", 4),
    "It was not good. Not good at all!": ("negative", 4),
    "Nothing wrong with it; it isn't bad": ("positive", 4),
    "We sat at a table by the window": ("neutral", 0),
    "": ("neutral", 0),
    "GOOD bad": ("neutral", 0),
    "Terrible service, slow and rude, but a nice view": ("negative", 5),
    "w\u00f6rds we don't know \u2014 \U0001f600": ("neutral", 0),
    "It works": ("positive", 1),
    " ".join(["so"] * 32 + ["terrible"]): ("neutral", 0),  # only 32 words count
}
"""Text -> its label, and the sum of the weights of its words."""


def column(*texts: str) -> np.ndarray[tuple[int, ...], np.dtype[np.object_]]:
    return np.array([[text.encode()] for text in texts], np.object_)


def test_labels_and_scores(client: shmserve.Client) -> None:
    labels = [label for label, _ in TEXTS.values()]
    powers = np.exp([[0.8, total, -total] for _, total in TEXTS.values()])
    scores = powers.max(1) / powers.sum(1)
    found = client.infer("sentiment", {"TEXT": column(*TEXTS)})
    assert [label.decode() for label in found["LABEL"][:, 0]] == labels
    np.testing.assert_allclose(found["SCORE"][:, 0], scores, rtol=1e-5)
    only = client.infer("sentiment", {"TEXT": column("Awful!")}, outputs=["LABEL"])
    assert {name: value.tolist() for name, value in only.items()} == {"LABEL": [[b"negative"]]}
    words = client.infer("sentiment_tokenizer", {"TEXT": column(*TEXTS)})["WORDS"]
    assert words.shape == (len(TEXTS), 32)
    best = client.infer("sentiment_classifier", {"WORDS": words}, outputs={"SCORES": shmserve.TopK(1)})["SCORES"]
    assert [text.decode().rpartition(":")[2] for text in best[:, 0]] == labels

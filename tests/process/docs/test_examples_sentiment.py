"""The sentiment samples: the words of a text, their weights, and the resulting label.

The oracle sums the weights of the word list that the classifier was made from.
"""

from __future__ import annotations

import re
import runpy

import numpy as np
import pytest

import shmserve
from shmserve.repo import samples
from shmserve.testing import Server

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.process

SAMPLES = ("sentiment",)
LABELS = ["negative", "neutral", "positive"]
TEXTS = {
    "The tea was excellent, and the staff friendly.": "positive",
    "It was not good. Not good at all!": "negative",
    "Nothing wrong with it; it isn't bad": "positive",
    "We sat at a table by the window": "neutral",
    "": "neutral",
    "GOOD bad": "neutral",
    "Terrible service, slow and rude, but a nice view": "negative",
    "w\u00f6rds we don't know \u2014 \U0001f600": "neutral",
    "It works": "positive",
    " ".join(["so"] * 32 + ["terrible"]): "neutral",
}


@pytest.fixture(scope="module")
def weights() -> dict[str, float]:
    pytest.importorskip("onnx")
    words: dict[str, float] = runpy.run_path(str(samples.EXAMPLES / "make_models.py"))["words"]()
    return words


def by_hand(text: str, weights: dict[str, float]) -> tuple[str, float]:
    words = re.findall(r"[a-z']+", text.lower())[:32]
    total = 0.0
    for before, word in zip(["", *words], words, strict=False):
        turned = weights.get(before) == 0  # only words that negate the next one have weight 0
        total += -weights.get(word, 0) if turned else weights.get(word, 0)
    powers = np.exp([-total, 0.8, total])
    return LABELS[int(powers.argmax())], float(powers.max() / powers.sum())


def column(*texts: str) -> np.ndarray[tuple[int, ...], np.dtype[np.object_]]:
    return np.array([[text.encode()] for text in texts], np.object_)


def test_step_by_step(client: shmserve.Client, weights: dict[str, float]) -> None:
    words = client.infer("sentiment_tokenizer", {"TEXT": column(*TEXTS)})["WORDS"]
    assert words.shape == (len(TEXTS), 32)
    scores = client.infer("sentiment_classifier", {"WORDS": words})["SCORES"]
    answer = client.infer("sentiment_labels", {"SCORES": scores})
    best = client.infer("sentiment_classifier", {"WORDS": words}, outputs={"SCORES": shmserve.TopK(1)})["SCORES"]
    found = [label.decode() for label in answer["LABEL"][:, 0]]
    assert found == list(TEXTS.values())
    assert [text.decode().rpartition(":")[2] for text in best[:, 0]] == found
    expected = [by_hand(text, weights) for text in TEXTS]
    assert found == [label for label, _ in expected]
    np.testing.assert_allclose(answer["SCORE"][:, 0], [score for _, score in expected], rtol=1e-5)


def test_the_ensemble(client: shmserve.Client, weights: dict[str, float]) -> None:
    found = client.infer("sentiment", {"TEXT": column(*TEXTS)})
    assert [label.decode() for label in found["LABEL"][:, 0]] == list(TEXTS.values())
    expected = [by_hand(text, weights)[1] for text in TEXTS]
    np.testing.assert_allclose(found["SCORE"][:, 0], expected, rtol=1e-5)
    only = client.infer("sentiment", {"TEXT": column("Awful!")}, outputs=["LABEL"])
    assert {name: value.tolist() for name, value in only.items()} == {"LABEL": [[b"negative"]]}


def test_concurrent_requests_to_the_ensemble_and_to_a_step(client: shmserve.Client, server: Server) -> None:
    words = np.zeros((1, 32), np.int64)
    texts = [text for text in TEXTS for _ in range(8)]
    with server.client() as other:
        direct = [other.submit("sentiment_classifier", {"WORDS": words}) for _ in texts]
        futures = [client.submit("sentiment", {"TEXT": column(text)}) for text in texts]
        assert [future.result()["LABEL"][0, 0].decode() for future in futures] == [TEXTS[text] for text in texts]
        neutral = np.exp([0, 0.8, 0])
        for future in direct:
            np.testing.assert_allclose(future.result()["SCORES"][0], neutral / neutral.sum(), rtol=1e-5)

"""The sentiment samples: a text's words, their weights, and the name of what they come to.

The rule of the file: the oracle weighs the words by hand, from the list that the classifier was made of.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator

import numpy as np
import pytest

import shmserve
from shmserve.repo import samples
from shmserve.testing import Server

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.process

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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("models")
    assert samples.build(repository, lambda text: None, ["sentiment"]) == list(samples.SETS["sentiment"])
    with Server(repository) as running:
        yield running


def by_hand(text: str, weights: dict[str, float]) -> tuple[str, float]:
    words = re.findall(r"[a-z']+", text.lower())[:32]
    total = 0.0
    for before, word in zip(["", *words], words, strict=False):
        turned = weights.get(before) == 0  # only words that turn the next one round weigh nothing
        total += -weights.get(word, 0) if turned else weights.get(word, 0)
    powers = np.exp([-total, 0.8, total])
    return LABELS[int(powers.argmax())], float(powers.max() / powers.sum())


def column(*texts: str) -> np.ndarray[tuple[int, ...], np.dtype[np.object_]]:
    return np.array([[text.encode()] for text in texts], np.object_)


def test_step_by_step(server: Server, weights: dict[str, float]) -> None:
    with server.client() as client:
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

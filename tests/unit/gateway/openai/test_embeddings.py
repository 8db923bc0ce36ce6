"""Embeddings: vectors of all float types, texts sent in portions, and cancellation."""

from __future__ import annotations

import base64
import json
from math import prod
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.errors import ModelFailed
from shmserve.gateway.kserve.answers import Held
from shmserve.gateway.openai import bodies
from shmserve.gateway.openai.collection import AT_ONCE
from shmserve.gateway.openai.embeddings import Embeddings
from shmserve.gateway.openai.errors import BadParameter
from shmserve.gateway.openai.models import EmbeddingModel, embedding_model
from shmserve.protocol.messages import Handle, Reply, Tensor
from tests.support.cases import cases
from tests.support.gateway.openai_caller import OpenAiCaller

MODEL = embedding_model("m", {
    "max_batch_size": 8,
    "input": [{"name": "text", "data_type": "TYPE_STRING", "dims": ["1"]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": ["-1"]},
               {"name": "num_input_tokens", "data_type": "TYPE_UINT32", "dims": ["1"]}],
})  # fmt: skip


def begun(client: OpenAiCaller, texts: list[str], model: EmbeddingModel = MODEL, **more: Any) -> None:
    request = bodies.embedding(json.dumps({"model": "name", "input": texts, **more}).encode())
    connection: Any = client
    Embeddings(connection, connection, model, request, texts).begin()


def reply(values: Any, dtype: str = "FP32", shape: tuple[int, ...] | None = None, tokens: int | None = None) -> Reply:
    data = values if isinstance(values, bytes) else np.array(values, np.float32).tobytes()
    outputs = [Tensor("y", dtype, (1, len(data) // 4) if shape is None else shape, data)]
    if tokens is not None:
        outputs.append(Tensor("num_input_tokens", "UINT32", (1, 1), tokens.to_bytes(4, "little")))
    return Reply(1, 1, tuple(outputs))


def test_vectors_in_any_order() -> None:
    client = OpenAiCaller()
    begun(client, ["a", "b", "c"])
    for number in (2, 0, 1):
        assert client.answered is None
        client.tickets[number].settle(reply([number, 0.1], tokens=number))
    assert client.answered == {
        "object": "list",
        "data": [{"object": "embedding", "index": n, "embedding": [n, float(np.float32(0.1))]} for n in range(3)],
        "model": "name",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }


@pytest.mark.parametrize("dtype", ["FP16", "BF16", "FP32", "FP64"])
def test_vectors_of_all_float_types_are_converted(dtype: str) -> None:
    values = np.array([1, -0.5, 2.25], np.float32)
    kinds: dict[str, Any] = {"FP16": np.float16, "FP32": np.float32, "FP64": np.float64}
    raw = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "BF16" else values.astype(kinds[dtype])
    client = OpenAiCaller()
    begun(client, ["a", "b"], encoding_format="base64")
    client.tickets[0].settle(reply(raw.tobytes(), dtype, (1, 1, 3)))
    data = raw.tobytes()
    held = Reply(1, 1, (Tensor("y", dtype, (3,), (Handle(1, 0, 4), Handle(1, 64, len(data) - 4))),))
    client.tickets[1].settle(Held(held, [[memoryview(data[:4]), memoryview(data[4:])]]))
    for one in client.answered["data"]:
        assert np.array_equal(np.frombuffer(base64.b64decode(one["embedding"]), "<f4"), values)


def test_dimensions() -> None:
    client = OpenAiCaller()
    begun(client, ["a", "b"], dimensions=2)
    client.tickets[0].settle(reply([3, 4, 12]))
    client.tickets[1].settle(reply([0, 0, 1]))
    vectors = [one["embedding"] for one in client.answered["data"]]
    assert vectors == [pytest.approx([0.6, 0.8]), [0, 0]]
    begun(client, ["a"], dimensions=4)
    client.tickets[2].settle(reply([3, 4, 12]))
    assert isinstance(client.error, BadParameter)


@cases(
    (reply([1, 2], shape=(1, 2, 1)), r"the shape \[1, 2, 1\] for one text; expected one vector"),
    (reply([1], shape=()), "expected one vector"),
    (Reply(1, 1, ()), "returned no output 'y'"),
    (reply([float("nan")]), "not finite"),
    (reply([float("inf")]), "not finite"),
)
def test_invalid_outputs_are_an_error_of_the_model(answer: Reply, text: str) -> None:
    client = OpenAiCaller()
    begun(client, ["a"])
    client.tickets[0].settle(answer)
    assert client.answered is None
    with pytest.raises(ModelFailed, match=text):
        raise client.error or AssertionError


POOLED = replace(MODEL, pooling="mean")


@pytest.mark.parametrize("used", [slice(None), slice(5, 4000), slice(None, None, 1500)])
def test_the_mean_of_many_vectors_is_computed_in_slices(used: slice) -> None:
    """`used`: the tokens that are not padding."""
    client = OpenAiCaller()
    begun(client, ["a"], POOLED)
    states = np.random.default_rng(1).standard_normal((4096, 256), np.float32)
    mask = np.zeros(4096, np.int64)
    mask[used] = 1
    outputs = (
        Tensor("y", "FP32", (1, 4096, 256), states.tobytes()),
        Tensor("attention_mask", "INT64", (1, 4096), mask.tobytes()),
    )
    client.tickets[0].settle(Reply(1, 1, outputs))
    assert client.loop.run() > 1, "other clients have a turn"
    assert client.answered["data"][0]["embedding"] == pytest.approx(states[used].mean(axis=0), abs=1e-5)


@pytest.mark.parametrize("shape", [(4,), (2, 1, 2), (0, 4)])
def test_outputs_that_cannot_be_pooled(shape: tuple[int, ...]) -> None:
    client = OpenAiCaller()
    begun(client, ["a"], POOLED)
    client.tickets[0].settle(reply([0] * prod(shape), shape=shape))
    with pytest.raises(ModelFailed, match=r"expected \[tokens, dimensions\]"):
        raise client.error or AssertionError


def test_portions_and_a_failure() -> None:
    client = OpenAiCaller()
    begun(client, ["a"] * (AT_ONCE + 10))
    assert len(client.tickets) == AT_ONCE
    first, second, third, *others = client.tickets
    first.settle(reply([1]))
    second.fail(ModelFailed("no"))
    third.settle(reply([1]))
    assert len(client.tickets) == AT_ONCE + 1, "one for the first, none after the failure"
    assert client.cancelled == [third, *others, client.tickets[-1]]
    assert isinstance(client.error, ModelFailed)
    assert client.answered is None

"""Embeddings and scores of ONNX encoders with random weights, behind a real tokenizer. The oracle is numpy."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest

from shmserve.testing import Server
from tests.support.ensemble_models import BATCHES, ensemble, tensors
from tests.support.gateway.language_models import openai_client, post
from tests.support.model_files import parameters, write_model
from tests.support.optional import optional
from tests.support.shared_server import SharedServer

pytestmark = pytest.mark.process

onnx = optional("onnx")
tokenizers = optional("tokenizers")
WIDTH = 16
TEXTS = ["the cat sat on the mat", "a dog", "cats and dogs bark at the moon in the dark night of the year", "mat"]
QUERY = "where did the cat sit"
TOKENIZER = """
import os

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer


class TritonPythonModel:
    def initialize(self, args):
        folder = os.path.join(args["model_repository"], args["model_version"])
        self.tokenizer = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))

    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        given = [pb_utils.get_input_tensor_by_name(request, name) for name in ("text", "other")]
        columns = [tensor.as_numpy().ravel() for tensor in given if tensor is not None]
        rows = [tuple(text.decode() for text in row) for row in zip(*columns)]
        found = self.tokenizer.encode_batch([row if len(row) > 1 else row[0] for row in rows])
        outputs = {
            "input_ids": np.array([one.ids for one in found], np.int64),
            "attention_mask": np.array([one.attention_mask for one in found], np.int64),
            "token_type_ids": np.array([one.type_ids for one in found], np.int64),
            "num_input_tokens": np.array([[sum(one.attention_mask)] for one in found], np.uint32),
        }
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])
"""


def make_tokenizer() -> Any:
    """A WordPiece tokenizer of short words and letters, which pads texts to multiples of 8 tokens."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = {word for text in TEXTS for word in text.split() if len(word) <= 3}
    pieces = [
        *special,
        *sorted(words - set(ascii_lowercase)),
        *ascii_lowercase,
        *(f"##{one}" for one in ascii_lowercase),
    ]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, special.index(name)) for name in ("[CLS]", "[SEP]")],
    )
    made.enable_padding(pad_to_multiple_of=8)
    return made


class Network:
    """One layer of attention, as ONNX and in numpy."""

    def __init__(self, vocabulary: int) -> None:
        random = np.random.default_rng(3)
        shapes = {"words": (vocabulary, WIDTH), "kinds": (2, WIDTH), "score": (WIDTH, 1)}
        shapes |= dict.fromkeys(("query", "key", "value"), (WIDTH, WIDTH))
        self.weights = {name: random.standard_normal(shape).astype(np.float32) / 2 for name, shape in shapes.items()}

    def states(self, encoding: Any) -> Any:
        """The vectors of the tokens, those of the padding too."""
        weights = self.weights
        x = weights["words"][encoding.ids] + weights["kinds"][encoding.type_ids]
        scores = (x @ weights["query"]) @ (x @ weights["key"]).T
        scores += (1 - np.array(encoding.attention_mask, np.float32)) * -1e4
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        return np.tanh(shares / shares.sum(-1, keepdims=True) @ (x @ weights["value"]) + x)

    def score(self, encoding: Any) -> float:
        return float((self.states(encoding)[0] @ self.weights["score"])[0])

    def write(self, path: Path, scores: bool) -> None:
        helper, numpy_helper, kinds = onnx.helper, onnx.numpy_helper, onnx.TensorProto
        constants = self.weights | {
            "one": np.float32(1), "low": np.float32(-1e4), "axis": np.array([1]), "first": np.int64(0)
        }  # fmt: skip
        nodes = [
            ("Gather", ["words", "input_ids"], "w"), ("Gather", ["kinds", "token_type_ids"], "k"),
            ("Add", ["w", "k"], "x"),
            ("MatMul", ["x", "query"], "q"), ("MatMul", ["x", "key"], "s"), ("MatMul", ["x", "value"], "v"),
            ("Cast", ["attention_mask"], "m"), ("Sub", ["one", "m"], "n"), ("Mul", ["n", "low"], "b"),
            ("Unsqueeze", ["b", "axis"], "bias"), ("Transpose", ["s"], "t"), ("MatMul", ["q", "t"], "raw"),
            ("Add", ["raw", "bias"], "biased"), ("Softmax", ["biased"], "shares"), ("MatMul", ["shares", "v"], "seen"),
            ("Add", ["seen", "x"], "sum"), ("Tanh", ["sum"], "states"),
            *([("Gather", ["states", "first"], "cls"), ("MatMul", ["cls", "score"], "scores")] if scores else []),
        ]  # fmt: skip
        more = {"m": {"to": kinds.FLOAT}, "t": {"perm": [0, 2, 1]}, "cls": {"axis": 1}}
        graph = helper.make_graph(
            [helper.make_node(kind, inputs, [output], **more.get(output, {})) for kind, inputs, output in nodes],
            "encoder",
            [helper.make_tensor_value_info(name, kinds.INT64, ["rows", "length"]) for name in INPUTS],
            [helper.make_tensor_value_info(*(("scores", kinds.FLOAT, ["rows", 1]) if scores else STATES))],
            [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        onnx.checker.check_model(model)
        path.write_bytes(model.SerializeToString())


INPUTS = ("input_ids", "attention_mask", "token_type_ids")
STATES = ("states", 1, ["rows", "length", WIDTH])


class Encoders:
    """The tokenizer and the network of the models."""

    def __init__(self) -> None:
        self.tokenizer = make_tokenizer()
        self.network = Network(self.tokenizer.get_vocab_size())

    def embedding(self, text: str, pooling: str) -> Any:
        encoding = self.tokenizer.encode(text)
        states = self.network.states(encoding)[: sum(encoding.attention_mask)]
        vector = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[pooling]
        return vector / np.linalg.norm(vector)

    def score(self, query: str, document: str) -> float:
        return self.network.score(self.tokenizer.encode(query, document))

    def tokens(self, *texts: str) -> int:
        return sum(self.tokenizer.encode(*texts).attention_mask)


@pytest.fixture(scope="module", autouse=True)
def no_threads() -> Iterator[None]:
    """The threads of the tokenizer would never end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        yield


@pytest.fixture(scope="module")
def encoders(repository: Path) -> Encoders:
    made = Encoders()
    ids = [f"{name}:INT64:[-1]" for name in INPUTS]
    count = "num_input_tokens:UINT32:[1]"
    texts = tensors("text:STRING:[1]", "other:STRING:[1]:optional: true")
    config = f'backend: "python" max_batch_size: 8 input {texts} output {tensors(*ids, count)}'
    write_model(repository, "tokens", config, TOKENIZER)
    made.tokenizer.save(str(repository / "tokens" / "1" / "tokenizer.json"))
    for name, output in (("states", f"states:FP32:[-1,{WIDTH}]"), ("scores", "scores:FP32:[1]")):
        write_model(
            repository, name, f'backend: "onnxruntime" {BATCHES} input {tensors(*ids)} output {tensors(output)}'
        )
        made.network.write(repository / name / "1" / "model.onnx", name == "scores")
    mapped = ",".join(f"{name}:{name}" for name in INPUTS)
    tokenized = f"({mapped},num_input_tokens:num_input_tokens)"
    outputs = f"states:FP32:[-1,{WIDTH}] attention_mask:INT64:[-1] {count}"
    for pooling in ("mean", "cls", "last"):
        more = f"max_batch_size: 8 {parameters(embedding_pooling=pooling)}"
        steps = (f"tokens(text:text)->{tokenized}", f"states({mapped})->(states:states)")
        ensemble(repository, f"embed-{pooling}", "text:STRING:[1]", outputs, *steps, more=more)
    steps = (f"tokens(text:query,other:document)->{tokenized}", f"scores({mapped})->(scores:score)")
    pair = "query:STRING:[1] document:STRING:[1]"
    ensemble(repository, "cross", pair, f"score:FP32:[1] {count}", *steps, more="max_batch_size: 8")
    return made


@pytest.fixture(scope="module")
def server(shared_server: SharedServer, repository: Path, encoders: Encoders) -> Iterator[Server]:
    with shared_server.serving(repository) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with openai_client(server.endpoints["http"]) as made:
        yield made


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_embeddings(client: Any, encoders: Encoders, pooling: str) -> None:
    expected = np.array([encoders.embedding(text, pooling) for text in TEXTS])
    model = f"embed-{pooling}"
    found = client.embeddings.create(model=model, input=TEXTS, encoding_format="float")
    np.testing.assert_allclose([one.embedding for one in found.data], expected, atol=1e-5)
    assert found.usage.prompt_tokens == sum(encoders.tokens(text) for text in TEXTS)
    raw = post(client, "/v1/embeddings", model=model, input=TEXTS, encoding_format="base64")
    packed = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in raw["data"]]
    np.testing.assert_allclose(packed, expected, atol=1e-5)
    cut = client.embeddings.create(model=model, input=TEXTS, dimensions=5)
    shortened = expected[:, :5] / np.linalg.norm(expected[:, :5], axis=1, keepdims=True)
    np.testing.assert_allclose([one.embedding for one in cut.data], shortened, atol=1e-5)


def test_scores(client: Any, encoders: Encoders) -> None:
    expected = [encoders.score(QUERY, text) for text in TEXTS]
    found = post(client, "/v1/score", model="cross", text_1=QUERY, text_2=TEXTS)
    np.testing.assert_allclose([one["score"] for one in found["data"]], expected, atol=1e-5)
    assert found["usage"]["total_tokens"] == sum(encoders.tokens(QUERY, text) for text in TEXTS)
    pairs = post(client, "/v1/score", model="cross", text_1=TEXTS, text_2=TEXTS[::-1])
    crossed = [encoders.score(*pair) for pair in zip(TEXTS, TEXTS[::-1], strict=True)]
    np.testing.assert_allclose([one["score"] for one in pairs["data"]], crossed, atol=1e-5)


def test_ranks(client: Any, encoders: Encoders) -> None:
    expected = np.array([encoders.score(QUERY, text) for text in TEXTS])
    found = post(client, "/v1/rerank", model="cross", query=QUERY, documents=TEXTS, top_n=3)
    order = np.argsort(-expected)[:3].tolist()
    assert [one["index"] for one in found["results"]] == order
    assert [one["document"]["text"] for one in found["results"]] == [TEXTS[index] for index in order]
    np.testing.assert_allclose([one["relevance_score"] for one in found["results"]], expected[order], atol=1e-5)

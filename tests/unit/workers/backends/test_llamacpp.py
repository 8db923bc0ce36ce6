"""Language models without their engine: headers of files, sampling parameters, and pieces that become responses."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from shmserve.errors import InvalidRequest, ModelFailed, ServeError, Unavailable, Unsupported
from shmserve.protocol.worker_messages import Work
from shmserve.repo.files.gguf import chat_template, recommended_sampling, trained_context
from shmserve.repo.load import parse
from shmserve.workers.backends.base import Context
from shmserve.workers.backends.language.engine import EngineLimits, Listener, Step
from shmserve.workers.backends.language.replies import GenerationReply
from shmserve.workers.backends.language.requests import RETURNED, GenerationRequest, generation_of
from shmserve.workers.backends.language.sampling import Defaults, SamplingParameters, defaults_of, merged, sampling_in
from shmserve.workers.backends.llamacpp.parameters import UNSUPPORTED, cut, engine_parameters
from shmserve.workers.backends.llamacpp.pieces import Pieces
from shmserve.workers.backends.llamacpp.settings import LlamaCppSettings
from shmserve.workers.model_calls.answer import Request
from shmserve.workers.model_calls.coroutines import Coroutines
from tests.support.cases import cases
from tests.support.model_files import parameters
from tests.support.workers.models import gguf_models


def test_a_text_is_cut_before_the_mark_of_its_end() -> None:
    assert cut([1, 5, 6, 7], [5, 6, 7], 2) == [1, 5]
    assert cut([1, 5, 6, 7, 2], [5, 6, 7], 3) == [1, 5, 2]
    assert cut([1, 2], [], 1) == [2]


def test_the_header_of_a_file(tmp_path: Path) -> None:
    file = gguf_models.write(tmp_path / "model.gguf", context=1234, top_k=9)
    assert trained_context(file) == 1234
    assert recommended_sampling(file) == {"top_k": 9}
    assert chat_template(file) == gguf_models.TEMPLATE
    data = file.read_bytes()
    file.write_bytes(data.replace(b"llama.context_length", b"llama.context_lenght"))
    assert trained_context(file) == 0, "the whole header was read"
    for wrong, words in (
        (b"", "it does not begin with 'GGUF'"),
        (data[:60], "its header is damaged or cut off"),
        (data[:4] + b"\x09" + data[5:], "its version is 9"),
        (data[:24] + b"\xff" * 8 + data[32:], "it has a name of 18446744073709551615 bytes"),
        (data.replace(b"general.architecture", b"general.architektur_"), "it does not name an architecture"),
        (with_value(9, struct.pack("<IQ", 0, 2**63 - 50)), "it has a value of 9223372036854775758 bytes"),
        (with_value(9, struct.pack("<IQ", 10, 2**63)), "it has a value of 73786976294838206464 bytes"),
        (with_value(8, struct.pack("<Q", 2**64 - 1)), "it has a value of 18446744073709551615 bytes"),
        (with_value(9, struct.pack("<IQ", 9, 1) * 2000), "its header is damaged or cut off"),
        (with_value(99, b""), "its header is damaged or cut off"),
    ):
        file.write_bytes(wrong)
        with pytest.raises(InvalidRequest, match=f"model.gguf is not a GGUF file that llama.cpp can run: {words}"):
            trained_context(file)


def with_value(kind: int, value: bytes) -> bytes:
    """A file whose first key has this value."""
    return struct.pack("<4sIQQQ3sI", b"GGUF", 3, 0, 1, 3, b"key", kind) + value


@cases(
    ({}, {"temperature": 1.0, "top_k": 0, "max_tokens": -1}),
    (
        {"temperature": "0.5", "top_k": -1, "ignore_eos": "true"},
        {"temperature": 0.5, "top_k": 0, "ignore_eos": True},
    ),
    ({"repetition_penalty": 1.5, "max_tokens": 7}, {"repeat_penalty": 1.5, "max_tokens": 7}),
    ({"max_tokens": None, "stop": None, "seed": None, "logprobs": None}, {"max_tokens": -1}),
    ({"stop": "a"}, {"stop": ["a"]}),
    ({"stop": ["a", "", "b"], "seed": -1}, {"stop": ["a", "b"], "seed": 0x7FFFFFFF}),
    ({"logit_bias": '{"5": -1}'}, {"logit_bias": [[5, -1.0]]}),
    ({"structured_outputs": '{"json": "{\\"type\\": \\"array\\"}"}'}, {"json_schema": {"type": "array"}}),
    ({"structured_outputs": {"json_object": True, "json": None}}, {"json_schema": {"type": "object"}}),
    ({"structured_outputs": {"choice": ["a", 'b"']}}, {"grammar": 'root ::= "a" | "b\\""'}),
    ({"dry_multiplier": 0.8, "repeat_last_n": "9"}, {"dry_multiplier": 0.8, "repeat_last_n": 9}),
    ({"min_tokens": 0, "skip_special_tokens": True, "stop_token_ids": []}, {"max_tokens": -1}),
)
def test_sampling_parameters_for_the_engine(given: dict[str, Any], expected: dict[str, Any]) -> None:
    found = engine_parameters(sampling_in(json.dumps(given)), Defaults())
    assert expected.items() <= found.items()
    neutral = engine_parameters(SamplingParameters(), Defaults())
    assert {name: value for name, value in found.items() if name not in expected} == {
        name: value for name, value in neutral.items() if name not in expected
    }


@cases(
    ("[]", InvalidRequest, "is not a JSON object"),
    ("{", InvalidRequest, "is not JSON"),
    ("[" * 100_000, InvalidRequest, "is not JSON"),
    ('{"logprobs": 21}', InvalidRequest, "logprobs"),
    ('{"n": 0}', InvalidRequest, "n`"),
    ('{"top_p": 0}', InvalidRequest, "top_p"),
    ('{"temperature": "hot"}', InvalidRequest, "temperature"),
    ('{"repeat_last_n": 2000000}', InvalidRequest, "repeat_last_n"),
    ('{"dry_penalty_last_n": -1}', InvalidRequest, "dry_penalty_last_n"),  # which the engine refuses
    ('{"n": 2, "best_of": 3}', Unsupported, "best_of"),
    ('{"bad_words": ["a"]}', Unsupported, "no 'bad_words'"),
    ('{"logit_bias": {"a": 1}}', InvalidRequest, "ids of tokens, not 'a'"),
    ('{"structured_outputs": {"regex": "a"}}', Unsupported, "with 'regex' is not supported"),
    ('{"structured_outputs": {"json": {}, "choice": ["a"]}}', InvalidRequest, "must have one of"),
)
def test_sampling_parameters_that_are_refused(text: str, kind: type[ServeError], words: str) -> None:
    with pytest.raises(kind, match=words):
        engine_parameters(sampling_of_model(text), Defaults())


def sampling_of_model(text: str) -> SamplingParameters:
    """The defaults of a model with this text."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    config = parse(f'name: "m" {parameters(sampling_parameters=escaped)}')
    return defaults_of(config, UNSUPPORTED).sampling


def test_a_request_overrides_the_defaults_of_its_model() -> None:
    both = merged(sampling_in('{"temperature": 0.2, "top_p": 0.9}'), sampling_in('{"temperature": 1}'))
    assert (both.temperature, both.top_p) == (1, 0.9)


def test_a_request_without_a_prompt_or_a_chat_is_refused() -> None:
    """The configuration may make the input optional, for chats."""
    with pytest.raises(InvalidRequest, match="input 'text_input' is empty; give a prompt"):
        generation_of({"text_input": None}, {}, Defaults(), 1)


def piece(index: int = 0, text: str = "", finish: str | None = None, **more: Any) -> bytes:
    return json.dumps({"choices": [{"index": index, "text": text, "finish_reason": finish, **more}]}).encode()


def chat(**delta: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode()


class Replying:
    """A reply that is made from pieces of the engine."""

    def __init__(self, count: int = 1, stream: bool = True, prefix: str = "") -> None:
        self.pieces = Pieces(0, count)
        self.reply = GenerationReply(
            GenerationRequest(SamplingParameters(), count, stream, tuple(RETURNED.values()), prefix=prefix), []
        )

    def add(self, data: bytes) -> bool:
        return True in [self.reply.add(step) for step in self.pieces.steps(data)]

    def outputs(self) -> dict[str, Any]:
        return {name: array.tolist() for name, array in self.reply.outputs()}


def end(index: int, tokens: int, finish: str = "stop") -> bytes:
    given = json.loads(piece(index, finish=finish))
    return json.dumps(given | {"timings": {"prompt_n": 3, "cache_n": 2, "predicted_n": tokens}}).encode()


def test_unsent_pieces_are_joined_with_the_next_one() -> None:
    """As for a caller that reads slowly."""
    made = Replying()
    assert not made.add(b'{"choices": [{}], "prompt_progress": {"total": 5, "processed": 5}}')
    for text in "ab":
        assert made.add(piece(text=text))
    found = made.outputs()
    assert (found["text_output"], found["num_output_tokens"], found["num_input_tokens"]) == (["ab"], [2], [5])
    assert found["finish_reason"] == ["None"]
    assert made.add(piece(text="c"))
    assert made.add(end(0, 4))
    assert made.reply.complete
    found = made.outputs()
    assert (found["text_output"], found["num_output_tokens"], found["finish_reason"]) == (["c"], [2], ["stop"])


def test_texts_of_one_request_may_end_at_different_times() -> None:
    made = Replying(count=2, stream=False, prefix="> ")
    due = [made.add(data) for data in (piece(1, "a"), piece(0, "b"), end(1, 1, "length"), piece(0, "c"))]
    assert due == [False] * 4
    assert made.add(end(0, 2))
    found = made.outputs()
    assert (found["text_output"], found["finish_reason"]) == (["> bc", "> a"], ["stop", "length"])
    assert (found["num_output_tokens"], found["num_input_tokens"]) == ([2, 1], [5])
    assert found["num_cached_tokens"] == [2]


def test_tool_calls_are_put_together() -> None:
    begin = {"index": 0, "id": "x", "type": "function", "function": {"name": "weather", "arguments": ""}}
    pieces = [
        [begin],
        [{"index": 0, "function": {"arguments": '{"city":'}}],
        [{"index": 0, "function": {"arguments": '"P"}'}}],
    ]
    made = Replying()
    assert not made.add(chat(role="assistant", content=None))
    assert made.add(chat(tool_calls=pieces[0]))
    assert json.loads(made.outputs()["tool_calls"][0]) == [begin]
    for more in pieces[1:]:
        assert made.add(chat(tool_calls=more))
    (call,) = json.loads(made.outputs()["tool_calls"][0])
    assert call == {"index": 0, "function": {"arguments": '{"city":"P"}'}}
    made = Replying(stream=False)
    for part in pieces:
        made.add(chat(tool_calls=part))
    made.add(end(0, 9, "tool_calls"))
    (call,) = json.loads(made.outputs()["tool_calls"][0])
    assert call["function"] == {"name": "weather", "arguments": '{"city":"P"}'}


@cases(
    ({"code": 400, "message": "no"}, InvalidRequest),
    ({"code": 400, "message": "no", "type": "exceed_context_size_error"}, InvalidRequest),
    ({"code": 503, "message": "no"}, Unavailable),
    ({"code": 500, "message": "no"}, ModelFailed),
)
def test_errors_of_the_engine(error: dict[str, Any], kind: type[ServeError]) -> None:
    with pytest.raises(kind, match="no"):
        Pieces(0, 1).steps(json.dumps({"error": error}).encode())
    with pytest.raises(ModelFailed, match="cannot be read"):
        Pieces(0, 1).steps(b"[]")


@cases(
    (parameters(pooling="max"), "must be one of mean, cls, last, rank, not 'max'"),
    (
        parameters(pooling="rank") + 'input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }',
        "query, document",
    ),
    (parameters(pooling="mean") + 'output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }', "outputs embedding and"),
)
def test_encoders_with_other_tensors_or_poolings_are_refused(config: str, text: str, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    from shmserve.workers.backends.llamacpp.backend import LlamaCpp

    (tmp_path / "1").mkdir()
    gguf_models.write(tmp_path / "1" / "model.gguf")
    given = parse(f'name: "m" backend: "llamacpp" {config}')
    made = LlamaCpp.chosen(given)(Context("m", 1, "m_0", tmp_path, tmp_path / "1", {}))
    with pytest.raises(InvalidRequest, match=text):
        made.load(made.complete(given))
    made.close()


class InstantEngine:
    """An engine that ends each text at once."""

    coroutines = None

    def __init__(self, settings: LlamaCppSettings) -> None:
        self.limits = EngineLimits(settings.slots, settings.context, settings.context)

    def prepared(self, generation: GenerationRequest) -> Callable[[Listener], None]:
        return self.run

    def run(self, listener: Listener) -> None:
        listener.step([Step(generated=1, finish="stop")])

    def close(self) -> None: ...


class LoopEngine(InstantEngine):
    """The same with a loop, in which each request waits once."""

    def __init__(self, settings: LlamaCppSettings) -> None:
        super().__init__(settings)
        self.coroutines = Coroutines()  # type: ignore[assignment]
        self.log: list[str] = []

    async def run(self, listener: Listener) -> None:  # type: ignore[override]
        self.log.append("begun")
        await asyncio.sleep(0)
        self.log.append("ended")
        super().run(listener)


def loaded(kind: type[InstantEngine], slots: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A model with this engine, and a function that makes its requests."""
    pytest.importorskip("xllamacpp")
    from shmserve.workers.backends.llamacpp import backend

    monkeypatch.setattr(backend, "LlamaCppEngine", kind)
    (folder / "1").mkdir()
    gguf_models.write(folder / "1" / "model.gguf")
    loader = backend.LlamaCpp(Context("m", 1, "m_0", folder, folder / "1", {}))
    config = loader.complete(parse(f'name: "m" backend: "llamacpp" {parameters(slots=str(slots))}'))
    made = loader.load(config)
    arrays = [np.array([b"a"], object), *[None] * (len(config.input) - 1)]
    return made, lambda number: Request(Work(number, 0, (), None, ""), arrays, Mock())


def test_requests_of_a_batch_join_the_loop_of_the_engine_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, request = loaded(LoopEngine, 2, tmp_path, monkeypatch)
    here, there = socket.socketpair()
    made.streams.listen(here.fileno(), lambda: None, deque(), lambda: None)
    assert made.execute([request(number) for number in (1, 2, 3)]) == [None] * 3
    engine = made._engine  # noqa: SLF001 - it is ours
    assert engine.log == ["begun", "begun", "ended", "ended", "begun", "ended"]
    made.close()
    engine.coroutines.close()
    here.close()
    there.close()


def test_a_thread_that_cannot_start_gives_its_slot_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = loaded(InstantEngine, 1, tmp_path, monkeypatch)
    request = make(1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        (failed,) = made.execute([request])
    assert failed is not None
    assert failed.error is not None
    assert "can't start new thread" in failed.error.text
    assert made.execute([request]) == [None]
    made.close()

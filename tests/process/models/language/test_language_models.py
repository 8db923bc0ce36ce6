"""Language models in GGUF files through a real server. The oracle is the bare engine (`llm_oracle`)."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.errors import InvalidRequest, ServeError
from shmserve.testing import Server
from shmserve.workers.backends.language import requests
from tests.process.models.language import llm_oracle
from tests.support.living import pids, until
from tests.support.model_files import parameters
from tests.support.workers.models import gguf_models

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed"),
]

PROMPTS = [f"{number}: prompt {'abc' * number}" for number in range(32)]
TOKENS = 24
CONTEXT = 1024
ENDLESS = 1 << 17
"""Context size of the model `one`. Filling it takes minutes, so a response after a long request shows that the long one
has ended."""
PATIENCE_S = 40.0


class Text:
    """A server with language models, and the bare engine's continuations of PROMPTS."""

    def __init__(self, server: Server, client: shmserve.Client, expected: Mapping[str, str]) -> None:
        self.server, self.client, self.expected = server, client, expected

    def stream(
        self, prompt: str, model: str = "text", *, sampling: Mapping[str, Any] | None = None, **more: Any
    ) -> shmserve.Stream:
        """`more`: inputs, `timeout` and `window`."""
        options = {name: more.pop(name) for name in ("timeout", "window") if name in more}
        given = {"text_input": prompt, "stream": True, **more}
        given["sampling_parameters"] = json.dumps({"temperature": 0, "max_tokens": TOKENS, **(sampling or {})})
        return self.client.stream(model, tensors(given), **{"timeout": PATIENCE_S, **options})

    def complete(self, prompt: str, model: str = "text", **more: Any) -> shmserve.Result:
        """The only response of a request that does not stream."""
        (found,) = self.stream(prompt, model, **{"stream": False, "exclude_input_in_output": True, **more})
        return found


def tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    """Converts values of inputs to arrays of one element."""
    return {
        name: np.array([value], object if isinstance(value, str) else None) if np.isscalar(value) else value
        for name, value in values.items()
    }


def said(stream: Iterator[shmserve.Result]) -> str:
    return "".join(text_of(part) for part in stream)


def text_of(part: shmserve.Result) -> str:
    (text,) = part["text_output"]
    return str(text.decode())


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, str]]]:
    root = tmp_path_factory.mktemp("repository")
    settings = {
        "text": {"slots": "8", "context_length": str(CONTEXT), "threads": "1"},
        "one": {"slots": "1", "context_length": str(ENDLESS), "threads": "1", "grammars": "true"},
    }
    for name, own in settings.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text('backend: "llamacpp"\n' + parameters(**own))
        gguf_models.write(root / name / "1" / "model.gguf", context=ENDLESS)
    given = [{"prompt": prompt, "max_tokens": TOKENS, "temperature": 0} for prompt in PROMPTS]
    found = llm_oracle.texts(root / "text" / "1" / "model.gguf", given)
    assert len(set(found)) == len(PROMPTS), "the network tells prompts apart"
    with Server(root, gateway=True) as server:
        yield server, dict(zip(PROMPTS, found, strict=True))


@pytest.fixture
def text(serving: tuple[Server, dict[str, str]]) -> Iterator[Text]:
    with serving[0].client() as client:
        yield Text(serving[0], client, serving[1])


# ---------------------------------------------------------------------------------------------- what is generated


def test_generated_texts_equal_those_of_the_engine(text: Text) -> None:
    config = text.client.config("text")
    assert [entry["name"] for entry in config["input"]][:3] == ["text_input", "prompt_token_ids", "messages"]
    assert config["model_transaction_policy"] == {"decoupled": True}
    prompt = PROMPTS[3]
    assert said(text.stream(prompt)) == text.expected[prompt]
    assert text_of(text.complete(prompt)) == text.expected[prompt]
    (whole,) = text.client.stream("text", tensors({"text_input": prompt}), parameters={"temperature": "0.0"})
    assert whole.keys() == {"text_output"}
    assert text_of(whole) == prompt + text.expected[prompt][:16], "as in vLLM: the prompt, and 16 tokens"


def test_requested_outputs_are_returned(text: Text) -> None:
    asked: dict[str, Any] = dict.fromkeys(requests.RETURNED, True)
    prompt = PROMPTS[1]
    parts = list(text.stream(prompt, sampling={"logprobs": 2}, **asked))
    assert [part["finish_reason"].tolist() for part in parts] == [[b"None"]] * (len(parts) - 1) + [[b"length"]]
    assert sum(part["num_output_tokens"].item() for part in parts) == TOKENS
    assert {part["num_input_tokens"].item() for part in parts} == {len(prompt) + 2}, "a token begins it, and a space"
    tokens = [token for part in parts for token in json.loads(part["token_ids"][0])]
    scores = [score for part in parts for score in json.loads(part["logprobs"][0])]
    assert len(tokens) == len(scores) == TOKENS
    assert (
        "".join(score[str(token)]["decoded_token"] for token, score in zip(tokens, scores, strict=True))
        == (text.expected[prompt])
    )
    assert {score[str(token)]["rank"] for token, score in zip(tokens, scores, strict=True)} == {1}
    assert {len(score) for score in scores} == {2}
    total = sum(score[str(token)]["logprob"] for token, score in zip(tokens, scores, strict=True))
    assert parts[-1]["cumulative_logprob"].item() == pytest.approx(total, rel=1e-4)
    ids = np.array([1, *tokens[:4]], np.uint32)
    again = text.complete("", prompt_token_ids=ids, return_num_input_tokens=True)
    assert again["num_input_tokens"].item() == 5


def test_sampling_parameters(text: Text) -> None:
    prompt = PROMPTS[2]
    expected = text.expected[prompt]

    def drawn(**sampling: Any) -> list[str]:
        found = text.complete(prompt, sampling={"temperature": 1, **sampling})
        return [one.decode(errors="replace") for one in found["text_output"]]

    assert drawn(seed=7) == drawn(seed=7)
    assert drawn(seed=7) != drawn(seed=8)
    assert drawn(seed=7, top_k=1) == [expected]
    assert drawn(seed="7", top_k="1", max_tokens="5") == [expected[:5]], "the string map of vLLM's backend"
    several = drawn(n=3, seed=3)
    assert len(set(several)) == 3
    stop = expected[8:10]
    assert drawn(top_k=1, stop=stop) == [expected[: expected.index(stop)]]
    (banned,) = drawn(top_k=1, logit_bias={"260": -100.0, str(3 + 256 + ord(expected[0]) - 0x20): -100.0})
    assert banned[0] != expected[0]
    assert drawn(structured_outputs={"choice": ["yes", "no"]})[0] in ("yes", "no")
    found = text.complete(prompt, sampling={"stop": [stop]}, return_finish_reason=True)
    assert found["finish_reason"].tolist() == [b"stop"]


def test_chats_use_the_template_of_the_model(text: Text) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPTS[0]}]
    rendered = f"system: be brief\nuser: {PROMPTS[0]}\nassistant:"
    by_hand = text_of(text.complete(rendered))
    found = text.complete("", messages=json.dumps({"messages": messages}))
    assert text_of(found) == by_hand
    assert said(text.stream("", messages=json.dumps({"messages": messages}))) == by_hand


# ---------------------------------------------------------------------------------------------- what ends a request


def endless(text: Text, **more: Any) -> shmserve.Stream:
    """A stream that has begun and does not end by itself during the test."""
    stream = text.stream("endless", "one", sampling={"max_tokens": ENDLESS, "ignore_eos": True}, **more)
    next(stream)
    return stream


def assert_free(text: Text) -> None:
    """Checks that the single slot of the model `one` is free."""
    assert len(text_of(text.complete("next", "one", sampling={"max_tokens": 5}))) == 5


def test_a_cancelled_stream_leaves_the_engine(text: Text) -> None:
    stream = endless(text)
    waiting = [text.stream("next", "one", sampling={"max_tokens": 5}) for _ in range(3)]
    waiting[1].close()
    stream.close()
    assert [len(said(one)) for one in (waiting[0], waiting[2])] == [5, 5]
    assert_free(text)


def test_metrics_count_what_the_engine_generates(text: Text) -> None:
    before = engine_metrics(text.client)
    flags: dict[str, Any] = {"return_num_input_tokens": True, "return_num_output_tokens": True}
    counted = [text.complete("abc" * length, sampling={"max_tokens": 4 + length}, **flags) for length in (1, 2, 9)]
    said(text.stream("Hello", sampling={"max_tokens": 6}))
    stream = endless(text)
    stream.close()
    assert_free(text)
    after = engine_metrics(text.client)
    assert_statistics_agree(text.client, after)

    def grown(name: str) -> float:
        return sum(after[one] - before.get(one, 0) for one in after if one.startswith(name))

    text_only = 'model="text"'
    prompts = sum(int(result["num_input_tokens"].item()) for result in counted) + 7
    assert grown(f"llm_prompt_tokens_total{{{text_only}") == prompts
    assert grown(f"llm_generation_tokens_total{{{text_only}") == 5 + 6 + 13 + 6
    assert grown(f"llm_time_to_first_token_seconds_count{{{text_only}") == 4
    assert grown(f"llm_inter_token_latency_seconds_count{{{text_only}") == 5 + 6 + 13 + 6 - 4
    ended = "llm_request_success_total{model="
    assert grown(f'{ended}"text",version="1",finished_reason="length"') == 4
    assert grown(f'{ended}"one",version="1",finished_reason="cancelled"') == 1
    assert {one: value for one, value in after.items() if "_running" in one and value} == {}
    assert {one: value for one, value in after.items() if "_usage_" in one and value} == {}


def assert_statistics_agree(client: shmserve.Client, metrics: Mapping[str, float]) -> None:
    """With the metrics, in the statistics of a model and in what live views read."""
    (statistics,) = client.statistics("text")["model_stats"]
    (live,) = [entry for entry in client.activity()["models"] if entry["name"] == "text"]
    for counts in (statistics["language"], live["language"]):
        assert counts["generated_tokens"] == metrics['llm_generation_tokens_total{model="text",version="1"}']
        assert (counts["running"], counts["waiting"], counts["kv_cache"], counts["slots"]) == (0, 0, 0, 8)


def engine_metrics(client: shmserve.Client) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in client.metrics().splitlines() if line.startswith("llm_")]
    return {name: float(value) for name, _, value in lines}


def test_a_slow_reader_does_not_delay_other_streams(text: Text) -> None:
    """The slow reader also loses nothing, although the engine generated the text long before."""
    slow = text.stream(PROMPTS[6], window=1)
    first = text_of(next(slow))
    streams = [text.stream(prompt) for prompt in PROMPTS]
    assert [said(stream) for stream in streams] == list(text.expected.values())
    assert first + said(slow) == text.expected[PROMPTS[6]]


def test_a_killed_worker_ends_its_streams(text: Text) -> None:
    stream = endless(text)
    (killed,) = pids(text.client, "one").values()
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(ServeError, match="SIGKILL"):
        said(stream)
    until(text.client, lambda: killed not in pids(text.client, "one").values(), "the server has noticed it")
    assert_free(text)


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("sampling", "more", "kind", "words"),
    [
        ({"tempratur": 1}, {}, InvalidRequest, "unknown parameter 'tempratur'"),
        ({"n": 9}, {}, InvalidRequest, "at most 8 sequences at once; its parameter 'slots'"),
        ({}, {"text_input": "x" * CONTEXT}, InvalidRequest, "parameter context_length of the model"),
        ({}, {"text_input": ""}, InvalidRequest, "input 'text_input' is empty"),
        ({}, {"messages": "{}"}, InvalidRequest, "with a list 'messages'"),
        ({}, {"messages": '{"messages": [{"role": 5}]}'}, InvalidRequest, "'content'"),
        ({}, {"messages": '{"messages": [], "n_predict": 7}'}, InvalidRequest, "has 'n_predict'"),
        ({}, {"prompt_token_ids": np.array([1, 1 << 30], np.uint32)}, InvalidRequest, "invalid tokens"),
        ({}, {"exclude_input_in_output": False}, InvalidRequest, "When streaming"),
    ],
)
def test_errors_of_a_request(
    text: Text, sampling: dict[str, Any], more: dict[str, Any], kind: type[ServeError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        said(text.stream(**{"prompt": more.pop("text_input", "hello"), "sampling": sampling, **more}))
    assert text_of(text.complete(PROMPTS[0])) == text.expected[PROMPTS[0]]


def test_grammars_constrain_the_text_if_enabled(text: Text) -> None:
    def complete(grammar: str) -> str:
        return said(text.stream(PROMPTS[0], "one", sampling={"structured_outputs": {"grammar": grammar}}))

    assert complete('root ::= "yes" | "no"') in ("yes", "no")
    with pytest.raises(InvalidRequest, match="failed to parse grammar"):
        complete("root := x")


def broken(folder: Path, data: bytes | None = None, config: str = "", **own: str) -> None:
    (folder / "1").mkdir(parents=True)
    file = gguf_models.write(folder / "1" / "model.gguf", context=512)
    if data is not None:
        file.write_bytes(data if data else file.read_bytes()[: file.stat().st_size // 2])
    (folder / "config.pbtxt").write_text('backend: "llamacpp"\n' + config + parameters(**own))


def test_invalid_model_files_and_settings_are_reported(tmp_path: Path) -> None:
    wrong_type = 'input [ { name: "text_input" data_type: TYPE_UINT8 dims: [ 1 ] } ]\n'
    broken(tmp_path / "garbage", b"garbage" * 99)
    broken(tmp_path / "half", b"")
    broken(tmp_path / "slots", slots="999")
    broken(tmp_path / "context", context_length="513")
    broken(tmp_path / "cache", cache_type="f17")
    broken(tmp_path / "batch", config="max_batch_size: 4\n")
    broken(tmp_path / "plain", config="model_transaction_policy { decoupled: false }\n")
    broken(tmp_path / "input", config=wrong_type)
    broken(tmp_path / "defaults", sampling_parameters=r"{\"top_p\": 2}")
    with Server(tmp_path) as server, server.client() as client:
        reasons = {entry["name"]: entry["reason"] for entry in client.models()}
    words = {
        "garbage": "model.gguf is not a GGUF file that llama.cpp can run: it does not begin with 'GGUF'",
        "half": "llama.cpp cannot load model.gguf; the log of the server has its messages",
        "slots": "parameter slots of model 'slots' must be a number of sequences from 1 to 256, not '999'",
        "context": "must be at most 512, the context length for which the model was trained, not '513'",
        "cache": "must be one of f32",
        "batch": "max_batch_size must be 0",
        "plain": "needs model_transaction_policy { decoupled: true }",
        "input": "input 'text_input' must be TYPE_STRING, not TYPE_UINT8",
        "defaults": "parameter sampling_parameters of model 'defaults'",
    }
    assert {name: reasons[name] for name in words if words[name] not in reasons[name]} == {}
    assert reasons.keys() == words.keys()


def test_a_gguf_file_is_served_without_a_repository(tmp_path: Path) -> None:
    file = gguf_models.write(tmp_path / "chat.gguf", context=512)
    (expected,) = llm_oracle.texts(file, [{"prompt": "hello", "max_tokens": 16, "temperature": 0}])
    with Server(file) as server, server.client() as client:
        (found,) = client.stream("chat", tensors({"text_input": "hello"}), parameters={"temperature": 0})
    assert text_of(found) == "hello" + expected

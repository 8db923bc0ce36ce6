"""What all engines for language models have in common, through a real server. The oracle of an engine is another
program (`engines`)."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.errors import NotFound, ServeError
from shmserve.testing import Server
from shmserve.workers.backends.language import requests
from tests.process.models.language.engines import ADAPTER, ENDLESS, KINDS, SLOTS, EngineKind, Expected
from tests.support.cases import cases
from tests.support.gateway.language_models import openai_client
from tests.support.living import pids, until
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.process

PROMPTS = [f"{number}: prompt {'abc' * number}" for number in range(32)]
TOKENS = 24


class Text:
    """A server with the model `text`, and the expected continuations of PROMPTS."""

    def __init__(self, server: Server, client: shmserve.Client, kind: EngineKind, expected: Expected) -> None:
        self.server, self.client, self.kind = server, client, kind
        self.expected, self.adapted = expected

    def stream(self, prompt: str, *, sampling: Mapping[str, Any] | None = None, **more: Any) -> shmserve.Stream:
        """`more`: inputs, `timeout` and `window`."""
        options = {name: more.pop(name) for name in ("timeout", "window") if name in more}
        given = {"text_input": prompt, "stream": True, **more}
        settings = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **(sampling or {})}
        given["sampling_parameters"] = json.dumps(settings)
        return self.client.stream("text", tensors(given), **{"timeout": PATIENCE_S, **options})

    def complete(self, prompt: str, **more: Any) -> shmserve.Result:
        """The only response of a request that does not stream."""
        (found,) = self.stream(prompt, **{"stream": False, "exclude_input_in_output": True, **more})
        return found

    def chosen(self, prompt: str, choice: str, **sampling: Any) -> list[str]:
        """The parts of a text that must be this one."""
        wanted = {"structured_outputs": {"choice": [choice]}, "ignore_eos": False, **sampling}
        return [text_of(part) for part in self.stream(prompt, sampling=wanted)]

    def endless(self, prompt: str = "endless", **more: Any) -> shmserve.Stream:
        """A stream that has begun and does not end by itself during the test."""
        stream = self.stream(prompt, sampling={"max_tokens": ENDLESS - 100}, **more)
        next(stream)
        return stream

    def assert_free(self) -> None:
        """Checks that no slot of the model is occupied: a request with as many texts can run."""
        found = self.complete("next", sampling={"max_tokens": 5, "n": SLOTS})
        assert [len(one) for one in found["text_output"]] == [5] * SLOTS


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


@pytest.fixture(scope="module", params=KINDS, ids=[kind.name for kind in KINDS])
def serving(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, EngineKind, Expected]]:
    kind: EngineKind = request.param
    if importlib.util.find_spec(kind.module) is None:
        pytest.skip(f"{kind.module} is not installed")
    root = tmp_path_factory.mktemp("engine") / "models"
    expected = kind.write(root, PROMPTS, TOKENS)
    assert len({*expected.texts.values(), expected.adapted}) == len(PROMPTS) + 1, "the model tells prompts apart"
    options = ("--model-control-mode", "explicit", "--model-environment", "VLLM_*", "--model-environment", "HF_*")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in kind.variables.items():
            patch.setenv(name, value)
        with Server(root, *options, gateway=True) as server:
            with server.client() as client:
                client.load("text", timeout=280)
            yield server, kind, expected


@pytest.fixture
def text(serving: tuple[Server, EngineKind, Expected]) -> Iterator[Text]:
    with serving[0].client() as client:
        yield Text(serving[0], client, *serving[1:])


@pytest.fixture
def engine(text: Text) -> Text:
    """For what only the server's own engines have."""
    if not text.kind.engine:
        pytest.skip("the model is no engine")
    return text


def test_generated_texts_equal_those_of_the_oracle(text: Text) -> None:
    prompt = PROMPTS[3]
    parts = list(text.stream(prompt))
    assert len(parts) > 1
    assert said(iter(parts)) == text.expected[prompt]
    assert text_of(text.complete(prompt)) == text.expected[prompt]


def test_inputs_and_defaults_are_those_of_vllm(engine: Text) -> None:
    config = engine.client.config("text")
    assert [entry["name"] for entry in config["input"]][:3] == ["text_input", "prompt_token_ids", "messages"]
    assert config["model_transaction_policy"] == {"decoupled": True}
    prompt = PROMPTS[3]
    (whole,) = engine.client.stream("text", tensors({"text_input": prompt}), parameters={"temperature": "0.0"})
    assert whole.keys() == {"text_output"}
    assert text_of(whole) == prompt + engine.expected[prompt][:16], "the prompt, and 16 tokens"


def test_requested_outputs_are_returned(engine: Text) -> None:
    asked: dict[str, Any] = dict.fromkeys(requests.RETURNED, True)
    prompt = PROMPTS[1]
    parts = list(engine.stream(prompt, sampling={"logprobs": 2}, **asked))
    assert [part["finish_reason"].tolist() for part in parts] == [[b"None"]] * (len(parts) - 1) + [[b"length"]]
    assert sum(part["num_output_tokens"].item() for part in parts) == TOKENS
    assert {part["num_input_tokens"].item() for part in parts} == {len(prompt) + engine.kind.start}
    tokens = [token for part in parts for token in json.loads(part["token_ids"][0])]
    scores = [score for part in parts for score in json.loads(part["logprobs"][0])]
    chosen = [score[str(token)] for token, score in zip(tokens, scores, strict=True)]
    assert len(tokens) == TOKENS
    assert "".join(one["decoded_token"] for one in chosen) == engine.expected[prompt]
    assert {one["rank"] for one in chosen} == {1}
    assert {len(score) for score in scores} == {2}
    total = sum(one["logprob"] for one in chosen)
    assert parts[-1]["cumulative_logprob"].item() == pytest.approx(total, rel=1e-4)
    found = engine.complete("", prompt_token_ids=np.array(tokens[:5], np.uint32), return_num_input_tokens=True)
    assert found["num_input_tokens"].item() == 5


def test_sampling_parameters(engine: Text) -> None:
    prompt = PROMPTS[2]
    expected = engine.expected[prompt]

    def drawn(**sampling: Any) -> list[str]:
        found = engine.complete(prompt, sampling={"temperature": 1, **sampling})
        return [one.decode(errors="replace") for one in found["text_output"]]

    assert drawn(seed=7) == drawn(seed=7)
    assert drawn(seed=7) != drawn(seed=8)
    assert drawn(seed=7, top_k=1) == [expected]
    assert drawn(seed="7", top_k="1", max_tokens="5") == [expected[:5]], "the string map of vLLM's backend"
    assert len(set(drawn(n=3, seed=3))) == 3
    assert drawn(temperature=0, n=2) == [expected] * 2
    once = drawn(temperature=0, repetition_penalty=1e6)[0]
    assert not set(once) & set(prompt), "the penalty takes the prompt into account"
    assert len(set(once)) == len(once) == TOKENS
    common = max(set(expected), key=expected.count)
    for penalty in "frequency_penalty", "presence_penalty":
        assert drawn(temperature=0, **{penalty: 2})[0].count(common) <= expected.count(common)
    found = engine.complete(
        prompt, sampling={"max_tokens": 1, "logprobs": 0}, return_token_ids=True, return_logprobs=True
    )
    (first,) = json.loads(found["token_ids"][0])
    assert drawn(top_k=1, logit_bias={str(first): -100.0})[0][0] != expected[0]


def test_a_stop_text_ends_the_text_and_is_never_sent(text: Text) -> None:
    """Its characters are tokens of their own. What begins like it but goes on in another way is sent."""
    prompt = PROMPTS[4]
    expected = text.expected[prompt]
    stop = expected[8:11]
    before = expected[: expected.index(stop)]
    sampling = {"stop": [f"{expected[2:4]}\u2713", stop]}
    own = {"return_stop_reason": True} if text.kind.engine else {}
    parts = list(text.stream(prompt, sampling=sampling, return_finish_reason=True, **own))
    assert said(iter(parts)) == before
    assert parts[-1]["finish_reason"].tolist() == [b"stop"]
    assert [part["stop_reason"].item() for part in parts if own] == ([b""] * (len(parts) - 1) + [stop.encode()]) * len(
        own
    )
    assert text_of(text.complete(prompt, sampling=sampling)) == before


def test_characters_of_several_tokens_are_sent_whole(engine: Text) -> None:
    wanted = "\u00e9\u2713\U0001f600"
    assert "".join(engine.chosen(PROMPTS[0], wanted)) == wanted
    assert "".join(engine.chosen(PROMPTS[0], wanted, max_tokens=3)).rstrip("\ufffd") == "\u00e9", "cut in the middle"


def test_chats_use_the_template_of_the_model(engine: Text) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPTS[0]}]
    rendered = f"system: be brief\nuser: {PROMPTS[0]}\nassistant:"
    by_hand = text_of(engine.complete(rendered))
    assert text_of(engine.complete("", messages=json.dumps({"messages": messages}))) == by_hand
    assert said(engine.stream("", messages=json.dumps({"messages": messages}))) == by_hand
    for given, wanted in ({"messages": json.dumps({"messages": messages})}, rendered), ({"text_input": "Hi!"}, "Hi!"):
        found = engine.complete("", **{"task": "tokenize", **given})
        assert found["max_model_len"].item() == ENDLESS
        tokens = np.array(json.loads(found["token_ids"][0]), np.uint32)
        back = text_of(engine.complete("", task="detokenize", prompt_token_ids=tokens))
        assert back.removeprefix("<s>").strip() == wanted


def test_demanded_tool_calls(engine: Text) -> None:
    city = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": city}}]
    chat = {"messages": [{"role": "user", "content": "?"}], "tools": tools, "tool_choice": "required"}
    sampling = {"max_tokens": 400, "temperature": 1, "seed": 1, "ignore_eos": False}
    found = engine.complete("", messages=json.dumps(chat), sampling=sampling)
    assert text_of(found) == ""
    for call in json.loads(found["tool_calls"][0]):
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["city"] == "Oslo"


def test_tool_calls_of_the_model_itself(engine: Text) -> None:
    if engine.kind.name != "vllm":
        pytest.skip("the format of the calls is known from the template of a model")
    called = 'Let me see. <tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    for choice, expected in ({}, ["weather"]), ({"tool_choice": "none"}, []):
        chat = {"messages": [{"role": "user", "content": "?"}], "tools": tools, **choice}
        given = {"messages": json.dumps(chat), "return_finish_reason": True}
        sampling = {"structured_outputs": {"choice": [called]}, "max_tokens": 400, "ignore_eos": False}
        for found in (
            list(engine.stream("", sampling=sampling, **given)),
            [engine.complete("", sampling=sampling, **given)],
        ):
            pieces = [call for part in found if "tool_calls" in part for call in json.loads(part["tool_calls"][0])]
            names = [piece["function"]["name"] for piece in pieces if piece["function"].get("name")]
            assert names == expected
            arguments = "".join(piece["function"].get("arguments", "") for piece in pieces)
            assert json.loads(arguments or "{}") == ({"city": "Oslo"} if expected else {})
            assert said(iter(found)).strip() == ("Let me see." if expected else called)
            assert found[-1]["finish_reason"].tolist() == [b"tool_calls" if expected else b"stop"]


def test_adapters(engine: Text) -> None:
    prompt = PROMPTS[0]
    assert said(engine.stream(prompt, sampling={"lora_name": ADAPTER})) == engine.adapted
    assert text_of(engine.complete(prompt)) == engine.expected[prompt]
    with pytest.raises(NotFound, match=f"the model has no adapter 'german': it has {ADAPTER}"):
        engine.complete(prompt, sampling={"lora_name": "german"})
    both = [engine.stream(prompt, sampling=given) for given in ({}, {"lora_name": ADAPTER})]
    assert [said(stream) for stream in both] == [engine.expected[prompt], engine.adapted]


def test_openai_clients_use_adapters_as_models(engine: Text) -> None:
    with openai_client(engine.server.endpoints["http"]) as client:
        assert [model.id for model in client.models.list()] == ["text", f"text:{ADAPTER}"]
        adapted = client.models.retrieve(f"text:{ADAPTER}")
        assert (adapted.parent, adapted.max_model_len) == ("text", ENDLESS)
        given: dict[str, Any] = {"prompt": PROMPTS[0], "max_tokens": TOKENS, "temperature": 0}
        for model, expected in ("text", engine.expected[PROMPTS[0]]), (f"text:{ADAPTER}", engine.adapted):
            found = client.completions.create(model=model, **given)
            assert (found.model, found.choices[0].text) == (model, expected)
        for unknown in ("text:german", "other:german"):
            with pytest.raises(Exception, match=unknown.replace("text:", "no adapter '").removesuffix(":german")):
                client.completions.create(model=unknown, **given)


def test_64_requests_join_and_leave(text: Text) -> None:
    """Also those that are cancelled while they wait, and while they are generated."""
    lengths = [1 + 7 * number % TOKENS for number in range(64)]
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(64)]
    streams = [
        text.stream(prompt, sampling={"max_tokens": length}) for prompt, length in zip(prompts, lengths, strict=True)
    ]
    for stream in streams[5::8]:
        stream.close()
    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        if index % 8 != 5:
            assert said(streams[index]) == text.expected[prompt][:length]
    text.assert_free()


def test_cancelled_streams_leave_the_engine_in_each_phase(text: Text) -> None:
    """While the text is generated, while it waits for a slot, and while its prompt is computed."""
    running = [text.endless(f"{number}") for number in range(SLOTS)]
    waiting = [text.stream("next", sampling={"max_tokens": 5}) for _ in range(3)]
    waiting[1].close()
    for stream in running:
        stream.close()
    assert [len(said(one)) for one in (waiting[0], waiting[2])] == [5, 5]
    text.assert_free()
    computed = [text.stream("a long prompt " * 3000, sampling={"max_tokens": ENDLESS // 2}) for _ in range(SLOTS)]
    for stream in computed:
        stream.close()
    text.assert_free()


def test_requests_beyond_the_slots_wait_in_the_server(engine: Text) -> None:
    """At most two have been passed on: those in the server's queue can be overtaken."""
    running = [engine.endless(f"{number}") for number in range(SLOTS)]
    waiting = [engine.stream("next", sampling={"max_tokens": ENDLESS - 100}) for _ in range(9)]
    running.pop().close()
    next(waiting[0])
    (entry,) = [entry for entry in engine.client.activity()["models"] if entry["name"] == "text"]
    assert entry["queued"] >= len(waiting) - 3
    for stream in running + waiting:
        stream.close()
    engine.assert_free()


def test_metrics_count_what_the_engine_generates(engine: Text) -> None:
    before = engine_metrics(engine.client)
    flags: dict[str, Any] = {"return_num_input_tokens": True, "return_num_output_tokens": True}
    counted = [engine.complete("abc" * length, sampling={"max_tokens": 4 + length}, **flags) for length in (1, 2, 9)]
    said(engine.stream("Hello", sampling={"max_tokens": 6}))
    engine.endless().close()
    engine.assert_free()
    after = engine_metrics(engine.client)
    assert_statistics_agree(engine.client, after)

    def grown(name: str) -> float:
        return sum(after[one] - before.get(one, 0) for one in after if one.startswith(f'{name}{{model="text"'))

    def ended(reason: str) -> float:
        name = f'llm_request_success_total{{model="text",version="1",finished_reason="{reason}"}}'
        return after[name] - before.get(name, 0)

    start = engine.kind.start
    prompts = sum(int(result["num_input_tokens"].item()) for result in counted)
    others = len("Hello") + len("endless") + SLOTS * len("next") + start * (2 + SLOTS)
    assert grown("llm_prompt_tokens_total") == prompts + others
    assert (ended("length"), ended("cancelled")) == (4 + SLOTS, 1)
    generated = 5 + 6 + 13 + 6 + 5 * SLOTS
    assert grown("llm_generation_tokens_total") > generated, "those, and the ones of the cancelled text"
    assert grown("llm_time_to_first_token_seconds_count") == 4 + SLOTS + 1
    first = grown("llm_time_to_first_token_seconds_count")
    assert grown("llm_inter_token_latency_seconds_count") == grown("llm_generation_tokens_total") - first
    assert {one: value for one, value in after.items() if ("_running" in one or "_usage_" in one) and value} == {}


def assert_statistics_agree(client: shmserve.Client, metrics: Mapping[str, float]) -> None:
    """With the metrics, in the statistics of a model and in what live views read."""
    (statistics,) = client.statistics("text")["model_stats"]
    (live,) = [entry for entry in client.activity()["models"] if entry["name"] == "text"]
    for counts in (statistics["language"], live["language"]):
        assert counts["generated_tokens"] == metrics['llm_generation_tokens_total{model="text",version="1"}']
        assert (counts["running"], counts["waiting"], counts["kv_cache"], counts["slots"]) == (0, 0, 0, SLOTS)


def engine_metrics(client: shmserve.Client) -> dict[str, float]:
    """Those of an engine that has nothing to do: it counts a text soon after its last response."""
    running = 'llm_num_requests_running{model="text",version="1",model_instance="text_0_0"}'
    until(client, lambda: counted(client)[running] == 0)
    return counted(client)


def counted(client: shmserve.Client) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in client.metrics().splitlines() if line.startswith("llm_")]
    return {name: float(value) for name, _, value in lines}


def test_prompts_that_begin_alike_are_found_in_the_cache(engine: Text) -> None:
    """A conversation: it goes on with what was computed before."""
    name = 'llm_prefix_cache_hits_total{model="text",version="1"}'
    prompt = "The beginning of a conversation. " * 20
    answer = text_of(engine.complete(prompt))
    before = engine_metrics(engine.client)[name]
    second = engine.complete(f"{prompt}{answer} And then?", return_num_cached_tokens=True)
    after = engine_metrics(engine.client)[name]
    assert after - before == second["num_cached_tokens"].item() >= len(prompt) // 2
    running = engine.endless(prompt := prompt[::-1])
    engine.complete(f"{prompt} And then?")
    running.close()
    found = engine_metrics(engine.client)[name] - after
    # llama.cpp 2026.10 copies the cache of a running text only to other texts of the same request.
    assert found >= len(prompt) // 2 if engine.kind.name == "vllm" else found == 0


def test_a_slow_reader_does_not_delay_other_streams(text: Text) -> None:
    """The slow reader also loses nothing, although the engine generated the text long before."""
    slow = text.stream(PROMPTS[6], window=1)
    first = text_of(next(slow))
    streams = [text.stream(prompt) for prompt in PROMPTS]
    assert [said(stream) for stream in streams] == list(text.expected.values())
    assert first + said(slow) == text.expected[PROMPTS[6]]


@cases(
    ({"tempratur": 1}, {}, "unknown parameter 'tempratur'"),
    ({"prompt_logprobs": 1}, {}, "'prompt_logprobs'"),
    ({"n": 9}, {}, "at most 4 sequences at once; its parameter 'slots'"),
    ({}, {"text_input": "x" * ENDLESS}, "context|maximum model length"),
    ({}, {"text_input": ""}, "input 'text_input' is empty"),
    ({}, {"messages": "{}"}, "with a list 'messages'"),
    ({}, {"messages": '{"messages": [{"role": 5}]}'}, "role|content"),
    ({}, {"messages": '{"messages": [], "n_predict": 7}'}, "has 'n_predict'"),
    ({}, {"prompt_token_ids": np.array([1, 1 << 30], np.uint32)}, "invalid tokens|out of vocabulary"),
    ({}, {"exclude_input_in_output": False}, "When streaming"),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {}, "'grammar' is not allowed"),
)
def test_errors_of_a_request(sampling: dict[str, Any], more: dict[str, Any], words: str, engine: Text) -> None:
    with pytest.raises(ServeError, match=words) as caught:
        said(engine.stream("hello", sampling=sampling, **more))
    assert caught.value.code in ("INVALID_ARG", "UNSUPPORTED")
    assert text_of(engine.complete(PROMPTS[0])) == engine.expected[PROMPTS[0]]


def test_a_killed_worker_ends_its_streams(text: Text) -> None:
    stream = text.endless()
    (killed,) = pids(text.client, "text").values()
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(ServeError, match="SIGKILL"):
        said(stream)
    until(text.client, lambda: killed not in pids(text.client, "text").values(), "the server has noticed it")

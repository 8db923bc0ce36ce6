"""OpenAI's client with the engine for GGUF files. The oracle is the bare engine (`llm_oracle`).

test_language_models.py tests the engine itself, test_openai.py the endpoints.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.errors import InvalidRequest
from shmserve.testing import Server
from shmserve.tools.load.measure import measure
from shmserve.tools.load.plan import CHAT as CHAT_API
from shmserve.tools.load.plan import (
    COMPLETIONS,
    SECOND,
    ClosedLoop,
    Endpoint,
    Lengths,
    LoadPlan,
    MeasureSettings,
    Objectives,
    PromptPlan,
)
from tests.process.models.language import llm_oracle
from tests.support.cases import cases
from tests.support.gateway.language_models import openai_client, picture, post
from tests.support.optional import optional
from tests.support.shared_server import SharedServer
from tests.support.workers.models import gguf_models

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed"),
]

anthropic = optional("anthropic")
jsonschema = optional("jsonschema")
openai = optional("openai")
PROMPTS = ["Hello", "What is a tensor?", "abc" * 20]
CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
RENDERED = "system: Be brief.\nuser: Why?\nassistant:"
POOLINGS = ("mean", "cls", "last")
SAMPLING: dict[str, Any] = {"model": "text", "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def expected(repository: Path) -> list[str]:
    """The texts of PROMPTS and RENDERED."""
    own = {"context_length": "512", "threads": "1"}
    file = gguf_models.served(repository, "text", network={"context": 1 << 17}, slots="4", **own)
    for pooling in (*POOLINGS, "rank"):
        network = {"context": 1 << 17, "scores": pooling == "rank"}
        gguf_models.served(repository, pooling, network=network, pooling=pooling, slots="2", **own)
    eyes = gguf_models.served(repository, "eyes", network={"context": 2048, "top_k": 1}, mmproj="eyes.gguf", **own)
    gguf_models.write_projector(eyes.with_name("eyes.gguf"))
    given = [{"prompt": prompt, "max_tokens": 24, "temperature": 0} for prompt in (*PROMPTS, RENDERED)]
    return list(llm_oracle.texts(file, given))


@pytest.fixture(scope="module")
def server(shared_server: SharedServer, repository: Path, expected: list[str]) -> Iterator[Server]:
    with shared_server.serving(repository) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with openai_client(server.endpoints["http"]) as made:
        yield made


def test_completions_and_chats(client: Any, expected: list[str]) -> None:
    *texts, answer = expected
    given: dict[str, Any] = {"prompt": PROMPTS, "n": 2, **SAMPLING}
    found = client.completions.create(**given)
    assert [choice.text for choice in found.choices] == [text for text in texts for _ in range(2)]
    assert {choice.finish_reason for choice in found.choices} == {"length"}
    assert found.usage.completion_tokens == 6 * 24
    *chunks, last = client.completions.create(**given, stream=True, stream_options={"include_usage": True})
    streamed = [""] * 6
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in found.choices]
    assert (last.usage.prompt_tokens, last.usage.total_tokens) == (found.usage.prompt_tokens, found.usage.total_tokens)
    chat = client.chat.completions.create(messages=CHAT, **SAMPLING)
    assert chat.choices[0].message.content == answer
    chunks = list(client.chat.completions.create(messages=CHAT, stream=True, **SAMPLING))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer
    assert chunks[-1].choices[0].finish_reason == "length"


def test_tokens_of_a_prompt_that_were_in_the_cache(client: Any, claude: Any) -> None:
    """In the usage of all APIs, and in the chunks of a stream."""
    given: dict[str, Any] = {"messages": [{"role": "user", "content": "A question. " * 20}], "stop": "never"} | SAMPLING
    first = client.chat.completions.create(**given).usage
    found = client.chat.completions.create(**given).usage
    cached = found.prompt_tokens_details.cached_tokens
    assert first.prompt_tokens_details.cached_tokens < found.prompt_tokens // 2 < cached < found.prompt_tokens
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.chat.completions.create(stream=True, stream_options=options, **given))
    assert chunks[-1].usage == found
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert (counts, counts[-1]) == (sorted(counts), 24)
    assert len(set(counts)) > 10
    response = client.responses.create(model="text", input=given["messages"], temperature=0, max_output_tokens=24).usage
    assert response.input_tokens_details.cached_tokens == cached
    message = claude.messages.create(
        model="text", messages=given["messages"], max_tokens=24, extra_body={"temperature": 0}
    ).usage
    assert (message.cache_read_input_tokens, message.input_tokens) == (cached, found.prompt_tokens - cached)


def test_no_tokens(client: Any) -> None:
    """A request may want its prompt only, such as to count its tokens."""
    given: dict[str, Any] = {"prompt": PROMPTS, **SAMPLING, "max_tokens": 0, "logprobs": 1}
    for echoed in {}, {"echo": True, "logprobs": None}:
        found = client.completions.create(**given | echoed)
        assert [one.text for one in found.choices] == (PROMPTS if echoed else [""] * len(PROMPTS))
        assert {one.finish_reason for one in found.choices} == {"length"}
        assert (found.usage.completion_tokens, found.usage.total_tokens) == (0, found.usage.prompt_tokens)
    chunks = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **given))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == ""
    usage = chunks[-1].usage
    assert (usage.completion_tokens, usage.total_tokens) == (0, found.usage.total_tokens)


def test_log_probabilities(client: Any) -> None:
    """The tokens make up the text, each is the most probable one, and a stream has the same."""
    (choice,) = client.completions.create(prompt="Hello", logprobs=3, **SAMPLING).choices
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text
    assert all(len(top) == 3 for top in found.top_logprobs)
    assert [max(top.values()) for top in found.top_logprobs] == pytest.approx(found.token_logprobs)
    chunks = client.completions.create(prompt="Hello", logprobs=3, stream=True, **SAMPLING)
    streamed = [chunk.choices[0].logprobs for chunk in chunks]
    assert [token for one in streamed if one is not None for token in one.tokens] == found.tokens
    (chat,) = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=2, **SAMPLING).choices
    assert "".join(token.token for token in chat.logprobs.content) == chat.message.content


@pytest.mark.parametrize(("kind", "api"), [("native", CHAT_API), ("openai", COMPLETIONS), ("openai", CHAT_API)])
def test_a_load_generator_counts_tokens(kind: str, api: str, server: Server) -> None:
    """As many as were asked for, and as the engine has counted."""
    url = f"http://{server.endpoints['http']}{'/v1' if api == COMPLETIONS else ''}" if kind == "openai" else server.url
    plan = LoadPlan(
        model="text",
        endpoint=Endpoint(url=url, openai=kind == "openai"),
        loads=(ClosedLoop(2),),
        prompts=PromptPlan(api=api, words=Lengths(40, 80), output=Lengths(8, 8), sampling='{"ignore_eos": true}'),
        objectives=Objectives(e2e=60 * SECOND),
        stream=True,
        settings=MeasureSettings(
            warmup_ns=SECOND // 50, window_ns=SECOND // 20, min_windows=2, max_windows=2, min_responses=3
        ),
    )
    with server.client() as client:
        before = client.statistics("text")["model_stats"][0]["language"]
        (point,) = measure(plan).points
        after = client.statistics("text")["model_stats"][0]["language"]
    found = point.language
    assert found is not None
    assert (point.failed, found.output_tokens, found.good) == (0, 8, point.throughput)
    assert 40 <= found.prompt_tokens <= 80
    assert found.output_per_s.mean == pytest.approx(8 * point.throughput.mean)
    assert point.first_answer is not None
    assert point.first_answer.count == found.between_tokens.count == point.latency.count
    assert after["generated_tokens"] - before["generated_tokens"] >= 8 * point.latency.count
    assert after["prompt_tokens"] - before["prompt_tokens"] >= found.prompt_tokens * point.latency.count


WEATHER: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "day": {"$ref": "#/$defs/day"}},
    "required": ["city", "day"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "object", "properties": {"number": {"enum": [1, 2]}}, "required": ["number"]}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.mark.parametrize("choice", ["weather", "now"])
def test_functions_are_tools(client: Any, choice: str) -> None:
    """OpenAI's older fields: the message has the arguments of the same call, and may be sent back with its result."""
    demanded: Any = {"type": "function", "function": {"name": choice}}
    given: dict[str, Any] = {"messages": CHAT, **SAMPLING, "max_tokens": 400}
    (tool,) = client.chat.completions.create(tools=TOOLS, tool_choice=demanded, **given).choices
    given |= {"functions": [one["function"] for one in TOOLS], "function_call": {"name": choice}}
    (found,) = client.chat.completions.create(**given).choices
    with client.chat.completions.stream(**given) as stream:
        (streamed,) = stream.get_final_completion().choices
    (expected,) = [call.function for call in tool.message.tool_calls]
    for one in found, streamed:
        call = one.message.function_call
        assert (one.finish_reason, one.message.tool_calls) == ("function_call", None)
        assert (call.name, call.arguments) == (expected.name, expected.arguments)
    history = [*CHAT, found.message, {"role": "function", "name": choice, "content": "warm"}]
    answer = client.chat.completions.create(**given | {"messages": history, "function_call": "none", "max_tokens": 3})
    assert answer.usage.completion_tokens == 3


def test_the_last_message_is_continued(client: Any) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "Be"}]
    own: dict[str, Any] = {"extra_body": {"continue_final_message": True}}
    answer = client.chat.completions.create(messages=messages, **SAMPLING, **own).choices[0].message.content
    assert answer == client.completions.create(prompt=f"{RENDERED}Be", **SAMPLING).choices[0].text


def test_tokens_of_a_prompt_are_those_that_the_model_sees(client: Any, expected: list[str]) -> None:
    for prompt, text in zip(PROMPTS, expected, strict=False):
        found = post(client, "/tokenize", model="text", prompt=prompt)
        assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 512)
        given = client.completions.create(prompt=found["tokens"], **SAMPLING)
        assert (given.choices[0].text, given.usage.prompt_tokens) == (text, found["count"])
        assert post(client, "/detokenize", model="text", tokens=found["tokens"])["prompt"] == f"<s> {prompt}"
    chat = post(client, "/tokenize", model="text", messages=CHAT)
    assert chat == post(client, "/tokenize", model="text", prompt=RENDERED)
    assert chat["count"] == client.chat.completions.create(messages=CHAT, **SAMPLING).usage.prompt_tokens


def test_a_large_prompt_is_tokenized(client: Any) -> None:
    text = "abc" * 100_000
    assert post(client, "/tokenize", model="text", prompt=text)["count"] == 2 + len(text)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_embeddings(client: Any, repository: Path, pooling: str) -> None:
    file = repository / "text" / "1" / "model.gguf"
    texts = [*PROMPTS, *[f"{number} " * number for number in range(1, 30)]]
    expected = llm_oracle.vectors(file, pooling, [{"input": text} for text in texts])
    found = client.embeddings.create(model=pooling, input=texts)
    for item, vector in zip(found.data, expected, strict=True):
        assert item.embedding == pytest.approx(vector, abs=5e-3)
    assert found.usage.prompt_tokens == sum(
        post(client, "/tokenize", model="text", prompt=prompt)["count"] for prompt in texts
    )
    cut = client.embeddings.create(model=pooling, input="Hello", dimensions=8, encoding_format="float").data[0]
    assert len(cut.embedding) == 8
    assert sum(value * value for value in cut.embedding) == pytest.approx(1, abs=1e-5)
    for limit, length in ((-1, 509), (100, 98)):  # a token begins each text, and a space
        texts, own = ["a" * 600, "a" * length, "b"], {"truncate_prompt_tokens": limit}
        cut = client.embeddings.create(model=pooling, input=texts, extra_body=own)
        assert cut.data[0].embedding == pytest.approx(cut.data[1].embedding, abs=5e-3)
        assert cut.usage.prompt_tokens == 2 * (length + 2) + 3
    assert pooling in [model.id for model in client.models.list()]


def test_a_batch_without_texts_is_refused(server: Server) -> None:
    with server.client() as native, pytest.raises(InvalidRequest, match="the request has no rows"):
        native.infer("mean", {"text_input": np.empty((0, 1), object)})


def test_reranking(client: Any, repository: Path) -> None:
    documents = [f"{number} " * number for number in range(1, 30)]
    file = repository / "rank" / "1" / "model.gguf"
    (scores,) = llm_oracle.vectors(file, "rank", [{"query": "Why?", "documents": documents}])
    results = post(client, "/v1/rerank", model="rank", query="Why?", documents=documents)["results"]
    assert {one["index"]: one["relevance_score"] for one in results} == pytest.approx(dict(enumerate(scores)), abs=5e-3)
    found = post(client, "/v1/score", model="rank", text_1="Why?", text_2=documents)
    assert [one["score"] for one in found["data"]] == pytest.approx(scores, abs=5e-3)
    assert found["usage"]["prompt_tokens"] > sum(map(len, documents))


def flat(choice: Any) -> Any:
    return choice if isinstance(choice, str) else {"type": "function", "name": choice["function"]["name"]}


def test_responses(client: Any, expected: list[str]) -> None:
    given: dict[str, Any] = {"model": "text", "instructions": "Be brief.", "temperature": 0, "max_output_tokens": 24}
    found = client.responses.create(input="Why?", **given)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (found.output_text, found.usage.output_tokens) == (expected[-1], 24)
    own: dict[str, Any] = {"top_k": 1, "stop": expected[-1][5:8], "max_tool_calls": 1}
    stopped = client.responses.create(input="Why?", extra_body=own, **given | {"temperature": 1})
    assert (stopped.status, stopped.output_text) == ("completed", expected[-1].partition(own["stop"])[0])
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "Why?"}]}]
    with client.responses.stream(input=parts, **given) as stream:
        *_, last = events = list(stream)
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected[-1]
    assert (last.type, last.response.output_text) == ("response.incomplete", expected[-1])
    assert last.response.usage.total_tokens == found.usage.total_tokens


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_tool_calls_of_responses(client: Any, choice: Any) -> None:
    given: dict[str, Any] = {
        "model": "text",
        "tools": [{"type": "function", **tool["function"]} for tool in TOOLS],
        "tool_choice": flat(choice),
        "max_output_tokens": 400,
        "temperature": 0,
    }
    found = client.responses.create(input="Why?", **given).output
    with client.responses.stream(input="Why?", **given) as stream:
        streamed = stream.get_final_response().output
    described = [[(one.type, one.name, one.arguments, one.status) for one in items] for items in (found, streamed)]
    assert described[0] == described[1]
    for call in found:
        jsonschema.validate(json.loads(call.arguments), WEATHER if call.name == "weather" else {"maxProperties": 0})
    call = {name: getattr(found[0], name) for name in ("type", "call_id", "name", "arguments")}
    answer = {"type": "function_call_output", "call_id": found[0].call_id, "output": "warm"}
    history = [{"role": "user", "content": "Why?"}, call, answer]
    assert client.responses.create(model="text", input=history, max_output_tokens=3).usage.output_tokens == 3


def test_images(client: Any, claude: Any, server: Server, repository: Path) -> None:
    """In all APIs, the engine sees the images of a chat at their places."""
    pictures = [picture(colour) for colour in ("red", "blue")]
    urls = [f"data:image/png;base64,{one}" for one in pictures]
    first = {"type": "image_url", "image_url": {"url": urls[0]}}
    given = [{"role": "user", "content": [first, {"type": "text", "text": "What?"}]}]
    both = [{"role": "user", "content": [*given[0]["content"], {**first, "image_url": {"url": urls[1]}}]}]
    folder = repository / "eyes" / "1"
    asked = [{"messages": chat, "max_tokens": 24, "temperature": 0} for chat in (given, both)]
    expected = llm_oracle.chats(folder / "model.gguf", folder / "eyes.gguf", asked)
    sampling: Any = {**SAMPLING, "model": "eyes"}
    for chat, text in zip((given, both), expected, strict=True):
        assert client.chat.completions.create(messages=chat, **sampling).choices[0].message.content == text
    parts: Any = [{"type": "input_image", "image_url": urls[0]}, {"type": "input_text", "text": "What?"}]
    answer = client.responses.create(model="eyes", input=[{"role": "user", "content": parts}], max_output_tokens=24)
    assert answer.output_text == expected[0], "sampled as the authors of the model recommend"
    source = {"type": "base64", "media_type": "image/png", "data": pictures[0]}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
    message = claude.messages.create(
        model="eyes", messages=[{"role": "user", "content": parts}], max_tokens=24, extra_body={"temperature": 0}
    )
    assert message.content[0].text == expected[0]


RESPONSES = "/v1/responses"
BROKEN = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]


@cases(
    ("/tokenize", {}, "either 'prompt' or 'messages' is required"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": False}, "supported as true for a prompt"),
    ("/tokenize", {"prompt": "a", "tokens": []}, "Unrecognized request argument supplied: tokens"),
    ("/tokenize", {"prompt": "abc" * 400_000}, "the limit to tokenize is 1048576"),
    ("/detokenize", {"tokens": []}, "Invalid value for 'tokens'"),
    ("/detokenize", {"tokens": [1 << 30]}, "llama.cpp: "),
    ("/v1/embeddings", {"model": "mean", "input": ["a", "a" * 600]}, r"llama.cpp: .*\(602 tokens\)"),
    ("/v1/embeddings", {"model": "cls", "input": ["a", "a" * 600]}, r"llama.cpp: .*\(602 tokens\)"),
    ("/v1/rerank", {"model": "rank", "query": "Why?", "documents": ["a" * 600]}, "the available context size"),
    ("/v1/chat/completions", {"model": "eyes", "messages": BROKEN}, "image"),
    ("/v1/chat/completions", {"messages": BROKEN}, "model 'text' cannot see images: it has no input 'image'"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "this server keeps no responses"),
    (f"{RESPONSES}/input_tokens", {"previous_response_id": "resp_1"}, "this server keeps no responses"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools of the type 'web_search' are not supported"),
    (RESPONSES, {"input": [{"type": "image"}]}, "items of the type 'image' are not supported"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "an image that is not in base64"),
    (RESPONSES, {"tokens": 1}, "Unrecognized request argument supplied: tokens"),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_requests(path: str, given: Any, text: str, client: Any) -> None:
    more = {"input": "a"} if path.startswith(RESPONSES) else {}
    with pytest.raises(openai.BadRequestError, match=text):
        post(client, path, **{"model": "text"} | more | given)


@cases(
    ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}, [], "a part of the type 'image_url'"),
    ({"type": "image"}, [], "has more images than the input 'image'"),
    ({"type": "text", "text": "a"}, [b"AAAA"], "has more images than the input 'messages'"),
    ({"type": "image"}, [b"\xff"], "is not base64"),
)
def test_images_and_messages_must_match(part: Any, images: list[bytes], text: str, server: Server) -> None:
    """The engine itself would fetch URLs."""
    given = {"text_input": "", "messages": json.dumps({"messages": [{"role": "user", "content": [part]}]})}
    inputs = {name: np.array([value], object) for name, value in given.items()}
    with server.client() as native, pytest.raises(InvalidRequest, match=text):
        list(native.stream("eyes", {**inputs, "image": np.array(images, object)}))


@pytest.fixture
def claude(server: Server) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=f"http://{server.endpoints['http']}", api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("at", [None, 5])
def test_messages_and_stop_sequences(client: Any, claude: Any, expected: list[str], at: int | None) -> None:
    """The reason names the one that has ended the message; none has if the model ends it, or the limit."""
    stop = expected[-1][at : at + 3] if at is not None else "never"
    kept = expected[-1].partition(stop)[0]
    given: dict[str, Any] = {"model": "text", "system": "Be brief.", "max_tokens": 24, "extra_body": {"temperature": 0}}
    parts = [{"type": "text", "text": "Why?"}]
    given |= {"messages": [{"role": "user", "content": parts}], "stop_sequences": ["not this", stop]}
    found = claude.messages.create(**given)
    with claude.messages.stream(**given) as stream:
        assert "".join(stream.text_stream) == kept
        streamed = stream.get_final_message()
    for message in found, streamed:
        assert "".join(block.text for block in message.content) == kept
        reason = ("max_tokens", None) if at is None else ("stop_sequence", stop)
        assert (message.stop_reason, message.stop_sequence) == reason
        assert at is not None or message.usage.output_tokens == 24
    asked: dict[str, Any] = {"messages": CHAT, "stop": ["not this", stop], **SAMPLING}
    *_, chunk = client.chat.completions.create(stream=True, **asked)
    for one in client.chat.completions.create(**asked).choices[0], chunk.choices[0]:
        assert getattr(one, "stop_reason", None) == reason[1]


def test_structured_messages(claude: Any) -> None:
    asked: dict[str, Any] = {"model": "text", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 400}
    config = {"format": {"type": "json_schema", "schema": WEATHER}, "effort": "low"}
    without_effect: Any = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
    (block,) = claude.messages.create(output_config=config, extra_body=without_effect, **asked).content
    jsonschema.validate(json.loads(block.text), WEATHER)


def test_tokens_of_messages(client: Any, claude: Any) -> None:
    """As many as the template makes of the chat, by the endpoints of both APIs."""
    messages = [{"role": "user", "content": "Why?"}]
    counted = claude.messages.count_tokens(model="text", system="Be brief.", messages=messages).input_tokens
    chat = [{"role": "system", "content": "Be brief."}, *messages]
    assert counted == post(client, "/tokenize", model="text", messages=chat)["count"]
    for given in messages, "Why?":
        found = client.responses.input_tokens.count(model="text", instructions="Be brief.", input=given)
        assert (found.object, found.input_tokens) == ("response.input_tokens", counted)
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        claude.messages.count_tokens(model="nothing", messages=messages)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_tool_use(claude: Any, choice: Any) -> None:
    functions = [tool["function"] for tool in TOOLS]
    tools = [{"name": one["name"], "input_schema": one.get("parameters", {"type": "object"})} for one in functions]
    given: dict[str, Any] = {"model": "text", "max_tokens": 400, "extra_body": {"temperature": 0}}
    asked = [{"role": "user", "content": "Why?"}]
    found = claude.messages.create(messages=asked, tools=tools, tool_choice=choice, **given)
    with claude.messages.stream(messages=asked, tools=tools, tool_choice=choice, **given) as stream:
        streamed = stream.get_final_message()
    described = [[(block.type, block.name, block.input) for block in one.content] for one in (found, streamed)]
    assert described[0] == described[1]
    assert (found.stop_reason, streamed.stop_reason) == ("tool_use", "tool_use")
    for block in found.content:
        jsonschema.validate(block.input, WEATHER if block.name == "weather" else {})
    used = {name: getattr(found.content[0], name) for name in ("type", "id", "name", "input")}
    result = {"type": "tool_result", "tool_use_id": used["id"], "content": "warm"}
    history = [*asked, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
    assert claude.messages.create(messages=history, model="text", max_tokens=3).usage.output_tokens == 3


def test_errors_of_messages(claude: Any) -> None:
    asked: dict[str, Any] = {"model": "text", "max_tokens": 3, "messages": [{"role": "user", "content": "a"}]}
    with pytest.raises(anthropic.NotFoundError, match=r"not_found_error.*unknown model: 'nothing'"):
        claude.messages.create(**asked | {"model": "nothing"})
    for more, text in (
        ({"thinking": {"type": "deep"}}, "Invalid value for 'thinking.type'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "an image that is not in base64"),
        ({"output_config": {"format": {"type": "text"}}}, "must be a 'json_schema' with a 'schema'"),
        ({"messages": [{"role": "system", "content": "a"}]}, "must be 'user' or 'assistant'"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=text):
            claude.messages.create(**asked | more)

"""The OpenAI-compatible endpoints of a real gateway, with OpenAI's own client."""

from __future__ import annotations

import base64
import io
import json
import re
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.testing import Server
from tests.support.cases import cases
from tests.support.commands import COMMAND, run
from tests.support.gateway.language_models import TEMPLATE, LanguageModels, openai_client, post, write_language_models
from tests.support.gateway.running_gateway import Gateway, model, open_gate
from tests.support.living import until
from tests.support.optional import optional
from tests.support.shared_server import SharedServer
from tests.support.system.terminal import Terminal

pytestmark = pytest.mark.process

GATEWAY = ("--limit=http_json_bytes=200000",)

openai, anthropic = optional("openai"), optional("anthropic")
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def files(repository: Path) -> LanguageModels:
    return write_language_models(repository)


@pytest.fixture(scope="module")
def server(shared_server: SharedServer, repository: Path, files: LanguageModels) -> Iterator[Server]:
    model(repository, "number", ["FP32"], "[ -1 ]", 8)
    with shared_server.serving(repository) as running:
        yield running


@pytest.fixture
def client(gateway: Gateway) -> Iterator[Any]:
    with openai_client(f"127.0.0.1:{gateway.http}") as made:
        yield made


def user(content: Any) -> Any:
    return [{"role": "user", "content": content}]


def function(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def texts(chunks: list[Any]) -> list[str]:
    return [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]


def test_models(client: Any, server: Server) -> None:
    with server.client() as native:
        native.traffic("talk", aliases={"prod": 1, "next": 2})
        names = [found.id for found in client.models.list()]
    assert " ".join(names) == "bare embed once pooled-cls pooled-last pooled-mean speech talk talk@prod thinks vllm"
    found = client.models.retrieve("talk@prod")
    assert (found.id, found.object, found.owned_by) == ("talk@prod", "model", "shmserve")
    assert 0 <= time.time() - found.created < 3600
    for name in ("number", "embedded", "nothing", "talk@next"):
        with pytest.raises(openai.NotFoundError, match="does not exist") as failed:
            client.models.retrieve(name)
        assert failed.value.code == "model_not_found"
    assert client.completions.create(model="talk@prod", prompt="a b").choices[0].text == "a b"


def test_a_chat_whole_and_as_a_stream(client: Any) -> None:
    given: Any = {"model": "talk", "messages": user("Grüße an alle")}
    found = client.chat.completions.create(**given)
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Grüße an alle", "stop")
    assert (found.object, found.id[:9]) == ("chat.completion", "chatcmpl-")
    chunks = list(client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    assert texts(chunks) == ["", "Grüße", " an", " alle"]
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, None, None, "stop"]
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * 4
    expected = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    for usage in (found.usage, chunks[-1].usage):
        assert usage.model_dump(exclude_none=True) == expected
    assert chunks[-1].choices == []


def test_tokens_are_streamed_as_they_are_generated(client: Any, files: LanguageModels) -> None:
    with client.chat.completions.create(model="talk", messages=user("a GATE b"), stream=True) as stream:
        assert texts([next(stream), next(stream)]) == ["", "a"]
        open_gate(files.gate)
        assert texts(list(stream)) == [" GATE", " b"]


def test_a_model_with_a_messages_input_gets_the_chat_as_json(client: Any) -> None:
    messages: Any = [
        {"role": "system", "content": "S", "name": "n"},
        {"role": "user", "content": [{"type": "text", "text": "DOCUMENT"}]},
    ]
    form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    found = client.chat.completions.create(
        model="talk", messages=messages, tools=TOOLS, tool_choice="auto", response_format=form,
        parallel_tool_calls=False, reasoning_effort="low",
        extra_body={"chat_template_kwargs": {"a": 1}, "add_generation_prompt": False},
    )  # fmt: skip
    assert json.loads(found.choices[0].message.content or "") == {
        "messages": messages,
        "tools": TOOLS,
        "tool_choice": "auto",
        "response_format": form,
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"a": 1, "reasoning_effort": "low"},
        "add_generation_prompt": False,
    }


def test_tool_calls(client: Any) -> None:
    expected = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"x": 1}'}}
    (choice,) = client.chat.completions.create(model="talk", messages=user("CALL"), tools=TOOLS).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert [call.model_dump(exclude_none=True) for call in choice.message.tool_calls or ()] == [expected]
    with client.chat.completions.stream(model="talk", messages=user("CALL"), tools=TOOLS) as stream:
        (whole,) = stream.get_final_completion().choices
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls or []
    assert (call.id, call.function.name, call.function.arguments) == ("call_1", "weather", '{"x": 1}')


def test_structured_outputs_enforce_tool_calls(client: Any) -> None:
    """The text of the model, which is its sampling parameters, becomes the arguments of the function."""
    given: dict[str, Any] = {"model": "vllm", "messages": user("PARAMETERS"), "tools": TOOLS}
    schema = {"json": TOOLS[0]["function"]["parameters"]}
    (choice,) = client.chat.completions.create(tool_choice=function("weather"), **given).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "weather")
    assert json.dumps(json.dumps(schema, separators=(",", ":"))) in call.function.arguments


def test_chats_of_a_triton_vllm_model_use_its_chat_template(client: Any) -> None:
    """The gateway renders the chat template of the model's configuration."""
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]},
        {"role": "assistant", "content": "PARAMETERS"},
    ]
    form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    found = client.chat.completions.create(
        model="vllm",
        messages=messages,
        response_format=form,
        n=1,
        extra_body={"chat_template_kwargs": {"style": "brief"}},
    )
    sampling = {"max_tokens": 20, "n": 1, "structured_outputs": '{"json":{"type":"object"}}'}
    text = json.dumps(sampling, sort_keys=True)
    assert found.choices[0].message.content == f"user: hi you assistant: {text} brief</s>"


def test_a_request_after_a_reload_uses_the_new_configuration(client: Any, server: Server) -> None:
    """Although gateways keep configurations."""
    with server.client() as native:
        config = native.config("vllm")
        for template in "one", "two", TEMPLATE:
            config["parameters"]["chat_template"]["string_value"] = template
            native.load("vllm", config=config)
            for _ in range(2):
                found = client.chat.completions.create(model="vllm", messages=user("a"))
                assert found.choices[0].message.content == {TEMPLATE: "user: a </s>"}.get(template, template)


def test_the_thinking_of_a_model_is_not_its_answer(client: Any) -> None:
    given: Any = {"model": "thinks", "messages": user("<think> hm ü </think> yes no")}
    message = client.chat.completions.create(**given).choices[0].message
    assert (message.reasoning_content, message.content) == (" hm ü ", " yes no")
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**given, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == " hm ü "
    assert "".join(delta.content or "" for delta in deltas) == " yes no"
    form = {"type": "json_object"}
    found = client.chat.completions.create(**given, response_format=form).choices[0].message
    assert found.content == "<think> hm ü </think> yes no"


def test_the_thinking_in_responses(client: Any) -> None:
    """It is an item before the message, and goes back to the model with the items of a later request."""
    given: dict[str, Any] = {"model": "thinks", "include": ["reasoning.encrypted_content"]}
    asked = user("<think> hm ü </think> yes no")
    whole = client.responses.create(input=asked, **given)
    with client.responses.stream(input=asked, **given) as stream:
        kinds = [event.type.removeprefix("response.") for event in stream]
        streamed = stream.get_final_response()
    for found in (whole, streamed):
        assert found.output_text == " yes no"
        assert [item.type for item in found.output] == ["reasoning", "message"]
        assert [part.text for part in found.output[0].content] == [" hm ü "]
    assert kinds.index("reasoning_text.done") < kinds.index("output_text.delta") < kinds.index("output_text.done")
    items = [item.model_dump(exclude_none=True) for item in whole.output]
    later = client.responses.create(model="talk", input=[*asked, *items, *user("DOCUMENT")])
    assert json.loads(later.output_text)["messages"][1]["reasoning_content"] == " hm ü "


def test_the_thinking_in_messages(client: Any) -> None:
    given: dict[str, Any] = {"model": "thinks", "max_tokens": 99, "messages": user("<think> hm </think> yes no")}
    with anthropic.Anthropic(base_url=str(client.base_url).removesuffix("/v1/"), api_key="none") as claude:
        enabled = {"type": "enabled", "budget_tokens": 1024}
        whole = claude.messages.create(thinking=enabled, **given)
        with claude.messages.stream(thinking=enabled, **given) as stream:
            streamed = stream.get_final_message()
        for found in (whole, streamed):
            assert [block.type for block in found.content] == ["thinking", "text"]
            assert (found.content[0].thinking, found.content[1].text) == (" hm ", " yes no")
        assert [block.type for block in claude.messages.create(**given).content] == ["text"]
        history = [{"role": "assistant", "content": [block.model_dump() for block in whole.content]}, *user("DOCUMENT")]
        later = claude.messages.create(model="talk", max_tokens=99, messages=history, thinking={"type": "disabled"})
    document = json.loads(later.content[0].text)
    assert document["messages"][0]["reasoning_content"] == " hm "
    assert document["chat_template_kwargs"] == {"enable_thinking": False}


def test_log_probabilities_of_the_prompt(client: Any) -> None:
    given: dict[str, Any] = {"model": "talk", "extra_body": {"prompt_logprobs": 0}}
    expected = [None, {"b": {"logprob": -1.5, "rank": 1, "decoded_token": "b"}}]
    (choice,) = client.completions.create(prompt="a b", **given).choices
    assert choice.prompt_logprobs == expected
    (choice,) = client.chat.completions.create(messages=user("a b"), **given).choices
    assert choice.prompt_logprobs == expected


IMAGES = [b"\x89PNG" + bytes(range(256)) * size for size in (1, 300)]
"""The second one is larger than what is decoded at once."""


def data_url(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def test_images_of_a_chat(client: Any) -> None:
    """test_openai_engine.py sends them to all APIs."""
    text = {"type": "text", "text": "IMAGES DOCUMENT"}
    checksums = json.dumps([zlib.crc32(image) for image in IMAGES])
    images = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in IMAGES]
    content: Any = [images[0], text, images[1]]
    (choice,) = client.chat.completions.create(model="talk", messages=user(content)).choices
    placed = json.dumps([{"type": "image"}, text, {"type": "image"}], sort_keys=True)
    assert choice.message.content == f'{checksums} {{"messages": [{{"content": {placed}, "role": "user"}}]}}'
    content = [images[1], {"type": "text", "text": "IMAGES"}]
    (choice,) = client.chat.completions.create(model="vllm", messages=user(content)).choices
    assert choice.message.content == f"user: <image> [{zlib.crc32(IMAGES[1])}] </s>"


AUDIO = b"RIFF" + bytes(range(256)) * 10_000
"""Larger than the limit of JSON, and than what is searched at once."""


def test_transcriptions(client: Any) -> None:
    given: dict[str, Any] = {"model": "speech", "file": ("a.wav", AUDIO), "prompt": "AUDIO one"}
    text = f"{zlib.crc32(AUDIO)} one"
    found = client.audio.transcriptions.create(**given)
    assert (found.text, found.usage.type, found.usage.total_tokens) == (text, "tokens", 4)
    parameters = client.audio.transcriptions.create(
        **given | {"prompt": "PARAMETERS"}, language="de", temperature=0.5, response_format="text"
    )
    assert json.loads(parameters) == {"language": "de", "temperature": 0.5}
    events = list(client.audio.transcriptions.create(**given, stream=True))
    assert [event.delta for event in events[:-1]] == [text[:-4], " one"]
    assert (events[-1].type, events[-1].text) == ("transcript.text.done", text)
    verbose = client.audio.transcriptions.create(**given, response_format="verbose_json")
    assert [(one.start, one.end, one.text) for one in verbose.segments] == [(0, 0.5, "AUDIO"), (1, 1.5, "one")]
    assert (verbose.text, verbose.duration) == (text, 1.5)
    lines = ["00:00:00,000 --> 00:00:00,500", "AUDIO", "", "2", "00:00:01,000 --> 00:00:01,500", "one", "", ""]
    assert client.audio.transcriptions.create(**given, response_format="srt").split("\n") == ["1", *lines]
    vtt = client.audio.transcriptions.create(**given, response_format="vtt")
    assert vtt == "WEBVTT\n\n" + "\n".join(line for line in lines if line != "2").replace(",", ".")


@cases(
    ({"model": "talk"}, "NotFoundError", "is not a speech model: it has no input 'audio'"),
    ({"file": ("a.wav", b"")}, "BadRequestError", "the form has no 'file', or an empty one"),
    ({"temperature": 3}, "BadRequestError", "Invalid value for 'temperature'"),
    ({"response_format": "docx"}, "BadRequestError", "Invalid value for 'response_format'"),
    ({"include": ["logprobs"]}, "BadRequestError", "Unrecognized request argument supplied: include"),
    ({"stream": True, "response_format": "srt"}, "BadRequestError", "'stream' is not possible with the format srt"),
)
def test_refused_transcriptions(more: dict[str, Any], error: str, text: str, client: Any) -> None:
    with pytest.raises(getattr(openai, error), match=re.escape(text)):
        client.audio.transcriptions.create(**{"model": "speech", "file": ("a.wav", b"a"), **more})


def test_a_model_that_is_not_decoupled_streams_a_single_response(client: Any) -> None:
    found = client.completions.create(model="once", prompt=["a", "b"], n=2)
    assert [choice.text for choice in found.choices] == ["A", "A", "B", "B"]
    chunks = list(client.completions.create(model="once", prompt="a", stream=True))
    assert [(chunk.choices[0].text, chunk.choices[0].finish_reason) for chunk in chunks] == [("A", None), ("", "stop")]


def test_embeddings(client: Any) -> None:
    found = client.embeddings.create(model="embed", input="abc")
    (one,) = found.data
    assert one.embedding == pytest.approx([3, 1, 0.1])
    many = [f"{'b' * (number % 50)}" for number in range(1000)]
    for name in ("embed", "embedded"):
        vectors = client.embeddings.create(model=name, input=many, encoding_format="float").data
        assert [vector.index for vector in vectors] == list(range(1000))
        assert [vector.embedding[0] for vector in vectors] == [len(text) for text in many]


def test_embeddings_are_pooled(client: Any) -> None:
    """Without padding, which is at the beginning or the end, also for texts whose vectors are large."""
    for text, mean, first, last in (("_ac_", 98, 97, 99), ("a", 97, 97, 97), ("_" + "b" * 150_000 + "d", 98, 98, 100)):
        for pooling, code in (("mean", mean), ("cls", first), ("last", last)):
            expected = np.array([code, 2, 4, code], np.float32)
            if pooling != "mean":
                expected /= np.linalg.norm(expected)
            found = client.embeddings.create(model=f"pooled-{pooling}", input=[text, "_x"])
            assert found.data[0].embedding == pytest.approx(expected.tolist(), rel=1e-3)
            assert len(found.data[1].embedding) == 4


def test_documents_are_ranked(client: Any) -> None:
    documents = ["no", {"text": "a b"}, "a no", "a é" * 40_000]
    asked: dict[str, Any] = {"model": "overlap", "query": "a b", "documents": documents}
    found = post(client, "/v1/rerank", **asked)
    assert [one["index"] for one in found["results"]] == [1, 2, 3, 0]
    assert [one["relevance_score"] for one in found["results"]] == pytest.approx([1, 0.5, 1 / 40_001, 0])
    assert [one["document"]["text"] for one in found["results"]] == ["a b", "a no", documents[3], "no"]
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        best = post(client, path, **asked, top_n=1, return_documents=False)["results"]
        assert best == [{"index": 1, "relevance_score": 1}]
    many = post(client, "/v1/rerank", **asked | {"documents": ["a no"] * 1000})
    assert [one["index"] for one in many["results"]] == list(range(1000))
    assert many["usage"]["total_tokens"] == 4000


def test_scores_of_pairs(client: Any) -> None:
    for first, expected in (("a b", [1, 0.5]), (["a", "c d"], [0.5, 0.5])):
        found = post(
            client, "/v1/score", model="overlap", text_1=first, text_2=["a b", "a d" if first == "a b" else "d e"]
        )
        assert [(one["index"], one["score"]) for one in found["data"]] == list(enumerate(expected))
        assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"]


def pictures(*urls: str) -> Any:
    return user([{"type": "image_url", "image_url": {"url": url}} for url in urls])


CHAT, PROMPT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
VALID: dict[str, Any] = {
    CHAT: {"model": "talk", "messages": user("a")},
    PROMPT: {"model": "talk", "prompt": "a"},
    EMBED: {"model": "embed", "input": "abc"},
}
NOBODY = [{"role": "nobody", "content": "a"}]


@cases(
    (CHAT, {"tools": TOOLS, "tool_choice": "required"}, 500, "has called no tool, although 'tool_choice' demands it"),
    (CHAT, {"tools": TOOLS, "tool_choice": function("time")}, 400, "the function 'time', which is not in 'tools'"),
    (CHAT, {"model": "vllm", "tools": TOOLS}, 400, "cannot decide to call tools: it has no output 'tool_calls'"),
    (CHAT, {"model": "vllm", "messages": NOBODY}, 400, "refuses the messages: nobody may not speak"),
    (CHAT, {"model": "bare"}, 400, "neither an input 'messages' nor the parameter chat_template"),
    (CHAT, {"messages": pictures("https://example.com/cat.png")}, 400, "that begins with 'data:image/png;base64,'"),
    (CHAT, {"messages": pictures("file:///etc/passwd")}, 400, "has an image at another place than the request itself"),
    (CHAT, {"messages": pictures("data:image/png;base64,")}, 400, "an image of 0 characters in base64"),
    (CHAT, {"messages": pictures("data:image/png;base64,a b")}, 400, "not valid base64"),
    (CHAT, {"messages": pictures(*[data_url(b"a")] * 33)}, 400, "has 33 images; the limit is 32"),
    (CHAT, {"model": "vllm", "messages": pictures(*[data_url(b"a")] * 2)}, 400, "has 2 images; model 'vllm' needs 1"),
    (CHAT, {"model": "bare", "messages": pictures(data_url(b"a"))}, 400, "neither an input 'messages' nor the param"),
    (PROMPT, {"prompt_logprobs": 0, "stream": True}, 400, "'prompt_logprobs' is not possible with 'stream'"),
    (PROMPT, {"prompt_logprobs": 0, "model": "vllm"}, 400, "returns no log probabilities of prompts"),
    (EMBED, {"input": ["a"] * 2049}, 400, "'input' has 2049 elements; the limit is 2048"),
    (EMBED, {"encoding_format": "binary"}, 400, "expected 'float' or 'base64'"),
    (EMBED, {"truncate_prompt_tokens": 5}, 400, "model 'embed' does not cut texts"),
    (EMBED, {"input": ["a"] * 200 + ["FAIL"] + ["b"] * 200}, 500, "a text that fails"),
    (EMBED, {"model": "talk"}, 404, "does not compute embeddings"),
    (EMBED, {"model": "pooled-mean", "input": "_"}, 500, "the attention mask has 0 tokens"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": "a"}, 400, "'text_1' has 2 texts"),
    ("/v1/rerank", {"query": "a", "documents": []}, 400, "'documents' has 0 texts"),
    ("/v1/rerank", {"query": "a", "documents": [1]}, 400, "is neither a string nor an object"),
    ("/v1/score", {"model": "talk", "text_1": "a", "text_2": "b"}, 404, "does not compute scores"),
    ("/score", {"text_1": "a", "text_2": ["b", ""]}, 500, "division by zero"),
    ("/tokenize", {"model": "talk", "prompt": "a"}, 400, "cannot tokenize: it has no input 'task'"),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_requests_that_are_refused_or_fail(path: str, given: Any, status: int, text: str, client: Any) -> None:
    with pytest.raises(openai.APIStatusError, match=re.escape(text)) as failed:
        post(client, path, **VALID.get(path, {"model": "overlap"}) | given)
    assert failed.value.status_code == status


def test_errors(client: Any, gateway: Gateway) -> None:
    with pytest.raises(openai.NotFoundError, match="'nothing' is not found") as missing:
        client.completions.create(model="nothing", prompt="a")
    assert (missing.value.type, missing.value.code) == ("invalid_request_error", "model_not_found")
    with pytest.raises(openai.InternalServerError, match="a word that fails") as failed:
        client.completions.create(model="talk", prompt="a FAIL")
    assert (failed.value.status_code, failed.value.type, failed.value.code) == (500, "server_error", "model_failed")
    with pytest.raises(openai.BadRequestError, match="Unrecognized request argument supplied: odd") as odd:
        client.completions.create(model="talk", prompt="a", extra_body={"odd": 1})
    assert (odd.value.param, odd.value.code) == ("odd", "unknown_parameter")
    with pytest.raises(openai.BadRequestError, match="--limit http_json_bytes"):
        client.completions.create(model="talk", prompt="a" * 200_001)
    for method, path, body, status in (
        ("POST", "/v1/models", None, 405),
        ("GET", "/v1/nothing", None, 404),
        ("POST", "/v1/chat/completions", b"\xff", 400),
    ):
        found, text = gateway.ask(method, path, body)
        error = json.loads(text)["error"]
        assert (found, error["type"]) == (status, "invalid_request_error")
        assert error.keys() == {"code", "message", "param", "type"}
    with gateway.socket() as made:
        made.sendall(
            b'POST /v1/completions HTTP/1.0\r\nContent-Length: 43\r\n\r\n{"model":"talk","prompt":"a","stream":true}'
        )
        answer = b"".join(iter(lambda: made.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"a stream requires HTTP/1.1" in answer


def test_an_error_in_the_middle_of_a_stream(client: Any) -> None:
    """The client raises the error; the stream has no end mark, so it does not look complete."""
    stream = client.completions.create(model="talk", prompt="a b FAIL c", stream=True)
    assert [next(stream).choices[0].text for _ in range(2)] == ["a", " b"]
    with pytest.raises(openai.APIError, match="a word that fails"):
        next(stream)
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="talk", prompt="FAIL", stream=True)


def test_closing_a_stream_cancels_the_model(client: Any, server: Server, files: LanguageModels) -> None:
    several = client.completions.create(model="talk", prompt=["FOREVER x", "FOREVER y"], stream=True)
    seen: set[str] = set()
    while len(seen) < 2:
        seen.add(next(several).choices[0].text)
    several.close()
    with server.client() as native:
        until(native, lambda: len(files.log.read_text().splitlines()) == 2, "the end of the sequences")


def test_allow_openai_false_removes_the_endpoints(server: Server) -> None:
    gateway = Gateway(server, "--allow-openai=false")
    assert gateway.ask("GET", "/v1/models")[0] == 404
    assert gateway.ask("POST", "/v1/completions", {"model": "talk", "prompt": "a"})[0] == 404
    paths = json.loads(gateway.ask("GET", "/v2/openapi.json")[1])["paths"]
    assert "/v2/models/{model}/infer" in paths
    assert not any(path.startswith("/v1") for path in paths)
    gateway.stop()


def test_connection_shares_restrictions_and_forwarded_headers(server: Server) -> None:
    """A request whose prompts exceed the share of its connection sends them one after another."""
    options = ("--limit=caller_share=0.0003", "--http-header-forward-pattern", "x-.*")
    gateway = Gateway(server, *options, "--http-restricted-api", "inference:admin-key=open sesame")
    url, key = f"127.0.0.1:{gateway.http}", {"admin-key": "open sesame"}
    with openai_client(url) as client, pytest.raises(openai.PermissionDeniedError, match="expecting header") as denied:
        client.embeddings.create(model="embed", input="a")
    assert denied.value.code == "insufficient_permissions"
    with openai_client(url, default_headers=key | {"x-tenant": "me"}) as client:
        found = client.completions.create(model="bare", prompt=["a"] * 50)
        assert [choice.text for choice in found.choices] == ["a"] * 50
        vectors = client.embeddings.create(model="embed", input=["a"] * 100)
        assert [vector.index for vector in vectors.data] == list(range(100))
        text = client.completions.create(model="bare", prompt="PARAMETERS").choices[0].text
        assert json.loads(text)["x-tenant"] == "me"
    gateway.stop()


def test_chat_prints_one_answer(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{gateway.http}"
    assert run("chat", "talk", "one", "two", "--url", url) == (0, "one two\n", "")
    assert run("chat", "thinks", "<think>one</think>two", "--url", f"{url}/v1") == (0, "two\n", "")
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert run("chat", "talk", "--url", url) == (0, "from a pipe\n", "")
    code, _, err = run("chat", "absent", "a", "--url", url)
    assert (code, err) == (
        1,
        "shmserve chat: Request for unknown model: 'absent' is not found; `shmserve models` lists the models\n",
    )
    code, _, err = run("chat", "talk", "a", "--url", "http://127.0.0.1:1")
    assert code == 1
    assert "no server at http://127.0.0.1:1" in err


def test_chat_remembers_the_conversation_and_stops_answers(gateway: Gateway) -> None:
    command = [*COMMAND, "chat", "thinks", "--system", "S", "--url", f"http://127.0.0.1:{gateway.http}"]
    with Terminal(command, 200, 50, {"TERM": "dumb"}) as terminal:

        def shown(typed: str, end: str = "the first after") -> str:
            terminal.until("> ")
            terminal.press(f"{typed}\n")
            return terminal.until(end)

        assert "one two" in shown("one two")
        shown("FOREVER again", "again again again")
        terminal.press("\x03")
        terminal.until("(stopped)")
        document = shown("DOCUMENT").replace("\n", "")
        for text in ('"S"', '"one two"', '"FOREVER again"', "again again again"):
            assert text in document, document
        shown("/clear\nDOCUMENT", "DOCUMENT")
        assert "FOREVER" not in terminal.until("the first after")
        found = shown("<think> hm </think> yes")
        assert re.search(r" hm[^>]*\n yes", found), "the thinking, and on another line the answer"
        terminal.until("> ")
        terminal.press("\x04")
        assert terminal.ends() == 0

"""Requests as JSON: accepted and refused fields, errors, and the resulting tensors; and what requests in
Anthropic's form refuse before a model is asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shmserve.errors import BY_CODE, InvalidRequest, NotFound, ServeError, Unsupported
from shmserve.gateway.kserve.plans import RequestOptions
from shmserve.gateway.limits.caller_shares import ShareExceeded
from shmserve.gateway.openai import bodies, errors, inputs, messages, models
from shmserve.gateway.openai.errors import BadParameter
from tests.support.cases import cases

USER = [{"role": "user", "content": "a"}]


def config(names: str, outputs: str = "text_output", **more: Any) -> dict[str, Any]:
    """Inputs and outputs by name, of the type STRING unless it is given after a colon."""

    def tensors(text: str) -> list[dict[str, Any]]:
        split = [word.partition(":") for word in text.split()]
        return [{"name": name, "data_type": f"TYPE_{dtype or 'STRING'}", "dims": ["1"]} for name, _, dtype in split]

    return {"max_batch_size": 0, "input": tensors(names), "output": tensors(outputs), **more}


def parameter(value: str) -> dict[str, str]:
    return {"string_value": value}


TALK = models.language_model(
    "m", config("text_input messages sampling_parameters stream:BOOL", "text_output tool_calls")
)


@cases(
    ("stop[0]", [1], "Expected `str`"),
    ("echo", True, "not possible with 'stream'"),
    ("model", 1, "Expected `str`, got `int`"),
    ("temperature", "hot", "Expected `float | null`, got `str`"),
    ("temperature", 2.5, "<= 2.0"),
    ("n", 0, ">= 1"),
    ("n", 129, "<= 128"),
    ("n", True, "got `bool`"),
    ("max_tokens", -1, ">= 0"),
    ("logprobs", 21, "<= 20"),
    ("seed", 2**63, ""),
    ("priority", -1, ">= 0"),
    ("stop", "", "contains an empty string"),
    ("stop", ["a", ""], "contains an empty string"),
    ("stop", ["a"] * 65, "length <= 64"),
    ("stream_options", {}, "needs 'stream'"),
    ("logit_bias", {"a": 1}, "must be token ids"),
    ("best_of", 2, "equal to 'n'"),
    ("functions", [], "Unrecognized request argument supplied: functions"),
    ("sampling_parameters", {"n": 2}, "'n' must be a field of the request itself"),
    ("sampling_parameters", {"logprobs": 2}, "'logprobs' must be a field"),
    ("prompt", [], "empty list"),
    ("prompt", ["a", 1], "neither a string, a list of strings"),
    ("prompt", [[]], "neither a string, a list of strings"),
    ("prompt", [-1], "neither a string, a list of strings"),
    ("prompt", [2**31], "neither a string, a list of strings"),
    ("prompt", ["a"] * 513, "has 513 elements; the limit is 512"),
    ("prompt", {}, "got `object`"),
    ("prompt", [1], "model 'm' takes no token ids"),
    ("suffix", "b", "model 'm' cannot fill in the middle of a text"),
)
def test_invalid_completions(param: str, value: Any, text: str) -> None:
    more = {"logprobs": 1, "stream": True} if param == "echo" else {}
    refused(complete, {"model": "m", "prompt": "a", **more, param.removesuffix("[0]"): value}, param, text)


def refused(decode: Callable[[dict[str, Any]], Any], document: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(BadParameter) as caught:
        decode(document)
    assert caught.value.param == param
    assert text in str(caught.value)


def complete(document: dict[str, Any]) -> Any:
    request = bodies.completion(json.dumps(document).encode())
    prompts = inputs.Prompts(TALK, request)
    return list(prompts.tensors()), prompts.texts, inputs.sampling_of(TALK, request, request.logprobs)


@cases(
    ({"messages": []}, "messages", "is empty"),
    ({"max_tokens": 0}, "max_tokens", ">= 1"),
    ({"messages": "a"}, "messages", "Expected `array`"),
    ({"messages": [1]}, "messages[0]", "Expected `object`"),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "not a string"),
    ({"messages": [*USER, {"role": "user", "content": 1}]}, "messages[1].content", "neither a string nor a list"),
    ({"top_logprobs": 2}, "top_logprobs", "needs 'logprobs'"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
    ({"modalities": ["text", "audio"]}, "modalities", "only supported modality"),
    ({"function_call": "auto"}, "function_call", "needs 'functions'"),
    ({"functions": [], "tools": []}, "functions", "not possible with 'tools'"),
    ({"tools": [1]}, "tools[0]", "Expected `object`"),
)
def test_invalid_chats(change: dict[str, Any], param: str, text: str) -> None:
    document = {"model": "m", "messages": USER, **change}
    refused(lambda document: bodies.chat(json.dumps(document).encode()), document, param, text)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b'"\xed\xa0\x80"', b"[" * 200 + b"]" * 200, b"{}"])
def test_bodies_that_are_not_a_request_are_refused(text: bytes) -> None:
    for decode in (bodies.completion, bodies.chat, bodies.embedding):
        with pytest.raises(InvalidRequest):
            decode(text)


def test_fields_without_effect_and_null() -> None:
    ignored = dict.fromkeys(("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"), "x")
    empty: dict[str, Any] = dict.fromkeys(("stop", "n", "temperature", "logit_bias", "stream", "seed", "logprobs"))
    assert complete({"model": "m", "prompt": "a", **ignored, **empty})[2] == {}
    ignored_in_chats = {"verbosity": "low", "prediction": {"type": "content", "content": "x"}}
    chat = bodies.chat(json.dumps({"model": "m", "messages": USER, "tools": None, **ignored_in_chats}).encode())
    assert inputs.sampling_of(TALK, chat, None) == {}
    options = {"include_obfuscation": False, "usage": True}
    refused(complete, {"model": "m", "prompt": "a", "stream": True, "stream_options": options}, "usage", "Unrecognized")


def test_fields_of_vllm_are_sampling_parameters() -> None:
    """In the request, as in vLLM, or in `sampling_parameters`, as long as this server did not know them."""
    fields = {
        "allowed_token_ids": [1], "bad_words": ["a"], "include_stop_str_in_output": True, "skip_special_tokens": False,
        "spaces_between_special_tokens": False, "truncate_prompt_tokens": 5,
    }  # fmt: skip
    for given in (fields, {"sampling_parameters": fields}):
        assert complete({"model": "m", "prompt": "a", **given})[2] == fields
    form = {"type": "json_object"}
    assert complete({"model": "m", "prompt": "a", "response_format": form})[2] == {
        "structured_outputs": '{"json_object":true}'
    }
    both = {"model": "m", "prompt": "a", "response_format": form, "structured_outputs": {"choice": ["a"]}}
    refused(complete, both, "structured_outputs", "not possible with 'response_format'")


def test_prompts_and_parameters_become_tensors() -> None:
    ((prompt,), (second,)), texts, _ = complete({"model": "m", "prompt": ["h\u00e9", ""]})
    assert (prompt.name, prompt.dtype, prompt.shape, prompt.data) == ("text_input", "BYTES", (1,), b"\3\0\0\0h\xc3\xa9")
    assert second.data == bytes(4)
    assert texts == ["h\u00e9", ""]
    sampling = inputs.SamplingInputs(TALK, {"n": 2}, RequestOptions("id"), 1)
    (parameters,) = sampling.tensors(0)
    assert (parameters.name, parameters.data) == ("sampling_parameters", b'\x07\0\0\0{"n":2}')
    assert sampling.options(0) == RequestOptions("id")
    (flag,) = inputs.flag_tensors(TALK, ["stream", "return_logprobs"])
    assert (flag.name, flag.data) == ("stream", b"\1")


def test_each_separate_choice_has_another_seed() -> None:
    sampling = inputs.SamplingInputs(TALK, {"n": 3, "seed": 5, "top_k": 1}, RequestOptions(), 3)
    found = [json.loads(bytes(sampling.tensors(number)[0].data[4:])) for number in range(3)]  # type: ignore[index]
    assert found == [{"top_k": 1, "seed": 5 + number} for number in range(3)]
    only_seed = inputs.SamplingInputs(TALK, {"n": 2, "seed": 5}, RequestOptions(), 2)
    assert only_seed.tensors(1)[0].data == b'\x0a\0\0\0{"seed":6}'
    bare = models.language_model("m", config("text_input"))
    assert inputs.SamplingInputs(bare, {"n": 2, "seed": 5}, RequestOptions(), 2).options(1).parameters == {"seed": 6}


def test_large_sampling_parameters_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="have 1048584 bytes of JSON; the limit is 1048576"):
        inputs.SamplingInputs(TALK, {"x": "y" * (1 << 20)}, RequestOptions(), 1)


def test_fields_without_an_input_become_request_options_or_parameters() -> None:
    model = models.language_model("m", config("text_input"))
    request = bodies.completion(b'{"model": "m", "prompt": "a", "priority": 2, "timeout": 5, "temperature": 0.5}')
    options = bodies.request_options("id", request)
    sampling = inputs.SamplingInputs(model, inputs.sampling_of(model, request, None), options, 1)
    assert sampling.tensors(0) == []
    assert sampling.options(0) == RequestOptions("id", 2, parameters={"timeout": 5, "temperature": 0.5})
    for wrong, text in (({"triton_x": 1}, "reserved"), ({"x": [1]}, "which 'x' needs"), ({"x": 2**64}, "64 bits")):
        with pytest.raises(InvalidRequest, match=text):
            inputs.SamplingInputs(model, wrong, options, 1).options(0)


def test_token_ids_and_batches() -> None:
    given = config("text_input prompt_token_ids:INT64", max_batch_size=4)
    given["input"][1]["dims"] = ["-1"]
    model = models.language_model("m", given)
    request = bodies.completion(b'{"model": "m", "prompt": [[1, 2, 3]]}')
    ((empty, ids),) = inputs.Prompts(model, request).tensors()
    assert (empty.shape, empty.data) == ((1, 1), bytes(4))
    assert (ids.shape, ids.data) == ((1, 3), np.array([1, 2, 3]).tobytes())


def test_the_limit_of_a_model_for_tokens() -> None:
    for value, expected in (("30", 30), ("none", None), ("0", None)):
        model = models.language_model("m", config("text_input", parameters={"default_max_tokens": parameter(value)}))
        request = bodies.completion(b'{"model": "m", "prompt": "a"}')
        if expected is None:
            with pytest.raises(InvalidRequest, match="default_max_tokens"):
                inputs.sampling_of(model, request, None)
        else:
            assert inputs.sampling_of(model, request, None) == {"max_tokens": 30}
        given = bodies.completion(b'{"model": "m", "prompt": "a", "max_tokens": 7}')
        assert inputs.sampling_of(model, given, None) == {"max_tokens": 7}


def test_fields_of_messages_that_templates_know() -> None:
    messages = [{"role": "developer", "content": ""}, {"role": "assistant", "content": "", "reasoning": "a"}]
    chat = bodies.chat(json.dumps({"model": "m", "messages": messages}).encode())
    assert chat.messages == [
        {"role": "system", "content": ""},
        {"role": "assistant", "content": "", "reasoning_content": "a"},
    ]


def test_variables_of_the_chat_template() -> None:
    own = {"chat_template_kwargs": parameter('{"a": 1, "b": 1, "reasoning_effort": "high"}')}
    model = models.language_model("m", config("text_input", parameters=own))
    given = {"reasoning_effort": "low", "chat_template_kwargs": {"b": 2}}
    chat = bodies.chat(json.dumps({"model": "m", "messages": USER, **given}).encode())
    assert inputs.template_arguments(model, chat) == {"a": 1, "b": 2, "reasoning_effort": "low"}


@cases(
    ({"type": "text"}, {}),
    ({"type": "json_object"}, {"structured_outputs": '{"json_object":true}'}),
    ({"type": "json_schema", "json_schema": {"schema": {"a": 1}}}, {"structured_outputs": '{"json":{"a":1}}'}),
    ({"type": "json_object", "schema": {"a": 1}}, {"structured_outputs": '{"json":{"a":1}}'}),
    ({"type": "json_schema", "json_schema": {}}, None),
    ({"type": "other"}, None),
    ({}, None),
)
def test_formats_for_models_without_messages(form: dict[str, Any], expected: dict[str, Any] | None) -> None:
    model = models.language_model("m", config("text_input sampling_parameters"))
    chat = bodies.chat(json.dumps({"model": "m", "messages": USER, "response_format": form}).encode())
    if expected is None:
        with pytest.raises(BadParameter, match="response_format"):
            inputs.sampling_of(model, chat, None)
    else:
        assert inputs.sampling_of(model, chat, None) == expected
    assert inputs.sampling_of(TALK, chat, None) == {}


@cases(
    (config("text", "y:FP32"), ("text", "y")),
    (config("anything", "y:FP16"), ("anything", "y")),
    (config("a TEXT", "y:FP32"), None),
    (config("a:FP32", "y:FP32"), None),
    (config("a", "y:INT32"), None),
    (config("a", "y:FP32 z:FP32"), None),
    (config("a", "y:FP32 label"), None),
    (config("a", "y:FP32 num_input_tokens:UINT32"), ("a", "y")),
    (config("a", "y:FP32 label", parameters={"embedding_output": parameter("y")}), ("a", "y")),
    (config("a n:INT32", "y:FP32"), None),
    (config("a", "y:FP32 z:FP32", parameters={"embedding_output": parameter("z")}), ("a", "z")),
    (config("a", "y:FP32", parameters={"embedding_output": parameter("none")}), None),
    (config("a", "y:FP32", model_transaction_policy={"decoupled": True}), None),
    (config("text_input", "text_output"), None),
    ({}, None),
)
def test_models_for_embeddings(given: dict[str, Any], expected: tuple[str, str] | None) -> None:
    if expected is None:
        with pytest.raises(NotFound, match="does not compute embeddings"):
            models.embedding_model("m", given)
        return
    found = models.embedding_model("m", given)
    assert (found.input.name, found.output) == expected
    assert models.is_listed("m", given) is ("parameters" in given)


def test_listed_models() -> None:
    """A classifier of texts is not listed."""
    assert models.is_listed("m", config("text_input", "text_output"))
    assert models.is_listed("m", config("text", "sentence_embedding:FP32"))
    assert not models.is_listed("m", config("text", "scores:FP32"))
    assert not models.is_listed("m", {})


def test_optional_inputs_are_ignored_when_the_input_is_chosen() -> None:
    given = config("a text n:INT32", "y:FP32", parameters={"embedding_input": parameter("a")})
    given["input"][1]["optional"] = given["input"][2]["optional"] = True
    assert models.embedding_model("m", given).input.name == "a"
    given["parameters"] = {}
    given["input"][0]["optional"], given["input"][1]["optional"] = True, False
    assert models.embedding_model("m", given).input.name == "text"


@pytest.mark.parametrize(
    "given", [config("text_input:FP32"), config("text"), config("text_input", "text_output:FP32"), {}]
)
def test_models_that_are_not_language_models_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(NotFound, match="is not a language model"):
        models.language_model("m", given)


@cases(
    (InvalidRequest("a\udc80"), 400, "invalid_request_error", None),
    (BadParameter("n", "a"), 400, "invalid_request_error", None),
    (NotFound("a"), 404, "invalid_request_error", "model_not_found"),
    (Unsupported("a"), 400, "invalid_request_error", "unsupported"),
    (ShareExceeded("a"), 429, "requests", "rate_limit_exceeded"),
    (ServeError("a"), 400, "invalid_request_error", None),
    (BY_CODE["UNAVAILABLE"]("a"), 503, "server_error", "unavailable"),
    (BY_CODE["QUEUE_TIMEOUT"]("a"), 503, "server_error", "queue_timeout"),
    (BY_CODE["DEADLINE_EXCEEDED"]("a"), 504, "server_error", "deadline_exceeded"),
    (BY_CODE["MODEL_FAILED"]("a"), 500, "server_error", "model_failed"),
)
def test_errors_have_the_form_of_openai(error: ServeError, status: int, kind: str, code: str | None) -> None:
    found, body = errors.response(error)
    document = json.loads(body)["error"]
    assert (found, document["type"], document["code"]) == (status, kind, code)
    assert document["param"] == ("n" if isinstance(error, BadParameter) else None)


def result(content: Any) -> list[dict[str, Any]]:
    return [{"type": "tool_result", "tool_use_id": "t", "content": content}]


@cases(
    (5, "is neither a string nor a list"),
    (result(5), "is neither a string nor a list"),
    (result([{"type": "image"}]), "a part of the type 'image'; only texts are supported"),
    ([{"type": "text", "text": 5}], "only texts and images are supported"),
    (["tool_result"], "a block that is not an object"),
    ([{"type": "tool_use"}], "of the role 'user' has an unsupported block of the type 'tool_use'"),
)
def test_contents_that_are_no_texts(content: Any, text: str) -> None:
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    with pytest.raises(BadParameter, match=text):
        messages.request_of(json.dumps(body).encode())


@pytest.mark.parametrize("kind", ["some", [], {}, None])
def test_unknown_types_of_tool_choice_are_refused(kind: Any) -> None:
    body = {"model": "m", "max_tokens": 1, "messages": USER, "tool_choice": {"type": kind}}
    with pytest.raises(BadParameter, match="must be 'auto', 'any', 'tool' or 'none'"):
        messages.request_of(json.dumps(body).encode())


def test_a_result_of_a_tool_is_a_message_of_its_own() -> None:
    content = [*result("warm"), {"type": "text", "text": "And?"}]
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    assert messages.request_of(json.dumps(body).encode())[0].messages == [
        {"role": "tool", "tool_call_id": "t", "content": "warm"},
        {"role": "user", "content": [{"type": "text", "text": "And?"}]},
    ]

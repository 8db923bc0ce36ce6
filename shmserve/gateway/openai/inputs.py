"""The tensors of a request to a language model: the prompt, the sampling parameters, and the requested outputs."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from shmserve.errors import InvalidRequest
from shmserve.gateway.kserve.plans import InputPlan, RequestOptions, RequestPlan, options_of
from shmserve.gateway.openai import bodies
from shmserve.gateway.openai.bodies import ChatRequest, Sampling
from shmserve.gateway.openai.errors import BadParameter
from shmserve.gateway.openai.models import MESSAGES, PROMPT, SAMPLING, TOKENS, TOOL_CALLS, LanguageModel

DEFAULT_MAX_TOKENS = "default_max_tokens"
"""Model parameter: `max_tokens` for requests without one."""
_INTEGERS = {"INT32": np.int32, "INT64": np.int64, "UINT32": np.uint32, "UINT64": np.uint64}
_TRUE = b"\1"
_encode = msgspec.json.Encoder().encode


def text_tensor(model: LanguageModel, name: str, text: bytes) -> InputPlan:
    return model.inputs[name].plan(len(text).to_bytes(4, "little") + text)


def prompt_tensors(model: LanguageModel, request: bodies.CompletionRequest) -> tuple[list[list[InputPlan]], list[str]]:
    """The tensors of each prompt; and the prompts, if they are texts."""
    texts, tokens = bodies.texts_or_tokens("prompt", request.prompt, bodies.PROMPTS)
    if texts:
        return [[text_tensor(model, PROMPT, text.encode())] for text in texts], texts
    spec = model.inputs.get(TOKENS)
    if spec is None or spec.dtype not in _INTEGERS:
        raise BadParameter(
            "prompt", f"model '{model.name[:80]}' takes no token ids: it has no input '{TOKENS}'; send the text instead"
        )
    if request.echo:
        raise BadParameter("echo", "'echo' needs prompts that are texts")
    empty = text_tensor(model, PROMPT, b"")
    kind = _INTEGERS[spec.dtype]
    return [[empty, spec.plan(np.array(ids, kind).tobytes(), len(ids))] for ids in tokens], []


def chat_tensors(model: LanguageModel, request: ChatRequest) -> list[InputPlan]:
    """For a model that applies its own chat template."""
    document: dict[str, Any] = {"messages": request.messages}
    more = {
        "tools": request.tools, "tool_choice": request.tool_choice, "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": request.response_format, "chat_template_kwargs": template_arguments(request) or None,
    }  # fmt: skip
    document |= {name: value for name, value in more.items() if value is not None}
    return [text_tensor(model, PROMPT, b""), text_tensor(model, MESSAGES, _encode(document))]


def template_arguments(request: ChatRequest) -> dict[str, Any]:
    arguments = request.chat_template_kwargs or {}
    return arguments if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort} | arguments


def check_tools(model: LanguageModel, request: ChatRequest) -> None:
    if request.tools and request.tool_choice != "none" and TOOL_CALLS not in model.outputs:
        raise BadParameter("tools", f"model '{model.name[:80]}' cannot call tools: it has no output '{TOOL_CALLS}'")


def sampling_of(model: LanguageModel, request: Sampling, logprobs: int | None) -> dict[str, Any]:
    """`logprobs`: number of alternatives for each token; None: no log probabilities."""
    found = bodies.sampling(request)
    limit = bodies.max_tokens(request)
    if limit is None and DEFAULT_MAX_TOKENS in model.parameters and "max_tokens" not in found:
        limit = _default_max_tokens(model)
    if limit is not None:
        found["max_tokens"] = limit
    if logprobs is not None:
        found["logprobs"] = logprobs
    if isinstance(request, ChatRequest) and MESSAGES not in model.inputs:
        found |= _structured(request.response_format)
    return found


def one_choice(sampling: dict[str, Any], number: int, of: int) -> dict[str, Any]:
    """Sampling parameters for choice `number` of a prompt whose choices are separate requests: each has a different
    seed.

    Triton's vLLM backend returns one text, whatever `n` is.
    """
    if of == 1:
        return sampling
    found = {name: value for name, value in sampling.items() if name != "n"}
    if type(found.get("seed")) is int:
        found["seed"] += number
    return found


def request_plan(
    model: LanguageModel, tensors: list[InputPlan], sampling: dict[str, Any], options: RequestOptions, wanted: list[str]
) -> RequestPlan:
    """`wanted`: BOOL inputs to set if the model has them."""
    inputs = list(tensors)
    if sampling and SAMPLING in model.inputs:
        inputs.append(text_tensor(model, SAMPLING, _encode(sampling)))
    elif sampling:
        bodies.check_scalars(sampling)
        given = options_of(options.id, sampling)
        options = replace(options, parameters={**(options.parameters or {}), **(given.parameters or {})})
    for name in wanted:
        spec = model.inputs.get(name)
        if spec is not None:
            inputs.append(spec.plan(_TRUE))
    return RequestPlan(tuple(inputs), 0, options)


def wanted_flags(model: LanguageModel, stream: bool, usage: bool, logprobs: bool) -> list[str]:
    if logprobs and "return_logprobs" not in model.inputs:
        raise BadParameter(
            "logprobs", f"model '{model.name[:80]}' returns no log probabilities: it has no input 'return_logprobs'"
        )
    flags = ["exclude_input_in_output", "return_finish_reason"]
    if stream:
        flags.append("stream")
    if usage:
        flags += ["return_num_input_tokens", "return_num_output_tokens"]
    if logprobs:
        flags += ["return_logprobs", "return_token_ids"]
    return flags


def _default_max_tokens(model: LanguageModel) -> int:
    text = model.parameters[DEFAULT_MAX_TOKENS]
    if not text.isdecimal() or not 0 < int(text[:12]) < 2**31:
        raise InvalidRequest(
            f"the parameter {DEFAULT_MAX_TOKENS} of model '{model.name[:80]}' is {text[:40]!r}; expected a number from "
            f"1 to {2**31 - 1}"
        )
    return int(text)


def _structured(response_format: dict[str, Any] | None) -> dict[str, Any]:
    """The sampling parameter of vLLM for the format of the response."""
    kind = "text" if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return {}
    wanted: dict[str, Any] = {"json_object": True}
    if kind == "json_schema":
        schema = response_format.get("json_schema")
        if type(schema) is not dict or type(schema.get("schema")) is not dict:
            raise BadParameter("response_format", "'response_format.json_schema.schema' is not an object")
        wanted = {"json": schema["schema"]}
    elif kind != "json_object":
        raise BadParameter(
            "response_format.type", "'response_format.type' must be 'text', 'json_object' or 'json_schema'"
        )
    return {"structured_outputs": _encode(wanted).decode()}

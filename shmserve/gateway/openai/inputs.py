"""The tensors of a request to a language model: the prompt, the sampling parameters, and the requested outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from shmserve.errors import InvalidRequest
from shmserve.gateway.kserve.json_strings import CutStrings
from shmserve.gateway.kserve.plans import InputPlan, RequestOptions, options_of
from shmserve.gateway.limits.turns import SlicedWork
from shmserve.gateway.openai import bodies
from shmserve.gateway.openai.bodies import ChatRequest, Sampling
from shmserve.gateway.openai.errors import BadParameter
from shmserve.gateway.openai.models import (
    MESSAGES,
    PROMPT,
    PROMPT_LOGPROBS,
    SAMPLING,
    SUFFIX,
    TASK,
    TOKENS,
    TOOL_CALLS,
    LanguageModel,
)
from shmserve.llm.tool_choice import ForcedCalls

DEFAULT_MAX_TOKENS = "default_max_tokens"
"""Model parameter: `max_tokens` for requests without one."""
TEMPLATE_ARGUMENTS = "chat_template_kwargs"
"""Model parameter: variables of the chat template for requests without them."""
SAMPLING_BYTES = 1 << 20
"""Maximum size of the sampling parameters in JSON."""
_INTEGERS = {"INT32": np.int32, "INT64": np.int64, "UINT32": np.uint32, "UINT64": np.uint64}
_TRUE = b"\1"
_encode = msgspec.json.Encoder().encode


class Prompts:
    """The prompts of a request. Their tensors are made one by one, when they are sent."""

    def __init__(self, model: LanguageModel, request: bodies.CompletionRequest) -> None:
        self._model = model
        self.texts, self._tokens = bodies.texts_or_tokens("prompt", request.prompt, bodies.PROMPTS)
        self.bytes = sum(map(len, self.texts)) + 4 * sum(map(len, self._tokens))
        """Approximate size of the prompts."""
        self._suffix: list[InputPlan] = []
        if request.suffix:
            if SUFFIX not in model.inputs:
                text = f"model '{model.name[:80]}' cannot fill in the middle of a text: it has no input '{SUFFIX}'"
                raise BadParameter("suffix", text)
            self._suffix.append(model.inputs[SUFFIX].text(request.suffix.encode()))
            self.bytes += len(request.suffix) * len(self)
        if self.texts:
            return
        spec = model.inputs.get(TOKENS)
        if spec is None or spec.dtype not in _INTEGERS:
            raise BadParameter(
                "prompt",
                f"model '{model.name[:80]}' takes no token ids: it has no input '{TOKENS}'; send the text instead",
            )
        if request.echo:
            raise BadParameter("echo", "'echo' needs prompts that are texts")

    def __len__(self) -> int:
        return len(self.texts) or len(self._tokens)

    def tensors(self) -> Iterator[list[InputPlan]]:
        for text in self.texts:
            yield [self._model.inputs[PROMPT].text(text.encode()), *self._suffix]
        for ids in self._tokens:
            spec = self._model.inputs[TOKENS]
            data = np.array(ids, _INTEGERS[spec.dtype]).tobytes()
            yield [self._model.inputs[PROMPT].text(b""), spec.plan(data, len(ids)), *self._suffix]


def chat_tensors(model: LanguageModel, request: ChatRequest) -> list[InputPlan]:
    """The inputs of a model that applies its own chat template."""
    return [model.inputs[PROMPT].text(b""), model.inputs[MESSAGES].text(_encode(_chat_document(model, request)))]


def large_chat_tensors(model: LanguageModel, request: ChatRequest, strings: CutStrings) -> SlicedWork[list[InputPlan]]:
    """The same in slices, for a request whose long strings were cut out. They are put back here."""
    data = bytearray(4)
    yield from strings.encoded(_chat_document(model, request), data)
    data[:4] = (len(data) - 4).to_bytes(4, "little")
    yield from strings.restore(request)
    return [model.inputs[PROMPT].text(b""), model.inputs[MESSAGES].plan(data)]


def _chat_document(model: LanguageModel, request: ChatRequest) -> dict[str, Any]:
    document: dict[str, Any] = {"messages": request.messages}
    more = {
        "tools": request.tools,
        "tool_choice": request.tool_choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": request.response_format,
        "chat_template_kwargs": template_arguments(model, request) or None,
        "add_generation_prompt": request.add_generation_prompt,
        "continue_final_message": request.continue_final_message,
    }
    return document | {name: value for name, value in more.items() if value is not None}


def template_arguments(model: LanguageModel, request: ChatRequest) -> dict[str, Any]:
    default = model.parameters.get(TEMPLATE_ARGUMENTS)
    arguments: dict[str, Any] = msgspec.json.decode(default) if default else {}
    if request.reasoning_effort is not None:
        arguments["reasoning_effort"] = request.reasoning_effort
    return arguments | (request.chat_template_kwargs or {})


def check_tools(model: LanguageModel, request: ChatRequest, forced: ForcedCalls | None) -> None:
    if not request.tools or request.tool_choice == "none" or TOOL_CALLS in model.outputs:
        return
    name = model.name[:80]
    if MESSAGES in model.inputs:
        raise BadParameter("tools", f"model '{name}' cannot call tools: it has no output '{TOOL_CALLS}'")
    if forced is None:
        raise BadParameter(
            "tools",
            f"model '{name}' cannot decide to call tools: it has no output '{TOOL_CALLS}'; set 'tool_choice' to "
            "'required' or to a function, which its structured outputs enforce, or to 'none'",
        )


def sampling_of(
    model: LanguageModel, request: Sampling, logprobs: int | None, forced: ForcedCalls | None = None
) -> dict[str, Any]:
    """`logprobs`: number of alternatives for each token; None: no log probabilities. `forced`: the tool calls that the
    text must consist of."""
    chosen = bodies.sampling(request)
    limit = bodies.max_tokens(request)
    if limit is None and DEFAULT_MAX_TOKENS in model.parameters and "max_tokens" not in chosen:
        limit = _default_max_tokens(model)
    if limit is not None:
        chosen["max_tokens"] = limit
    if logprobs is not None:
        chosen["logprobs"] = logprobs
    if model.adapter:
        chosen["lora_name"] = model.adapter
    if request.prompt_logprobs is not None and PROMPT_LOGPROBS not in model.outputs:
        raise BadParameter(
            "prompt_logprobs",
            f"model '{model.name[:80]}' returns no log probabilities of prompts: it has no output '{PROMPT_LOGPROBS}'",
        )
    if not isinstance(request, ChatRequest) or MESSAGES not in model.inputs:
        chosen |= _structured(request.response_format) if forced is None else _enforced({"json": forced.schema})
    return chosen


class SamplingInputs:
    """The sampling parameters of all requests to the model that one request becomes. They are encoded once. `apart`:
    number of requests per prompt. If a seed is set, each of them has a different one.

    Triton's vLLM backend returns one text, whatever `n` is.
    """

    def __init__(self, model: LanguageModel, sampling: dict[str, Any], options: RequestOptions, apart: int) -> None:
        self._spec = model.inputs.get(SAMPLING) if sampling else None
        self._options = options
        self._sampling = sampling
        self._seed: int | None = None
        if apart > 1:
            self._seed = sampling["seed"] if type(sampling.get("seed")) is int else None
            excluded = ("n",) if self._seed is None else ("n", "seed")
            self._sampling = {name: value for name, value in sampling.items() if name not in excluded}
        self._text = _encode(self._sampling)
        if len(self._text) > SAMPLING_BYTES:
            raise InvalidRequest(
                f"the sampling parameters have {len(self._text)} bytes of JSON; the limit is {SAMPLING_BYTES}"
            )
        if self._spec is None and sampling:
            bodies.check_scalars(sampling)

    @property
    def bytes(self) -> int:
        return len(self._text)

    @property
    def is_copied(self) -> bool:
        """Whether each request has its own copy."""
        return self._spec is None or self.differ

    @property
    def differ(self) -> bool:
        """Whether each choice of a prompt has other parameters."""
        return self._seed is not None

    def tensors(self, number: int) -> list[InputPlan]:
        """The input for choice `number` of a prompt, if the model has it."""
        if self._spec is None:
            return []
        text = self._text if self._seed is None else _with_seed(self._text, self._seed + number)
        return [self._spec.text(text)]

    def options(self, number: int) -> RequestOptions:
        """They include the parameters of a model that has no input for them."""
        if self._spec is not None or not (self._sampling or self.differ):
            return self._options
        seed = {} if self._seed is None else {"seed": self._seed + number}
        request_options = options_of(self._options.id, {**self._sampling, **seed})
        return replace(
            self._options, parameters={**(self._options.parameters or {}), **(request_options.parameters or {})}
        )


def _with_seed(text: bytes, seed: int) -> bytes:
    return b'%b%b"seed":%d}' % (text[:-1], b"," if len(text) > len(b"{}") else b"", seed)


def flag_tensors(model: LanguageModel, wanted: list[str]) -> list[InputPlan]:
    """BOOL inputs to set if the model has them."""
    return [model.inputs[name].plan(_TRUE) for name in wanted if name in model.inputs]


def task_tensor(model: LanguageModel, task: str) -> InputPlan:
    """Has the model do something else with its prompt than to continue it."""
    if TASK not in model.inputs:
        raise InvalidRequest(f"model '{model.name[:80]}' cannot {task}: it has no input '{TASK}'")
    return model.inputs[TASK].text(task.encode())


def wanted_flags(model: LanguageModel, stream: bool, usage: bool, logprobs: bool, stop: bool) -> list[str]:
    if logprobs and "return_logprobs" not in model.inputs:
        raise BadParameter(
            "logprobs", f"model '{model.name[:80]}' returns no log probabilities: it has no input 'return_logprobs'"
        )
    flags = ["exclude_input_in_output", "return_finish_reason"]
    if stream:
        flags.append("stream")
    if usage:
        flags += ["return_num_input_tokens", "return_num_output_tokens", "return_num_cached_tokens"]
    if logprobs:
        flags += ["return_logprobs", "return_token_ids"]
    if stop:
        flags.append("return_stop_reason")
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
    return _enforced(wanted)


def _enforced(wanted: dict[str, Any]) -> dict[str, Any]:
    return {"structured_outputs": _encode(wanted).decode()}

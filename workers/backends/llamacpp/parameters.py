"""Converts a request to the engine's JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from shmserve.errors import Unsupported
from shmserve.workers.backends.language.sampling import SAMPLERS, biases_in, stops_in, structured_in
from shmserve.workers.backends.language.schemas import check_chat, check_schema

if TYPE_CHECKING:
    from shmserve.workers.backends.language.requests import GenerationRequest
    from shmserve.workers.backends.language.sampling import Defaults, SamplingParameters

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "min_tokens": (0, None),
    "stop_token_ids": (None, []),
    "bad_words": (None, []),
    "prompt_logprobs": (None,),
    "include_stop_str_in_output": (False,),
    "detokenize": (True,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (None,),
}
"""Parameters that the engine does not support -> values that have no effect."""
_ENGINE_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repeat_penalty",
    "ignore_eos": "ignore_eos",
    **{name: name for name in SAMPLERS},
}
_NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repeat_penalty": 1.0,
}
"""vLLM's defaults; those of the engine differ."""


def body_of(generation: GenerationRequest, defaults: Defaults, filling: Sequence[int] = ()) -> dict[str, Any]:
    """`filling`: the tokens around a prompt and its suffix."""
    sampling, chat = generation.sampling, generation.chat
    body: dict[str, Any] = {"stream": True, "return_progress": True, **engine_parameters(sampling, defaults)}
    top = max(1, sampling.logprobs or 0)
    if chat is not None:
        check_chat(chat)
        body |= {**chat, "reasoning_format": "auto" if defaults.thinking else "none"}
        body |= {"logprobs": True, "top_logprobs": top} if generation.scored else {}
    else:
        body["prompt"] = _filled(generation, filling) if generation.suffix else generation.prompt
        body |= {"logprobs": top} if generation.scored else {}
    if "stop_reason" in generation.returned:
        body["verbose"] = True
    if generation.count > 1:
        body["n"] = generation.count
    return body


def _filled(generation: GenerationRequest, filling: Sequence[int]) -> list[int | str]:
    """A prompt of tokens and texts."""
    *begin, between, end = filling
    prompt: Sequence[int | str] = generation.prompt
    if isinstance(generation.prompt, str):
        prompt = [generation.prompt] if generation.prompt else []
    return [*begin, *prompt, between, generation.suffix, end]


def engine_parameters(sampling: SamplingParameters, defaults: Defaults) -> dict[str, Any]:
    parameters: dict[str, Any] = dict(_NEUTRAL)
    for name, engine_name in _ENGINE_NAMES.items():
        value = getattr(sampling, name)
        if value is not UNSET:
            parameters[engine_name] = value
    if sampling.top_k is not UNSET:
        parameters["top_k"] = max(0, sampling.top_k)
    parameters["max_tokens"] = sampling.max_tokens or -1
    if stops := stops_in(sampling):
        parameters["stop"] = stops
    if sampling.seed is not UNSET and sampling.seed is not None:
        parameters["seed"] = sampling.seed & 0x7FFFFFFF
    if biases := biases_in(sampling):
        parameters["logit_bias"] = [list(bias) for bias in biases.items()]
    return parameters | _structured(sampling, defaults)


def _structured(sampling: SamplingParameters, defaults: Defaults) -> dict[str, Any]:
    wanted = structured_in(sampling, defaults)
    if wanted is None:
        return {}
    match wanted:
        case "json", schema:
            check_schema(schema, "the schema of 'structured_outputs'")
            return {"json_schema": schema}
        case "json_object", _:
            return {"json_schema": {"type": "object"}}
        case "choice", texts:
            return {"grammar": "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)}
        case "grammar", str(grammar):
            return {"grammar": grammar}
        case name, _:
            raise Unsupported(f"'structured_outputs' with '{name[:40]}' is not supported by the engine of this model")


def cut(tokens: list[int], unmarked: list[int], limit: int) -> list[int]:
    """The first tokens of a text. The last one stays, if it is the mark of the end, which `unmarked` lacks."""
    mark = tokens[-1:] if tokens[-1:] != unmarked[-1:] else []
    return tokens[: limit - len(mark)] + mark

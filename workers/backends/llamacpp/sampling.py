"""Converts vLLM's sampling parameters, as JSON, to those of the engine."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from shmserve.errors import InvalidRequest, Unsupported
from shmserve.workers.backends.llamacpp.schemas import check_schema

TEXT_MAX_TOKENS = 16
"""Default token limit of requests with a plain prompt, as in vLLM. Chats have no limit by default."""
LOGPROBS = 20
"""Maximum number of alternatives for a token."""
CHOICES = 1000
"""Maximum number of texts in `choice`: the engine tries each of them at each token."""
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Share = Annotated[float, Meta(ge=0, le=1)]


class Sampling(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The parameters of vLLM. `structured_outputs`: an object with one of `json`, `json_object`, `choice` and
    `grammar`. The last parameters have no effect here, or accept only one value."""

    n: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    temperature: Annotated[float, Meta(ge=0)] | UnsetType = UNSET
    top_p: Annotated[float, Meta(gt=0, le=1)] | UnsetType = UNSET
    top_k: Annotated[int, Meta(ge=-1)] | UnsetType = UNSET
    min_p: _Share | UnsetType = UNSET
    max_tokens: Annotated[int, Meta(ge=1)] | UnsetType | None = UNSET
    stop: list[str] | str | UnsetType | None = UNSET
    seed: int | UnsetType | None = UNSET
    presence_penalty: _Penalty | UnsetType = UNSET
    frequency_penalty: _Penalty | UnsetType = UNSET
    repetition_penalty: Annotated[float, Meta(gt=0)] | UnsetType = UNSET
    logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS)] | UnsetType | None = UNSET
    ignore_eos: bool | UnsetType = UNSET
    logit_bias: dict[str, float] | UnsetType | None = UNSET
    structured_outputs: dict[str, Any] | str | UnsetType | None = UNSET
    best_of: int | UnsetType | None = UNSET
    min_tokens: int | UnsetType | None = UNSET
    stop_token_ids: list[int] | UnsetType | None = UNSET
    bad_words: list[str] | UnsetType | None = UNSET
    prompt_logprobs: int | UnsetType | None = UNSET
    include_stop_str_in_output: bool | UnsetType = UNSET
    detokenize: bool | UnsetType = UNSET
    skip_special_tokens: bool | UnsetType = UNSET
    spaces_between_special_tokens: bool | UnsetType = UNSET
    truncate_prompt_tokens: int | UnsetType | None = UNSET


_NAMES = frozenset(Sampling.__struct_fields__)
_FIXED: dict[str, tuple[Any, ...]] = {
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


def sampling_in(text: str | bytes, where: str = "input 'sampling_parameters'") -> Sampling:
    """Reads a JSON object; "": no parameters."""
    if not text:
        return Sampling()
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{where} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{where} is not a JSON object")
    return sampling_of(found, where)


def sampling_of(given: dict[str, Any], where: str) -> Sampling:
    """`given` may contain strings for numbers and booleans, as in the string map of vLLM's backend."""
    unknown = sorted(given.keys() - _NAMES)
    if unknown:
        raise InvalidRequest(f"{where}: unknown parameter '{unknown[0][:80]}'; known are: {', '.join(sorted(_NAMES))}")
    given = {
        name: _json_in(value) if name in ("stop_token_ids", "bad_words") and isinstance(value, str) else value
        for name, value in given.items()
    }
    if isinstance(given.get("logit_bias"), str):
        given["logit_bias"] = _json_in(given["logit_bias"])
    try:
        found = msgspec.convert(given, Sampling, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{where}: {error}") from None
    for name, values in _FIXED.items():
        value = getattr(found, name)
        if value is not UNSET and value not in values:
            raise Unsupported(f"{where}: the engine of this model has no '{name}'; remove it")
    if found.best_of is not UNSET and found.best_of not in (None, 1, found.n):
        raise Unsupported(f"{where}: 'best_of' must be equal to 'n', or absent")
    return found


def merged(defaults: Sampling, given: Sampling) -> Sampling:
    values = {name: getattr(defaults, name) for name in _NAMES}
    values |= {name: value for name in _NAMES if (value := getattr(given, name)) is not UNSET}
    return Sampling(**values)


def engine_parameters(sampling: Sampling, default_max_tokens: int, grammars: bool = False) -> dict[str, Any]:
    """`default_max_tokens` 0: no limit. `grammars`: whether grammars are allowed."""
    found: dict[str, Any] = dict(_NEUTRAL)
    for name, engine_name in _ENGINE_NAMES.items():
        value = getattr(sampling, name)
        if value is not UNSET:
            found[engine_name] = value
    if sampling.top_k is not UNSET:
        found["top_k"] = max(0, sampling.top_k)
    limit = sampling.max_tokens or default_max_tokens
    found["max_tokens"] = limit or -1
    if sampling.stop:
        found["stop"] = [sampling.stop] if isinstance(sampling.stop, str) else [text for text in sampling.stop if text]
    if sampling.seed is not UNSET and sampling.seed is not None:
        found["seed"] = sampling.seed & 0x7FFFFFFF
    if sampling.logit_bias:
        found["logit_bias"] = [[_token(name), value] for name, value in sampling.logit_bias.items()]
    if sampling.structured_outputs:
        found |= _structured(sampling.structured_outputs, grammars)
    return found


def _structured(given: dict[str, Any] | str, grammars: bool) -> dict[str, Any]:
    wanted = _json_in(given) if isinstance(given, str) else given
    if not isinstance(wanted, dict):
        raise InvalidRequest("'structured_outputs' is not a JSON object")
    wanted = {name: value for name, value in wanted.items() if value is not None and value is not False}
    if len(wanted) != 1:
        raise InvalidRequest("'structured_outputs' must have one of json, json_object, choice and grammar")
    ((name, value),) = wanted.items()
    if name == "json":
        schema = _json_in(value) if isinstance(value, str) else value
        check_schema(schema, "the schema of 'structured_outputs'")
        return {"json_schema": schema}
    if name == "json_object":
        return {"json_schema": {"type": "object"}}
    if name == "choice" and isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        if len(value) > CHOICES:
            raise InvalidRequest(f"'structured_outputs' has {len(value)} choices; the limit is {CHOICES}")
        return {"grammar": "root ::= " + " | ".join(json.dumps(one) for one in value)}
    if name == "grammar" and isinstance(value, str):
        if not grammars:
            raise Unsupported(
                "'structured_outputs' with 'grammar' is not allowed, as a grammar can stop the texts of all callers; "
                "the parameter 'grammars' of the model allows it"
            )
        return {"grammar": value}
    raise Unsupported(f"'structured_outputs' with '{name[:40]}' is not supported by the engine of this model")


def _json_in(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"a sampling parameter is not JSON: {error}") from None


def _token(name: str) -> int:
    if not name.isdecimal() or len(name) > 9:
        raise InvalidRequest(f"'logit_bias' must have ids of tokens, not {name[:40]!r}")
    return int(name)

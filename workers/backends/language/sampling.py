"""Reads vLLM's sampling parameters, which are JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from shmserve.errors import InvalidRequest, NotFound, Unsupported
from shmserve.repo.parameters import ADAPTERS
from shmserve.workers.backends.parameters import Parameters

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.backends.base import Context

TEXT_MAX_TOKENS = 16
"""Default token limit of requests with a plain prompt, as in vLLM. Chats have no limit by default."""
LOGPROBS = 20
"""Maximum number of alternatives for a token."""
CHOICES = 1000
"""Maximum number of texts in `choice`: the engine tries each of them at each token."""
MAX_TOKENS, SAMPLING, GRAMMARS = "default_max_tokens", "sampling_parameters", "grammars"
"""Parameters of a model."""
SAMPLERS = (
    "typical_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "dynatemp_range",
    "dynatemp_exponent",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "repeat_last_n",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
)
"""Parameters of llama.cpp, under its names."""
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Positive = Annotated[float, Meta(ge=0)]
_Last = Annotated[int, Meta(ge=0, le=1 << 20)]
"""Number of tokens, for which the engine reserves memory."""
_Share = Annotated[float, Meta(ge=0, le=1)]


class SamplingParameters(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The parameters of vLLM, `lora_name` of Triton's backend for it, and SAMPLERS. `structured_outputs`: an object
    with one of `json`, `json_object`, `choice`, `grammar` and others of the engine."""

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
    lora_name: str | UnsetType | None = UNSET
    typical_p: _Share | UnsetType = UNSET
    top_n_sigma: float | UnsetType = UNSET
    xtc_probability: _Share | UnsetType = UNSET
    xtc_threshold: _Share | UnsetType = UNSET
    dynatemp_range: _Positive | UnsetType = UNSET
    dynatemp_exponent: _Positive | UnsetType = UNSET
    mirostat: Annotated[int, Meta(ge=0, le=2)] | UnsetType = UNSET
    mirostat_tau: _Positive | UnsetType = UNSET
    mirostat_eta: _Positive | UnsetType = UNSET
    repeat_last_n: _Last | UnsetType = UNSET
    dry_multiplier: _Positive | UnsetType = UNSET
    dry_base: _Positive | UnsetType = UNSET
    dry_allowed_length: Annotated[int, Meta(ge=0, le=1 << 20)] | UnsetType = UNSET
    dry_penalty_last_n: _Last | UnsetType = UNSET


class Defaults(Struct, frozen=True):
    """Settings of a model for requests. `chat`: what the authors of the model recommend for chats. `max_tokens`: for
    requests that do not set it; 0: the default of the interface. `grammars`: requests may have grammars. `unsupported`:
    sampling parameters that the engine lacks, with the values that have no effect. `thinking`: the engine separates the
    thinking from the text of a chat."""

    sampling: SamplingParameters = SamplingParameters()
    chat: SamplingParameters = SamplingParameters()
    max_tokens: int = 0
    grammars: bool = False
    thinking: bool = False
    unsupported: Mapping[str, tuple[Any, ...]] = {}
    adapters: frozenset[str] = frozenset()
    """The adapters (LoRA) that requests may name."""


_NAMES = frozenset(SamplingParameters.__struct_fields__)


def adapters_of(config: ModelConfig, context: Context) -> dict[str, Path]:
    """The adapters (LoRA) of a model, by name. Raises NotFound."""
    paths = {name: context.version_folder / path for name, path in ADAPTERS.read(config).items()}
    for name, path in paths.items():
        if not path.exists():
            raise NotFound(f"version {context.version} of model '{config.name}' has no file for the adapter '{name}'")
    return paths


def defaults_of(
    config: ModelConfig, unsupported: Mapping[str, tuple[Any, ...]], adapters: Iterable[str] = ()
) -> Defaults:
    parameters = Parameters(config)
    where = f"parameter {SAMPLING} of model '{config.name}'"
    defaults = Defaults(
        sampling_in(parameters.text(SAMPLING), where),
        max_tokens=parameters.whole(MAX_TOKENS, 0),
        grammars=parameters.flag(GRAMMARS, False),
        unsupported=unsupported,
        adapters=frozenset(adapters),
    )
    check_supported(defaults.sampling, defaults, where)
    return defaults


def sampling_in(text: str | bytes, where: str = "input 'sampling_parameters'") -> SamplingParameters:
    """Reads a JSON object; "": no parameters."""
    if not text:
        return SamplingParameters()
    try:
        parameters = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{where} is not JSON: {error}") from None
    if not isinstance(parameters, dict):
        raise InvalidRequest(f"{where} is not a JSON object")
    return sampling_of(parameters, where)


def sampling_of(parameters: dict[str, Any], where: str) -> SamplingParameters:
    """`parameters` may contain strings for numbers and booleans, as in the string map of vLLM's backend."""
    unknown = sorted(parameters.keys() - _NAMES)
    if unknown:
        raise InvalidRequest(f"{where}: unknown parameter '{unknown[0][:80]}'; known are: {', '.join(sorted(_NAMES))}")
    parameters = {
        name: _json_in(value) if name in ("stop_token_ids", "bad_words") and isinstance(value, str) else value
        for name, value in parameters.items()
    }
    if isinstance(parameters.get("logit_bias"), str):
        parameters["logit_bias"] = _json_in(parameters["logit_bias"])
    try:
        sampling = msgspec.convert(parameters, SamplingParameters, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{where}: {error}") from None
    if sampling.best_of is not UNSET and sampling.best_of not in (None, 1, sampling.n):
        raise Unsupported(f"{where}: 'best_of' must be equal to 'n', or absent")
    return sampling


def merged(defaults: SamplingParameters, sampling: SamplingParameters) -> SamplingParameters:
    values = {name: getattr(defaults, name) for name in _NAMES}
    values |= {name: value for name in _NAMES if (value := getattr(sampling, name)) is not UNSET}
    return SamplingParameters(**values)


def check_supported(
    sampling: SamplingParameters, defaults: Defaults, where: str = "input 'sampling_parameters'"
) -> None:
    """Raises Unsupported or NotFound for what the model does not have."""
    for name, values in defaults.unsupported.items():
        value = getattr(sampling, name)
        if value is not UNSET and value not in values:
            raise Unsupported(f"{where}: the engine of this model has no '{name}'; remove it")
    if sampling.lora_name and sampling.lora_name not in defaults.adapters:
        known = f"it has {', '.join(sorted(defaults.adapters))}" if defaults.adapters else "it has none"
        raise NotFound(f"the model has no adapter '{sampling.lora_name[:80]}': {known}")


UNLIMITED = ("grammar", "structural_tag")
"""Structured outputs whose cost is unknown before an engine has compiled them."""


def structured_in(sampling: SamplingParameters, defaults: Defaults) -> tuple[str, Any] | None:
    """What the text must match: the kind, and its value. A schema may still be a text."""
    structured = sampling.structured_outputs
    if not structured:
        return None
    wanted = _json_in(structured) if isinstance(structured, str) else structured
    if not isinstance(wanted, dict):
        raise InvalidRequest("'structured_outputs' is not a JSON object")
    wanted = {name: value for name, value in wanted.items() if value is not None and value is not False}
    if len(wanted) != 1:
        raise InvalidRequest("'structured_outputs' must have one of json, json_object, choice and grammar")
    ((name, value),) = wanted.items()
    if name == "json" and isinstance(value, str):
        return name, _json_in(value)
    if name == "choice" and not _is_choice(value):
        raise InvalidRequest("'choice' of 'structured_outputs' must be a list of texts")
    if name == "choice" and len(value) > CHOICES:
        raise InvalidRequest(f"'structured_outputs' has {len(value)} choices; the limit is {CHOICES}")
    if name in UNLIMITED and not defaults.grammars:
        raise Unsupported(
            f"'structured_outputs' with '{name}' is not allowed, as a grammar can stop the texts of all callers; "
            "the parameter 'grammars' of the model allows it"
        )
    return name, value


def stops_in(sampling: SamplingParameters) -> list[str]:
    if not sampling.stop:
        return []
    return [sampling.stop] if isinstance(sampling.stop, str) else [text for text in sampling.stop if text]


def biases_in(sampling: SamplingParameters) -> dict[int, float]:
    """Token -> what is added to its logit."""
    return {_token(name): value for name, value in (sampling.logit_bias or {}).items()}


def _is_choice(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)


def _json_in(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"a sampling parameter is not JSON: {error}") from None


def _token(name: str) -> int:
    if not name.isdecimal() or len(name) > 9:
        raise InvalidRequest(f"'logit_bias' must have ids of tokens, not {name[:40]!r}")
    return int(name)

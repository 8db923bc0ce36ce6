"""Derives from a model's configuration how it can be used: as a language model, or for embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from shmserve.errors import InvalidRequest, NotFound
from shmserve.gateway.kserve.plans import InputPlan, tensor_type

PROMPT, MESSAGES, TOKENS, SAMPLING = "text_input", "messages", "prompt_token_ids", "sampling_parameters"
TASK, IMAGE, AUDIO, SUFFIX, TRUNCATION = "task", "image", "audio", "suffix", "truncate_prompt_tokens"
TEXT, TOOL_CALLS, INPUT_TOKENS, MASK = "text_output", "tool_calls", "num_input_tokens", "attention_mask"
SEGMENTS, PROMPT_LOGPROBS, THINKING = "segments", "prompt_logprobs", "reasoning_content"
ADAPTER = ":"
"""Separates the name of a model and that of its adapter."""
_FLOATS = ("FP32", "FP16", "BF16", "FP64")
_EMBEDDING_PARAMETERS = frozenset({"embedding_input", "embedding_output", "embedding_pooling"})
_PAIR = ("query", "document")
_EMBEDDING_INPUTS = ("text_input", "text", "input", "TEXT")


class InputSpec(Struct, frozen=True):
    """An input that takes one element, or a list of elements if a dimension is variable."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of one row, including the batch dimension; -1: variable."""

    def plan(self, data: bytes | bytearray, count: int = 1) -> InputPlan:
        """The tensor of `count` elements. If several dimensions are variable, the last one gets that size."""
        shape, remaining = [], count
        for dim in reversed(self.shape):
            shape.append(remaining if dim < 0 else dim)
            remaining = 1 if dim < 0 else remaining
        return InputPlan(self.name, self.dtype, tuple(reversed(shape)), len(data), data)

    def text(self, text: bytes) -> InputPlan:
        """The tensor of one string."""
        return self.plan(len(text).to_bytes(4, "little") + text)


class LanguageModel(Struct, frozen=True):
    name: str
    inputs: dict[str, InputSpec]
    outputs: frozenset[str]
    parameters: dict[str, str]
    adapter: str = ""


class EmbeddingModel(Struct, frozen=True):
    """`pooling`: how the vectors of the output become one; "": it has one. `normalize`: it is scaled to length 1.
    `limit`: the input for the number of tokens after which a text is cut."""

    name: str
    input: InputSpec
    output: str
    pooling: str = ""
    normalize: bool = False
    limit: InputSpec | None = None


class ScoreModel(Struct, frozen=True):
    """`inputs`: those of the two texts of a pair."""

    name: str
    inputs: tuple[InputSpec, InputSpec]
    output: str


def language_model(full_name: str, config: Mapping[str, Any]) -> LanguageModel:
    """Raises NotFound if the model cannot be used this way. `full_name`: may end with the name of an adapter."""
    known = config.get("name", full_name)
    name, adapter = full_name, ""
    if full_name != known and not full_name.startswith(f"{known}@"):  # of an alias
        name, _, adapter = full_name.partition(ADAPTER)
    if adapter and adapter not in adapters_of(config):
        raise NotFound(f"model '{name[:80]}' has no adapter '{adapter[:80]}'")
    inputs, outputs = _inputs(config), _types(config.get("output", ()))
    if PROMPT not in inputs or inputs[PROMPT].dtype != "BYTES" or outputs.get(TEXT) != "BYTES":
        raise NotFound(
            f"model '{name[:80]}' is not a language model: it needs an input '{PROMPT}' and an output '{TEXT}' of "
            "type STRING"
        )
    return LanguageModel(name, inputs, frozenset(outputs), _parameters(config), adapter)


def adapters_of(config: Mapping[str, Any]) -> list[str]:
    entries = _parameters(config).get("adapters", "").split(",")
    return [entry.partition("=")[0].strip() for entry in entries if "=" in entry]


def embedding_model(name: str, config: Mapping[str, Any]) -> EmbeddingModel:
    """Raises NotFound if the model cannot be used this way."""
    inputs, outputs, parameters = _inputs(config), _types(config.get("output", ())), _parameters(config)
    texts = [one for one, spec in inputs.items() if spec.dtype == "BYTES"]
    floats = [one for one, dtype in outputs.items() if dtype in _FLOATS]
    chosen = parameters.get("embedding_input") or _one(texts, _EMBEDDING_INPUTS)
    others = [one for one in outputs if one not in (*floats, INPUT_TOKENS, MASK)]
    output = parameters.get("embedding_output") or ("" if others else _one(floats, ()))
    required = [one["name"] for one in config.get("input", ()) if not one.get("optional")]
    if chosen not in texts or output not in floats or any(one != chosen for one in required):
        raise NotFound(
            f"model '{name[:80]}' does not compute embeddings: it needs one STRING input and one output, of floats; "
            "the parameters embedding_input and embedding_output of its configuration can choose among several"
        )
    if _is_decoupled(config):
        raise NotFound(f"model '{name[:80]}' does not compute embeddings: it has a decoupled transaction policy")
    pooling = parameters.get("embedding_pooling", "")
    normalize = parameters.get("embedding_normalize", "true" if pooling else "false").lower() == "true"
    limit = inputs.get(TRUNCATION)
    return EmbeddingModel(
        name, inputs[chosen], output, pooling, normalize, limit if limit and limit.dtype == "INT32" else None
    )


def score_model(name: str, config: Mapping[str, Any]) -> ScoreModel:
    """Raises NotFound if the model cannot be used this way."""
    inputs, outputs = _inputs(config), _types(config.get("output", ()))
    texts = [one for one, spec in inputs.items() if spec.dtype == "BYTES"]
    pair = list(_PAIR) if set(_PAIR) <= set(texts) else texts
    output = _one([one for one, dtype in outputs.items() if dtype in _FLOATS], ("score",))
    required = [one["name"] for one in config.get("input", ()) if not one.get("optional")]
    if len(pair) != 2 or not output or not set(required) <= set(pair) or _is_decoupled(config):
        raise NotFound(
            f"model '{name[:80]}' does not compute scores: it needs two STRING inputs, one output of floats or "
            "an output 'score', and no decoupled transaction policy"
        )
    return ScoreModel(name, (inputs[pair[0]], inputs[pair[1]]), output)


def is_listed(name: str, config: Mapping[str, Any]) -> bool:
    """True for language models, and for models whose configuration shows that they compute embeddings: a classifier of
    texts has tensors of the same types."""
    try:
        language_model(name, config)
    except NotFound:
        try:
            model = embedding_model(name, config)
        except NotFound:
            return False
        return "embedding" in model.output.lower() or not _EMBEDDING_PARAMETERS.isdisjoint(config.get("parameters", ()))
    return True


def check_name(name: str) -> str:
    if not name:
        raise InvalidRequest("you must provide a model parameter")
    return name


def without_adapter(full_name: str) -> str:
    return full_name.partition(ADAPTER)[0]


def _one(names: Iterable[str], preferred: Iterable[str]) -> str:
    """The only name, or the only preferred one; "" if there is no such name."""
    names = list(names)
    candidates = names if len(names) == 1 else [name for name in preferred if name in names]
    return candidates[0] if len(candidates) == 1 else ""


def _inputs(config: Mapping[str, Any]) -> dict[str, InputSpec]:
    lead = (1,) if config.get("max_batch_size", 0) else ()
    return {
        one["name"]: InputSpec(one["name"], tensor_type(one), (*lead, *[int(dim) for dim in one["dims"]]))
        for one in config.get("input", ())
    }


def _types(tensors: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    return {one["name"]: tensor_type(one) for one in tensors}


def _parameters(config: Mapping[str, Any]) -> dict[str, str]:
    return {name: one.get("string_value", "") for name, one in config.get("parameters", {}).items()}


def _is_decoupled(config: Mapping[str, Any]) -> bool:
    return bool(config.get("model_transaction_policy", {}).get("decoupled", False))

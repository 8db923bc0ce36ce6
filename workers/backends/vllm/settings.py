"""The engine's arguments, and the parameters of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.repo.backends import NETWORK
from shmserve.repo.compile import DEFAULT_SLOTS
from shmserve.repo.parameters import ADAPTERS, CHAT_TEMPLATE
from shmserve.workers.backends.language.encoder import NORMALIZE, POOLING, RANK
from shmserve.workers.backends.language.requests import IMAGE
from shmserve.workers.backends.language.sampling import Defaults, adapters_of, defaults_of
from shmserve.workers.backends.parameters import Parameters
from shmserve.workers.backends.vllm.parameters import UNSUPPORTED

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.backends.base import Context

FILE = "model.json"
MODEL = "model"
TOOL_PARSER = "tool_parser"
LORA = "enable_lora"
SLOTS, THREADS = "max_num_seqs", "threads"
_TYPES = {"mean": "MEAN", "cls": "CLS", "last": "LAST"}
POOLINGS = (*_TYPES, RANK, "auto")
PARAMETERS = {"slots": SLOTS, "context_length": "max_model_len", "prompt_batch": "max_num_batched_tokens"}
"""Parameters that all engines have -> arguments of this one."""
_WITH_ADAPTERS = {**UNSUPPORTED, "prompt_logprobs": (None,)}
"""With adapters, vLLM 0.32 on a CPU computes the logits of the prompt with the adapter indices of the samples: one such
request ends the engine, and all texts with it."""


class VllmSettings(Struct, frozen=True):
    """`arguments`: those of the engine. `threads`: of the engine on a CPU. `tool_parser`: reads the tool calls that the
    model makes by itself; "": nothing does. `pooling`: how the model computes a vector, or a score, from a text; "": it
    generates. `normalize`: vectors have length 1."""

    arguments: dict[str, Any]
    threads: int
    chat_template: str
    tool_parser: str
    sees_images: bool
    pooling: str
    normalize: bool
    adapters: dict[str, Path]
    defaults: Defaults


def settings_of(config: ModelConfig, context: Context) -> VllmSettings:
    """Raises NotFound or InvalidRequest."""
    adapters = adapters_of(config, context)
    arguments, parameters = _arguments(config, context), Parameters(config)
    arguments |= {name: value for key, name in PARAMETERS.items() if (value := parameters.whole(key, 0))}
    arguments.setdefault(SLOTS, DEFAULT_SLOTS[config.backend])
    if adapters:
        # On a CPU, vLLM 0.32 runs requests without an adapter with the last one if the batch has others that name one:
        # an empty place is the last one.
        places = max(len(adapters) + 1, arguments.get("max_loras", 0))
        arguments = {LORA: True, **arguments, "max_loras": places}
    pooling = parameters.text(POOLING)
    if pooling:
        if pooling not in POOLINGS:
            raise parameters.wrong(POOLING, f"one of {', '.join(POOLINGS)}")
        arguments = {"runner": "pooling", **arguments}
        if pooling in _TYPES:
            arguments["pooler_config"] = {**arguments.get("pooler_config", {}), "pooling_type": _TYPES[pooling]}
    return VllmSettings(
        # Its own statistics take time in each step. The metrics of a model come from the worker.
        {**arguments, "disable_log_stats": True},
        _threads(parameters, context),
        CHAT_TEMPLATE.read(config),
        parameters.text(TOOL_PARSER),
        _sees_images(arguments),
        pooling,
        parameters.flag(NORMALIZE, True),
        adapters,
        defaults_of(config, UNSUPPORTED if _scores_prompts(arguments) else _WITH_ADAPTERS, adapters),
    )


def _threads(parameters: Parameters, context: Context) -> int:
    """One core is left to the engine's scheduler and to this process, as vLLM itself does. They have work in each step,
    and OpenMP's threads spin until the last one of them has run: on two busy cores, two threads generated 5 tokens per
    second, and one thread 240."""
    return parameters.whole(THREADS, 0) or max(1, context.engine_threads - 1)


def scores_prompts(config: ModelConfig, context: Context) -> bool:
    """Whether the model returns log probabilities of prompts. Raises NotFound or InvalidRequest."""
    return not ADAPTERS.read(config) and _scores_prompts(_arguments(config, context))


def _scores_prompts(arguments: dict[str, Any]) -> bool:
    return not arguments.get(LORA)


def sees_images(config: ModelConfig, context: Context) -> bool:
    """Raises NotFound or InvalidRequest."""
    return _sees_images(_arguments(config, context))


def _sees_images(arguments: dict[str, Any]) -> bool:
    """What the limit of images says, or the directory of the network."""
    limits = arguments.get("limit_mm_per_prompt")
    if isinstance(limits, dict) and IMAGE in limits:
        return bool(limits[IMAGE])
    file = Path(arguments[MODEL]) / NETWORK
    try:
        return isinstance(msgspec.json.decode(file.read_bytes()).get("vision_config"), dict)
    except (OSError, msgspec.DecodeError, AttributeError):  # vLLM reports what is wrong with it
        return False


def _arguments(config: ModelConfig, context: Context) -> dict[str, Any]:
    """Without a file of arguments, the version is the directory of the network."""
    folder = context.version_folder
    if not config.default_model_filename and not (folder / FILE).is_file() and (folder / NETWORK).is_file():
        return {MODEL: str(folder)}
    path = context.model_file(config, FILE)
    try:
        arguments = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{path.name} is not JSON: {error}") from None
    if not isinstance(arguments, dict) or not isinstance(arguments.setdefault(MODEL, "."), str):
        raise InvalidRequest(f"{path.name} must be a JSON object with arguments of vLLM, such as a text '{MODEL}'")
    for name in ("model", "tokenizer"):
        if isinstance(arguments.get(name), str) and (folder / arguments[name]).is_dir():
            arguments[name] = str((folder / arguments[name]).resolve())
    for name in ("disable_log_requests", "disable_log_stats"):  # in files for Triton
        arguments.pop(name, None)
    return arguments

"""The engine's parameters in a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from shmserve.errors import Unsupported
from shmserve.repo.compile import DEFAULT_SLOTS
from shmserve.repo.files.gguf import recommended_sampling, trained_context
from shmserve.repo.parameters import CHAT_TEMPLATE, REASONING_TAGS
from shmserve.workers.backends.language.encoder import NORMALIZE, POOLING, RANK
from shmserve.workers.backends.language.sampling import adapters_of, defaults_of, sampling_of
from shmserve.workers.backends.llamacpp.parameters import UNSUPPORTED
from shmserve.workers.backends.parameters import Parameters
from shmserve.workers.process.device import device_of, visible_number

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.backends.base import Context
    from shmserve.workers.backends.language.sampling import Defaults, SamplingParameters

SLOTS, CONTEXT, THREADS = "slots", "context_length", "threads"
PROMPT_BATCH, CACHE_TYPE, PROMPT_CACHE = "prompt_batch", "cache_type", "prompt_cache"
MMPROJ = "mmproj"
KEPT_PROMPTS = "prompt_cache_mb"
DRAFT, GPU_LAYERS = "draft_model", "n_gpu_layers"
POOLINGS = ("mean", "cls", "last", RANK)
ALL_LAYERS = 999
LARGEST_CONTEXT = 4096
"""Context length of models trained for a longer one, unless the configuration sets it."""
DEFAULT_CONTEXT = 2048
"""Context length of models whose file does not contain the trained length."""
DEFAULT_PROMPT_BATCH = 512
_RECOMMENDED = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
    "penalty_last_n": "repeat_last_n",
    **{name: name for name in ("xtc_probability", "xtc_threshold", "mirostat", "mirostat_tau", "mirostat_eta")},
}
"""Name in the header of a file -> sampling parameter."""
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


class LlamaCppSettings(Struct, frozen=True):
    """`slots`: maximum number of sequences in the running batch. `context`: tokens of a sequence, prompt and output.
    `prompt_batch`: maximum number of prompt tokens in one step. `pooling`: how the model computes a vector, or a score,
    from a text; "": it generates. `normalize`: vectors have length 1. `projector`: the file of the part of the model
    that sees images. `kept_prompts`: MiB for prompts that have left their slot. `draft`: a smaller model that proposes
    tokens. `gpu`: the GPU of the instance."""

    file: Path
    slots: int
    context: int
    threads: int
    prompt_batch: int
    cache_type: str
    prompt_cache: bool
    chat_template: str
    pooling: str
    normalize: bool
    projector: Path | None
    adapters: dict[str, Path]
    kept_prompts: int
    draft: Path | None
    gpu: int | None
    gpu_layers: int
    defaults: Defaults


def settings_of(config: ModelConfig, context: Context, has_gpu: bool) -> LlamaCppSettings:
    """Raises NotFound, InvalidRequest, or Unsupported for an instance on a GPU. `has_gpu`: the engine can use one."""
    kind, number = device_of(config, context.instance)
    if kind == "GPU" and not has_gpu:
        raise Unsupported(
            f"instance '{context.instance}' is to run on GPU {number}, and this build of llama.cpp runs on the CPU: "
            "choose KIND_CPU"
        )
    parameters = Parameters(config)
    file = context.model_file(config, "model.gguf")
    trained = trained_context(file)
    length = parameters.whole(CONTEXT, 0) or min(trained or DEFAULT_CONTEXT, LARGEST_CONTEXT)
    slots = parameters.whole(SLOTS, DEFAULT_SLOTS[config.backend])
    if not 1 <= slots <= 256:
        raise parameters.wrong(SLOTS, "a number of sequences from 1 to 256")
    if trained and length > trained:
        raise parameters.wrong(CONTEXT, f"at most {trained}, the context length for which the model was trained")
    cache_type = parameters.text(CACHE_TYPE, "f16")
    if cache_type not in CACHE_TYPES:
        raise parameters.wrong(CACHE_TYPE, f"one of {', '.join(CACHE_TYPES)}")
    adapters = adapters_of(config, context)
    kept_prompts = parameters.whole(KEPT_PROMPTS, 0)
    if kept_prompts and adapters:  # the engine would continue a text of one adapter with another one
        raise parameters.wrong(KEPT_PROMPTS, "0 for a model with adapters")
    draft = parameters.text(DRAFT)
    pooling = parameters.text(POOLING)
    if pooling and pooling not in POOLINGS:
        raise parameters.wrong(POOLING, f"one of {', '.join(POOLINGS)}")
    projector = parameters.text(MMPROJ)
    if projector and projector != Path(projector).name:
        raise parameters.wrong(MMPROJ, "the name of a file in the directory of the version")
    return LlamaCppSettings(
        file,
        slots,
        length,
        parameters.whole(THREADS, 0) or context.engine_threads,
        parameters.whole(PROMPT_BATCH, 0) or DEFAULT_PROMPT_BATCH,
        cache_type,
        parameters.flag(PROMPT_CACHE, True),
        CHAT_TEMPLATE.read(config),
        pooling,
        parameters.flag(NORMALIZE, True),
        context.model_file(config, "", projector) if projector else None,
        adapters,
        kept_prompts,
        context.model_file(config, draft, draft) if draft else None,
        visible_number(number) if kind == "GPU" else None,
        parameters.whole(GPU_LAYERS, ALL_LAYERS) if kind == "GPU" else 0,
        replace(
            defaults_of(config, UNSUPPORTED, adapters),
            chat=_recommended(file),
            thinking=not REASONING_TAGS.read(config),  # with tags, the gateway separates it
        ),
    )


def _recommended(file: Path) -> SamplingParameters:
    """What the header of the file has about the sampling of chats. Negative values mean defaults."""
    values = recommended_sampling(file)
    recommended = {_RECOMMENDED[name]: value for name, value in values.items() if name in _RECOMMENDED and value >= 0}
    return sampling_of(recommended, file.name)

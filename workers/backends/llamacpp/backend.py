"""Serves GGUF models: `model.gguf`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmserve.workers.backends.language.backend import IMAGE, INPUTS, OUTPUTS, SUFFIX, THINKING, LanguageBackend
from shmserve.workers.backends.language.encoder import POOLING, Encoder
from shmserve.workers.backends.llamacpp.engine import LlamaCppEngine, has_gpu
from shmserve.workers.backends.llamacpp.settings import MMPROJ, settings_of
from shmserve.workers.backends.parameters import Parameters

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig, ModelInput, ModelOutput
    from shmserve.workers.backends.base import Backend
    from shmserve.workers.backends.language.sampling import Defaults


class LlamaCpp(LanguageBackend):
    @classmethod
    def chosen(cls, config: ModelConfig) -> type[Backend]:
        return LlamaCppEncoder if Parameters(config).text(POOLING) else cls

    def inputs_of(self, config: ModelConfig) -> tuple[ModelInput, ...]:
        return (*INPUTS, SUFFIX, IMAGE) if Parameters(config).text(MMPROJ) else (*INPUTS, SUFFIX)

    def outputs_of(self, config: ModelConfig) -> tuple[ModelOutput, ...]:
        return (*OUTPUTS, THINKING)

    def start(self, config: ModelConfig) -> tuple[LlamaCppEngine, Defaults]:
        settings = settings_of(config, self.context, has_gpu())
        return LlamaCppEngine(settings), settings.defaults


class LlamaCppEncoder(Encoder):
    def start(self, config: ModelConfig) -> LlamaCppEngine:
        return LlamaCppEngine(settings_of(config, self.context, has_gpu()))

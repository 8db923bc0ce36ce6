"""Validates a configuration that a model has completed, and lists effects that the user may not expect.

Invariant: nothing here parses configuration files, so that a worker with its own interpreter can use it.
"""

from __future__ import annotations

from collections.abc import Collection

from shmserve.repo.config.complete import complete, is_ensemble
from shmserve.repo.config.problems import Report
from shmserve.repo.config.schema import ModelConfig
from shmserve.repo.rules.fields import HostFacts, validate


def verify(config: ModelConfig, *, backends: Collection[str], gpus: Collection[int] = ()) -> ModelConfig:
    """Fill in the defaults of a configuration completed by its model, and validate it. Raises ConfigError with all
    problems.
    """
    config = complete(config, config.name, (), backends, gpus)
    report = Report(f"{config.name}, as completed by the model")
    validate(config, HostFacts(backends, gpus), report.problem)
    report.raise_problems()
    return config


def surprises(given: ModelConfig, final: ModelConfig) -> list[str]:
    """Log messages about completed values that the user may not expect."""
    if given.max_batch_size or final.max_batch_size <= 0 or is_ensemble(final) or final.backend == "python":
        # A Python model sets its own max_batch_size.
        return []
    dynamic = given.dynamic_batching is None and final.dynamic_batching is not None
    batched = ", and requests are batched dynamically" if dynamic else ""
    return [
        f"max_batch_size was not given, or 0; the model can batch, so it is set to {final.max_batch_size}{batched}. "
        f"To change it, set max_batch_size in config.pbtxt (1 for no batching), or start the server with "
        f"--backend-config={final.backend},default-max-batch-size=N"
    ]

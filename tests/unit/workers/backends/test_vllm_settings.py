"""The configuration of a model for vLLM, and the environment of its processes. vLLM itself need not be installed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shmserve.repo.config.schema import ModelConfig, ModelParameter
from shmserve.workers.backends.base import Context
from shmserve.workers.backends.vllm.backend import prepare_environment
from shmserve.workers.backends.vllm.settings import Settings, settings_of


def config_of(**parameters: str) -> ModelConfig:
    return ModelConfig(
        name="m",
        backend="vllm",
        parameters={name: ModelParameter(string_value=value) for name, value in parameters.items()},
    )


def context_of(folder: Path, threads: int = 1, **arguments: Any) -> Context:
    version = folder / "1"
    version.mkdir(exist_ok=True)
    (version / "model.json").write_text(json.dumps(arguments))
    return Context("m", 1, "m_0_0", folder, version, {}, threads)


def settings(folder: Path, arguments: dict[str, Any], cores: int = 1, **parameters: str) -> Settings:
    return settings_of(config_of(**parameters), context_of(folder, cores, **arguments))


@pytest.mark.parametrize(
    ("cores", "given", "expected"), [(1, {}, 1), (2, {}, 1), (16, {}, 15), (2, {"threads": "2"}, 2)]
)
def test_one_core_is_left_to_the_scheduler(
    cores: int, given: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM does it itself. The worker has set the variable to the cores of the instance."""
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": str(cores), "VLLM_HOST_IP": "10.0.0.1"})
    prepare_environment(settings(tmp_path, {}, cores, **given))
    assert (os.environ["OMP_NUM_THREADS"], os.environ["VLLM_HOST_IP"]) == (str(expected), "10.0.0.1")


def test_arguments_of_the_engine(tmp_path: Path) -> None:
    found = settings(
        tmp_path, {"disable_log_stats": False, "max_num_seqs": 9}, slots="4", context_length="64"
    ).arguments
    assert found == {"model": str(tmp_path / "1"), "max_num_seqs": 4, "max_model_len": 64, "disable_log_stats": True}

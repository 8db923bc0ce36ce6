"""The configuration of a model for vLLM, and the environment of its processes. vLLM itself need not be installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shmserve.errors import InvalidRequest, Unsupported
from shmserve.repo.config.schema import ModelConfig, ModelParameter
from shmserve.workers.backends.base import Context
from shmserve.workers.backends.language.backend import IMAGE, PROMPT_LOGPROBS
from shmserve.workers.backends.vllm.backend import Vllm, VllmTexts, prepare_environment
from shmserve.workers.backends.vllm.settings import VllmSettings, settings_of
from tests.support.cases import cases


def config_of(**parameters: str) -> ModelConfig:
    return ModelConfig(
        name="m",
        backend="vllm",
        parameters={name: ModelParameter(string_value=value) for name, value in parameters.items()},
    )


def context_of(folder: Path, threads: int = 1, **arguments: Any) -> Context:
    """The network, `net`, sees images."""
    version = folder / "1"
    (version / "net").mkdir(parents=True, exist_ok=True)
    (version / "net" / "config.json").write_text('{"vision_config": {}}')
    (version / "model.json").write_text(json.dumps(arguments))
    return Context("m", 1, "m_0_0", folder, version, {}, threads)


def settings(folder: Path, arguments: dict[str, Any], cores: int = 1, **parameters: str) -> VllmSettings:
    return settings_of(config_of(**parameters), context_of(folder, cores, **arguments))


@pytest.mark.parametrize(
    ("cores", "given", "expected"), [(1, {}, 1), (2, {}, 1), (16, {}, 15), (2, {"threads": "2"}, 2)]
)
def test_one_core_is_left_to_the_scheduler(cores: int, given: dict[str, str], expected: int, tmp_path: Path) -> None:
    """As vLLM does it itself. The worker has set the variable to the cores of the instance."""
    environment = {"OMP_NUM_THREADS": str(cores), "MKL_NUM_THREADS": str(cores), "VLLM_HOST_IP": "10.0.0.1"}
    prepare_environment(settings(tmp_path, {}, cores, **given).threads, environment)
    assert (environment["OMP_NUM_THREADS"], environment["VLLM_HOST_IP"]) == (str(expected), "10.0.0.1")
    assert "MKL_NUM_THREADS" not in environment, "torch would compute with as many threads, whatever OpenMP is told"


@cases(({}, "0"), ({"VLLM_CPU_OMP_THREADS_BIND": "auto"}, None), ({"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, "1"))
def test_the_scheduler_computes_in_its_own_process_unless_threads_are_bound(
    environment: dict[str, str], expected: str | None
) -> None:
    prepare_environment(1, environment)
    assert environment.get("VLLM_ENABLE_V1_MULTIPROCESSING") == expected


def test_arguments_of_the_engine(tmp_path: Path) -> None:
    found = settings(
        tmp_path, {"disable_log_stats": False, "max_num_seqs": 9}, slots="4", context_length="64"
    ).arguments
    assert found == {"model": str(tmp_path / "1"), "max_num_seqs": 4, "max_model_len": 64, "disable_log_stats": True}
    pooled = settings(tmp_path, {"pooler_config": {"dimensions": 8}}, pooling="cls", normalize="false")
    assert pooled.arguments["pooler_config"] == {"dimensions": 8, "pooling_type": "CLS"}
    assert (pooled.arguments["runner"], pooled.pooling, pooled.normalize) == ("pooling", "cls", False)
    assert "pooler_config" not in settings(tmp_path, {}, pooling="auto").arguments
    with pytest.raises(InvalidRequest, match=r"pooling.*one of mean, cls, last, rank, auto"):
        settings(tmp_path, {}, pooling="max")


@cases(
    ({"model": "net"}, True),
    ({"model": "net", "limit_mm_per_prompt": {"image": 0}}, False),
    ({"model": "owner/name"}, False),
    ({"model": "owner/name", "limit_mm_per_prompt": {"image": 4}}, True),
    ({"model": "owner/name", "limit_mm_per_prompt": {"video": 4}}, False),
)
def test_the_input_for_images(arguments: dict[str, Any], sees: bool, tmp_path: Path) -> None:
    context, config = context_of(tmp_path, **arguments), config_of()
    assert (IMAGE in Vllm(context).inputs_of(config)) is sees
    assert settings_of(config, context).sees_images is sees


@cases(
    ({}, {}, True),
    ({"enable_lora": True}, {}, False),
    ({"enable_lora": False}, {}, True),
    ({}, {"adapters": "french=net"}, False),
)
def test_models_with_adapters_refuse_log_probabilities_of_prompts(
    arguments: dict[str, Any], given: dict[str, str], scores: bool, tmp_path: Path
) -> None:
    context, config = context_of(tmp_path, **arguments), config_of(**given)
    assert (PROMPT_LOGPROBS in Vllm(context).outputs_of(config)) is scores
    assert ("prompt_logprobs" in settings_of(config, context).defaults.unsupported) is not scores


def test_samplers_of_llamacpp_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no 'typical_p'"):
        settings(tmp_path, {}, sampling_parameters='{"typical_p": 0.5}')


def test_a_pooling_makes_an_encoder() -> None:
    assert [Vllm.chosen(config_of(**given)) for given in ({}, {"pooling": "auto"})] == [Vllm, VllmTexts]

"""The engines for language models that the conformance suite tests: each with a model `text` of a token per byte."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests import ROOT
from tests.process.models.language import llm_oracle, vllm_network
from tests.support.model_files import parameters
from tests.support.workers.models import gguf_models

SLOTS = 4
ENDLESS = vllm_network.LENGTH
"""Context length of the model. A text that fills it takes minutes."""
ADAPTER = "french"


class Expected(NamedTuple):
    """Continuations by another program: of the prompts, and of the first prompt with the adapter."""

    texts: dict[str, str]
    adapted: str


class EngineKind(NamedTuple):
    """`module`: what must be installed. `write`: writes the model to a repository and continues the prompts by this
    number of tokens. `variables`: of the server. `start`: number of tokens that begin each prompt."""

    name: str
    module: str
    write: Callable[[Path, Sequence[str], int], Expected]
    variables: dict[str, str]
    start: int


def _write_llamacpp(repository: Path, prompts: Sequence[str], count: int) -> Expected:
    version = _version(repository, "llamacpp", slots=str(SLOTS), context_length=str(ENDLESS), threads="1")
    file = gguf_models.write(version / "model.gguf", context=ENDLESS)
    gguf_models.write_adapter(version / "adapter")
    given = [{"prompt": prompt, "max_tokens": count, "temperature": 0} for prompt in prompts]
    texts = llm_oracle.texts(file, given)
    merged = gguf_models.write(repository.with_name("merged.gguf"), context=ENDLESS, adapted=True)
    return Expected(dict(zip(prompts, texts, strict=True)), llm_oracle.texts(merged, given[:1])[0])


def _write_vllm(repository: Path, prompts: Sequence[str], count: int) -> Expected:
    version = _version(repository, "vllm", slots=str(SLOTS))
    network = version / "network"
    network.mkdir()
    asked = [(prompt, count, False) for prompt in prompts]
    *texts, adapted = continuations(network, [*asked, (prompts[0], count, True)])
    (network / vllm_network.ADAPTER).rename(version / "adapter")
    engine = {"model": "network", "dtype": "float32", "enforce_eager": True, "seed": 1}
    engine |= {"distributed_executor_backend": "uni", "max_lora_rank": vllm_network.RANK}
    (version / "model.json").write_text(json.dumps(engine))
    return Expected(dict(zip(prompts, texts, strict=True)), adapted)


def _version(repository: Path, backend: str, **given: str) -> Path:
    version = repository / "text" / "1"
    version.mkdir(parents=True)
    config = f'backend: "{backend}"\n{parameters(**given, adapters=f"{ADAPTER}=adapter")}'
    (repository / "text" / "config.pbtxt").write_text(config)
    return version


def continuations(network: Path, asked: Sequence[tuple[str, int, bool]]) -> list[str]:
    """Makes a network for vLLM, and continues texts with it: see `vllm_network`."""
    command = [sys.executable, "-m", "tests.process.models.language.vllm_network", str(network)]
    given = json.dumps(asked)
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


KINDS = (
    EngineKind("llamacpp", "xllamacpp", _write_llamacpp, {}, 2),  # a token begins each prompt, and a space
    EngineKind("vllm", "vllm", _write_vllm, {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}, 0),
)

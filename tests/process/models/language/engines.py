"""The engines for language models that the conformance suite tests: each with a model `text` of a token per byte."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests import ROOT
from tests.process.models.language import llm_oracle, vllm_network
from tests.support.ensemble_models import tensors
from tests.support.model_files import parameters, write_model
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
    number of tokens. `variables`: of the server. `start`: number of tokens that begin each prompt. `engine`: it runs in
    an engine of the server, and not in a model that has the tensors of a language model."""

    name: str
    module: str
    write: Callable[[Path, Sequence[str], int], Expected]
    variables: dict[str, str]
    start: int
    engine: bool = True


def _write_llamacpp(repository: Path, prompts: Sequence[str], count: int) -> Expected:
    version = _version(repository, "llamacpp", slots=str(SLOTS), context_length=str(ENDLESS), threads="1")
    file = gguf_models.write(version / "model.gguf", context=ENDLESS)
    gguf_models.write_adapter(version / "adapter")
    given = [{"prompt": prompt, "max_tokens": count, "temperature": 0} for prompt in prompts]
    texts = llm_oracle.texts(file, given)
    merged = gguf_models.write(repository.with_name("merged.gguf"), context=ENDLESS, adapted=True)
    return Expected(dict(zip(prompts, texts, strict=True)), llm_oracle.texts(merged, given[:1])[0])


def _write_vllm(repository: Path, prompts: Sequence[str], count: int) -> Expected:
    version = _version(repository, "vllm", tool_parser="hermes")
    network = version / "network"
    network.mkdir()
    asked = [(prompt, count, False) for prompt in prompts]
    *texts, adapted = continuations(network, [*asked, (prompts[0], count, True)])
    (network / vllm_network.ADAPTER).rename(version / "adapter")
    engine = {"model": "network", "dtype": "float32", "enforce_eager": True, "seed": 1}
    engine |= {"max_num_seqs": SLOTS, "max_lora_rank": vllm_network.RANK}
    (version / "model.json").write_text(json.dumps(engine))
    return Expected(dict(zip(prompts, texts, strict=True)), adapted)


PYTHON = """
import asyncio
import json
import zlib

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def stream(self, request):
        def given(name):
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            return None if tensor is None else tensor.as_numpy().reshape(-1)[0]

        prompt, sampling, streams = given("text_input"), json.loads(given("sampling_parameters")), given("stream")
        stops, text, sent, state = sampling.get("stop", []), "", 0, zlib.crc32(prompt)
        for _ in range(sampling["max_tokens"]):
            text += chr(97 + state % 26)
            state = zlib.crc32(text[-1].encode(), state)
            found = [text.find(stop, sent) for stop in stops if stop in text[sent:]]
            if found:
                text = text[: min(found)]
                break
            begun = [size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])]
            end = len(text) - max(begun, default=0)
            if streams and end > sent:
                yield self.response(text[sent:end], "None", sampling)
                sent = end
            await asyncio.sleep(0)
        yield self.response(text[sent:], "stop" if len(text) < sampling["max_tokens"] else "length", sampling)

    def response(self, text, reason, sampling):
        count = sampling.get("n", 1)
        outputs = (("text_output", text), ("finish_reason", reason))
        tensors = [pb_utils.Tensor(name, np.array([value] * count, object)) for name, value in outputs]
        return pb_utils.InferenceResponse(tensors)
"""
"""Each character follows from those before it."""


def _write_python(repository: Path, prompts: Sequence[str], count: int) -> Expected:
    strings = [f"{name}:STRING:[1]" for name in ("text_input", "sampling_parameters")]
    flags = [
        f"{name}:BOOL:[1]:optional: true" for name in ("stream", "exclude_input_in_output", "return_finish_reason")
    ]
    outputs = tensors("text_output:STRING:[-1]", "finish_reason:STRING:[-1]")
    policy = "model_transaction_policy { decoupled: true }"
    config = f'backend: "python" {policy} input {tensors(*strings, *flags)} output {outputs}'
    write_model(repository, "text", config, PYTHON)
    return Expected({prompt: _characters(prompt, count) for prompt in prompts}, "")


def _characters(prompt: str, count: int) -> str:
    text = ""
    for _ in range(count):
        text += chr(97 + zlib.crc32((prompt + text).encode()) % 26)
    return text


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
    EngineKind("python", "shmserve", _write_python, {}, 0, engine=False),
    EngineKind("llamacpp", "xllamacpp", _write_llamacpp, {}, 2),  # a token begins each prompt, and a space
    EngineKind("vllm", "vllm", _write_vllm, {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}, 0),
)

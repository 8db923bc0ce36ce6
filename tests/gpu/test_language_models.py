"""Language models on a real GPU. The oracle is the same network on the CPU, with the suite's own models
(`tests.process.models.language.engines`). An engine that is not installed, or not for GPUs, is skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shmserve.testing import Server
from tests.process.models.language.engines import ADAPTER, KINDS, SLOTS, EngineKind, Expected
from tests.process.models.language.test_engines import Text, said, text_of

pytestmark = [pytest.mark.gpu, pytest.mark.process]

PROMPTS = [f"{number}: a prompt" for number in range(2 * SLOTS)]
TOKENS = 24


def skip_unless_for_gpus(name: str) -> None:
    if name == "vllm":
        pytest.importorskip("vllm")
        if not pytest.importorskip("torch").cuda.is_available():
            pytest.skip("this PyTorch is not one for CUDA")
    else:
        pytest.importorskip("xllamacpp")
        from shmserve.workers.backends.llamacpp.engine import has_gpu

        if not has_gpu():
            pytest.skip("this llama.cpp is not built for GPUs")


@pytest.fixture(scope="module", params=[kind for kind in KINDS if kind.engine], ids=lambda kind: str(kind.name))
def serving(
    request: pytest.FixtureRequest, hardware: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, EngineKind, Expected]]:
    kind: EngineKind = request.param
    skip_unless_for_gpus(kind.name)
    root = tmp_path_factory.mktemp("gpu") / "models"
    expected = kind.write(root, PROMPTS, TOKENS)
    with open(root / "text" / "config.pbtxt", "a") as config:
        config.write("\ninstance_group { kind: KIND_GPU gpus: 0 }\n")
    options = ("--model-environment", "VLLM_*", "--model-environment", "HF_*")
    with Server(root, "--exit-on-error", "true", *options, start_timeout=300) as server:
        yield server, kind, expected


@pytest.fixture
def text(serving: tuple[Server, EngineKind, Expected]) -> Iterator[Text]:
    with serving[0].client() as client:
        yield Text(serving[0], client, *serving[1:])


def test_the_network_is_in_the_memory_of_the_gpu(text: Text) -> None:
    (model,) = text.client.activity()["models"]
    assert [instance["kind"] for instance in model["instances"]] == ["KIND_GPU"]
    assert min(instance["gpu_memory_bytes"] for instance in model["instances"]) > 0


def test_texts_equal_those_of_the_cpu(text: Text) -> None:
    """Alone, and in one batch. Roundings differ, so a later token may be another one if two are equally likely."""
    begun = TOKENS // 3
    for prompt in PROMPTS[:2]:
        assert text_of(text.complete(prompt))[:begun] == text.expected[prompt][:begun]
    streams = [text.stream(prompt) for prompt in PROMPTS]
    assert [said(stream)[:begun] for stream in streams] == [text.expected[prompt][:begun] for prompt in PROMPTS]


def test_adapters_and_cancellation(text: Text) -> None:
    assert said(text.stream(PROMPTS[0], sampling={"lora_name": ADAPTER}))[:8] == text.adapted[:8]
    for stream in [text.endless(f"{number}") for number in range(SLOTS)]:
        stream.close()
    text.assert_free()

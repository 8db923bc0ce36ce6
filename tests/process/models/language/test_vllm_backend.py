"""Triton's vLLM backend, unchanged: its model.py and the modules beside it, with vLLM on the CPU.

The network is small, with random weights. The oracle is the same network in another library (`vllm_network`). The
backend is not part of this repository: these tests need the path of `src` in a checkout of the backend, see
docs/backends.md.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shmserve
from shmserve.errors import ServeError
from shmserve.testing import Server
from tests.process.models.language.engines import continuations
from tests.support.living import until
from tests.support.model_files import parameters

SOURCE = os.environ.get("SHMSERVE_VLLM_BACKEND", "")
TEXTS = ("hello", *(f"text {number}" for number in range(7)))
TOKENS = 8
LENGTH = 2048
"""Maximum number of tokens of a text and its continuation."""

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(not SOURCE, reason="SHMSERVE_VLLM_BACKEND does not name a checkout of vllm_backend"),
]

CONFIG = 'backend: "vllm"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n'
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": LENGTH, "max_num_seqs": 4, "seed": 1}
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
OPTIONS = ("--model-control-mode", "explicit", "--model-environment", "VLLM_*", "--model-environment", "HF_*")


class Text:
    """A server with the model "text", and the expected continuations."""

    def __init__(self, server: Server, client: shmserve.Client, expected: dict[str, str]) -> None:
        self.server, self.client, self.expected = server, client, expected

    def stream(self, text: str, count: int, **more: object) -> Iterator[shmserve.Result]:
        given = {"text_input": np.array([text], object), **{name: np.array([value]) for name, value in more.items()}}
        settings = {"temperature": 0, "max_tokens": count, "ignore_eos": True}
        return self.client.stream("text", given, parameters=settings, timeout=120)

    def complete(self, text: str, count: int, **more: object) -> str:
        (found,) = self.stream(text, count, **more)
        return str(found["text_output"][0].decode())


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The directory of a network, and its continuations of TEXTS."""
    folder = tmp_path_factory.mktemp("network")
    found = continuations(folder, [(text, TOKENS, False) for text in TEXTS])
    return folder, dict(zip(TEXTS, found, strict=True))


@pytest.fixture(scope="module")
def serving(network: tuple[Path, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("vllm")
    (root / "backends").mkdir()
    (root / "backends" / "vllm").symlink_to(Path(SOURCE).absolute())
    for name, more in {"text": parameters(REPORT_CUSTOM_METRICS="true"), "broken": ""}.items():
        (root / "models" / name / "1").mkdir(parents=True)
        (root / "models" / name / "config.pbtxt").write_text(CONFIG + more)
        place = str(network[0] if name == "text" else root / "nowhere")
        (root / "models" / name / "1" / "model.json").write_text(json.dumps(ENGINE | {"model": place}))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        options = (*OPTIONS, "--backend-directory", str(root / "backends"))
        with Server(root / "models", *options, gateway=True) as server:
            with server.client() as client:
                client.load("text", timeout=240)
            yield server


@pytest.fixture
def text(serving: Server, network: tuple[Path, dict[str, str]]) -> Iterator[Text]:
    with serving.client() as client:
        yield Text(serving, client, network[1])


def test_prompts_are_completed(text: Text) -> None:
    config = text.client.config("text")
    assert [entry["name"] for entry in config["input"]][:3] == ["text_input", "image", "stream"]
    assert config["model_transaction_policy"] == {"decoupled": True}
    expected = text.expected["hello"]
    assert text.complete("hello", TOKENS) == "hello" + expected
    assert text.complete("hello", TOKENS, exclude_input_in_output=True) == expected
    parts = [part for part in text.stream("hello", TOKENS, stream=True) if "text_output" in part]
    assert len(parts) > 1
    assert "".join(part["text_output"][0].decode() for part in parts) == expected


def test_a_cancelled_request_is_aborted_in_the_engine(text: Text) -> None:
    def is_cancelled() -> bool:
        for _ in text.stream("hello", LENGTH - 10, stream=True):
            break  # leaving the loop cancels the request, unless the engine is already done
        return "Successfully cancelled the request" in text.server.log

    until(text.client, is_cancelled)


def test_metrics_of_the_engine(text: Text) -> None:
    labels = '{model="text",version="1"}'

    def tokens() -> float:
        lines = text.client.metrics().splitlines()
        (value,) = [line.split()[-1] for line in lines if line.startswith(f"vllm:generation_tokens_total{labels}")]
        return float(value)

    before = tokens()
    text.complete("hello", TOKENS)
    until(text.client, lambda: tokens() == before + TOKENS)
    assert f"vllm:request_params_n_count{labels}" in text.client.metrics()


def test_an_engine_start_failure_is_reported(text: Text) -> None:
    with pytest.raises(ServeError, match=r"load failed for model 'broken': .*HFValidationError"):
        text.client.load("broken", timeout=240)
    assert text.complete("hello", 1) == "hello" + text.expected["hello"][:1]


def test_unloading_ends_the_engine(text: Text) -> None:
    text.client.unload("text", timeout=120)
    until(text.client, lambda: "[vllm] Shutdown complete" in text.server.log)

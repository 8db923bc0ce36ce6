"""Models of vLLM that see images, or compute vectors and scores, with OpenAI's client. The oracle is the same network
in another library (`vllm_others`)."""

from __future__ import annotations

import base64
import importlib.util
import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.errors import ServeError
from shmserve.system.procfs import descendants
from shmserve.testing import Server
from tests import ROOT
from tests.process.models.language.vllm_others import IMAGE, Answers, Asked
from tests.support.gateway.language_models import openai_client, picture, post
from tests.support.launch import await_end
from tests.support.model_files import parameters
from tests.support.optional import optional

openai = optional("openai")
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

MODELS: dict[str, dict[str, str]] = {"eyes": {}, "vectors": {"pooling": "mean"}, "rank": {"pooling": "rank"}}
"""Their parameters."""
COLOURS = ("red", "blue")
TEXTS = ("hello", "Why?")
DOCUMENTS = ("a", "bb", "ccc")
COUNT = 12
_SCREEN, _FRAME = struct.pack("<HHBBB6x", 1, 1, 0x80, 0, 0), struct.pack("<4xHHB", 12000, 12000, 0)
LARGER_THAN_ITS_SCREEN = base64.b64encode(b"GIF89a" + _SCREEN + b"," + _FRAME + b"\2\2D\1\0;").decode()
"""A GIF of one pixel with a frame of 12000 x 12000."""
CHATS: tuple[tuple[str, ...], ...] = (("red", "What?"), ("blue", "What?"), ("red", "What?", "blue"), ("What?",))
"""The parts of messages: images by their colours, and texts."""


def prompt_of(chat: tuple[str, ...]) -> tuple[str, list[str]]:
    marked = "".join(IMAGE if part in COLOURS else part for part in chat)
    return f"user: {marked}\nassistant:", [picture(part) for part in chat if part in COLOURS]


def messages_of(chat: tuple[str, ...]) -> list[dict[str, Any]]:
    parts = [image_part(picture(one)) if one in COLOURS else {"type": "text", "text": one} for one in chat]
    return [{"role": "user", "content": chat[0] if len(chat) == 1 else parts}]


def image_part(image: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answers]:
    folder = tmp_path_factory.mktemp("networks")
    asked = Asked(
        prompts=[prompt_of(chat) for chat in CHATS],
        count=COUNT,
        texts=list(TEXTS),
        pairs=[("Why?", document) for document in DOCUMENTS],
    )
    command = [sys.executable, "-m", "tests.process.models.language.vllm_others", str(folder)]
    given = json.dumps(asked)
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    answers: Answers = json.loads(done.stdout.splitlines()[-1])
    return folder, answers


@pytest.fixture(scope="module")
def server(networks: tuple[Path, Answers], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("models")
    for name, settings in {**MODELS, "vectors-rank": {"pooling": "rank"}}.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(f'backend: "vllm"\n{parameters(slots="4", **settings)}')
        engine = {"model": str(networks[0] / name.partition("-")[0]), "dtype": "float32", "enforce_eager": True}
        engine["override_generation_config"] = {"top_k": 1}
        (root / name / "1" / "model.json").write_text(json.dumps(engine))
    options = ("--model-control-mode", "explicit", "--model-environment", "VLLM_*", "--model-environment", "HF_*")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}.items():
            patch.setenv(name, value)
        with Server(root, *options, gateway=True) as running:
            yield running


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, server: Server) -> str:
    """A model that is loaded for its tests: on a busy machine, one takes most of the time that a test may take."""
    with server.client() as native:
        native.load(request.param, timeout=280)
    return str(request.param)


def of_model(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("model", [name], indirect=True)


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with openai_client(server.endpoints["http"]) as made:
        yield made


@of_model("eyes")
def test_images_of_a_chat(client: Any, model: str, networks: tuple[Path, Answers]) -> None:
    """The engine sees them at their places, and a chat without images is one of the same model."""
    given: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": COUNT, "extra_body": {"ignore_eos": True}}
    found = [client.chat.completions.create(messages=messages_of(chat), **given) for chat in CHATS]
    assert [one.choices[0].message.content for one in found] == networks[1]["continuations"]
    own = {**given, "temperature": None}  # sampled as the authors of the network recommend
    streamed = client.chat.completions.create(messages=messages_of(CHATS[0]), stream=True, **own)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == networks[1]["continuations"][0]
    for image, text in (picture("red")[:60], "image"), (LARGER_THAN_ITS_SCREEN, "pixels or more; the limit"):
        with pytest.raises(openai.BadRequestError, match=text):
            client.chat.completions.create(messages=[{"role": "user", "content": [image_part(image)]}], **given)


@of_model("eyes")
def test_log_probabilities_of_a_prompt(client: Any, model: str) -> None:
    """Those of a text that is generated are those that it has as a prompt."""
    given: dict[str, Any] = {"model": model, "temperature": 0, "logprobs": 1, "extra_body": {"ignore_eos": True}}
    (made,) = client.completions.create(prompt=TEXTS[0], max_tokens=COUNT, **given).choices
    text = TEXTS[0] + made.text
    found = client.completions.create(prompt=text, max_tokens=0, echo=True, n=2, **given)
    for choice in found.choices:
        scores = choice.logprobs
        assert (choice.text, "".join(scores.tokens), scores.token_logprobs[0]) == (text, text, None)
        assert scores.token_logprobs[-COUNT:] == pytest.approx(made.logprobs.token_logprobs, rel=1e-3)
    assert found.usage.total_tokens == len(text)


@of_model("vectors")
def test_vectors(client: Any, model: str, networks: tuple[Path, Answers]) -> None:
    forms: dict[str, Callable[[Any], Any]] = {"float": np.array, "base64": decoded}
    for form, read in forms.items():
        found = client.embeddings.create(model=model, input=list(TEXTS), encoding_format=form)
        vectors = np.array([read(item.embedding) for item in found.data])
        assert vectors == pytest.approx(np.array(networks[1]["vectors"]), abs=1e-5)
        assert found.usage.prompt_tokens == sum(map(len, TEXTS))
    (cut,) = client.embeddings.create(model=model, input=TEXTS[0], dimensions=8).data
    expected = np.array(networks[1]["vectors"][0][:8])
    assert cut.embedding == pytest.approx(expected / np.linalg.norm(expected), abs=1e-5)
    with pytest.raises(openai.BadRequestError, match=r"vLLM: .*maximum"):
        client.embeddings.create(model=model, input="a" * 70000)
    texts, own = ["a" * 70000, "a" * 50], {"truncate_prompt_tokens": 50}
    cut = client.embeddings.create(model=model, input=texts, extra_body=own)
    assert cut.data[0].embedding == pytest.approx(cut.data[1].embedding, abs=1e-5)
    assert cut.usage.prompt_tokens == 100
    assert model in [one.id for one in client.models.list()]


def decoded(vector: str) -> Any:
    return np.frombuffer(base64.b64decode(vector), "<f4")


def test_a_model_without_scores_is_refused(server: Server) -> None:
    with server.client() as native, pytest.raises(ServeError, match="vLLM computes no scores: its tasks are"):
        native.load("vectors-rank", timeout=280)


@of_model("rank")
def test_scores(client: Any, model: str, networks: tuple[Path, Answers]) -> None:
    scores = networks[1]["scores"]
    results = post(client, "/v1/rerank", model=model, query="Why?", documents=list(DOCUMENTS))["results"]
    assert {one["index"]: one["relevance_score"] for one in results} == pytest.approx(dict(enumerate(scores)), abs=1e-5)
    found = post(client, "/v1/score", model=model, text_1="Why?", text_2=list(DOCUMENTS))
    assert [one["score"] for one in found["data"]] == pytest.approx(scores, abs=1e-5)
    assert found["usage"]["prompt_tokens"] == sum(len("Why?") + len(document) + 3 for document in DOCUMENTS)


@of_model("rank")
def test_the_engine_ends_when_the_server_is_killed(server: Server, model: str) -> None:
    """The last test: nothing is left that could end the engine's own processes."""
    processes = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in descendants(server.pid)}
    assert [name for name in processes.values() if name.startswith("VLLM")], model
    server.kill()
    for pid in processes:
        await_end(pid)

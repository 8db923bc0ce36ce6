"""OpenAI's client with the engine for GGUF files. The oracle is the bare engine (`llm_oracle`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmserve.testing import Server
from tests.process.models.language import llm_oracle
from tests.support.gateway.language_models import openai_client
from tests.support.model_files import parameters
from tests.support.optional import optional
from tests.support.workers.models import gguf_models

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed"),
]

openai = optional("openai")
PROMPTS = ["Hello", "What is a tensor?", "abc" * 20]
CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
RENDERED = "system: Be brief.\nuser: Why?\nassistant:"
SAMPLING: dict[str, Any] = {"model": "text", "temperature": 0, "max_tokens": 24}
ENDLESS = 1 << 17


@pytest.fixture(scope="module")
def expected(repository: Path) -> dict[str, str]:
    for name, slots, context in (("text", 4, 512), ("one", 1, ENDLESS)):
        (repository / name / "1").mkdir(parents=True)
        settings = parameters(slots=str(slots), context_length=str(context), threads="1")
        (repository / name / "config.pbtxt").write_text(f'backend: "llamacpp"\n{settings}')
        gguf_models.write(repository / name / "1" / "model.gguf", context=ENDLESS)
    given = [{"prompt": prompt, "max_tokens": 24, "temperature": 0} for prompt in (*PROMPTS, RENDERED)]
    return dict(
        zip((*PROMPTS, RENDERED), llm_oracle.texts(repository / "text" / "1" / "model.gguf", given), strict=True)
    )


@pytest.fixture(scope="module")
def server(repository: Path, expected: dict[str, str]) -> Iterator[Server]:
    with Server(repository, "--exit-on-error", "true", gateway=True) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with openai_client(server.endpoints["http"]) as made:
        yield made


def test_completions(client: Any, expected: dict[str, str]) -> None:
    found = client.completions.create(prompt=PROMPTS, n=2, **SAMPLING)
    assert [choice.text for choice in found.choices] == [expected[prompt] for prompt in PROMPTS for _ in range(2)]
    assert {choice.finish_reason for choice in found.choices} == {"length"}
    assert found.usage.completion_tokens == 6 * 24
    texts = [""] * 6
    last = None
    for chunk in client.completions.create(
        prompt=PROMPTS, n=2, stream=True, stream_options={"include_usage": True}, **SAMPLING
    ):
        last = chunk
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in found.choices]
    assert last is not None
    assert last.usage == found.usage


def test_chats(client: Any, expected: dict[str, str]) -> None:
    found = client.chat.completions.create(messages=CHAT, **SAMPLING)
    assert found.choices[0].message.content == expected[RENDERED]
    chunks = list(client.chat.completions.create(messages=CHAT, stream=True, **SAMPLING))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected[RENDERED]
    assert chunks[-1].choices[0].finish_reason == "length"


def test_log_probabilities(client: Any) -> None:
    """The tokens make up the text, each is the most probable one, and a stream has the same."""
    (choice,) = client.completions.create(prompt="Hello", logprobs=3, **SAMPLING).choices
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text
    assert all(len(top) == 3 for top in found.top_logprobs)
    assert [max(top.values()) for top in found.top_logprobs] == pytest.approx(found.token_logprobs)
    tokens: list[str] = []
    for chunk in client.completions.create(prompt="Hello", logprobs=3, stream=True, **SAMPLING):
        tokens += chunk.choices[0].logprobs.tokens if chunk.choices[0].logprobs is not None else []
    assert tokens == found.tokens
    (chat,) = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=2, **SAMPLING).choices
    assert "".join(token.token for token in chat.logprobs.content) == chat.message.content


def test_closing_a_stream_frees_its_slot(client: Any) -> None:
    """The only slot of the model would be taken for minutes."""
    endless = {**SAMPLING, "model": "one", "max_tokens": ENDLESS - 100}
    with client.completions.create(prompt="Hello", stream=True, **endless) as stream:
        next(stream)
    assert client.completions.create(prompt="Hello", **SAMPLING | {"model": "one"}).choices[0].finish_reason == "length"

"""Language models in GGUF files through a real server, beyond what all engines have in common (`test_engines`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shmserve
from shmserve.errors import InvalidRequest, Unavailable
from shmserve.testing import Server
from tests.process.models.language import llm_oracle
from tests.process.models.language.test_engines import counted, tensors, text_of
from tests.support.gateway.language_models import openai_client
from tests.support.living import until
from tests.support.optional import optional
from tests.support.shared_server import SharedServer
from tests.support.workers.models import gguf_models

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed"),
]

openai = optional("openai")


WRONG_TYPE = 'input [ { name: "text_input" data_type: TYPE_UINT8 dims: [ 1 ] } ]\n'
WRONG_TEMPLATE = {"template": gguf_models.TEMPLATE.replace("endfor", "endfur")}
INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "garbage": ({}, "model.gguf is not a GGUF file that llama.cpp can run: it does not begin with 'GGUF'"),
    "half": ({}, "llama.cpp cannot load model.gguf: llama_model_load: error loading model: tensor"),
    "template": (
        {"network": WRONG_TEMPLATE},
        "llama.cpp cannot load model.gguf: common_chat_templates_init: error: Unknown statement: endfur",
    ),
    "slots": ({"slots": "999"}, "slots of model 'slots' must be a number of sequences from 1 to 256, not '999'"),
    "context": (
        {"context_length": "513"},
        "must be at most 512, the context length for which the model was trained, not '513'",
    ),
    "cache": ({"cache_type": "f17"}, "must be one of f32"),
    "batch": ({"config": "max_batch_size: 4\n"}, "max_batch_size must be 0"),
    "plain": (
        {"config": "model_transaction_policy { decoupled: false }\n"},
        "needs model_transaction_policy { decoupled: true }",
    ),
    "input": ({"config": WRONG_TYPE}, "input 'text_input' must be TYPE_STRING, not TYPE_UINT8"),
    "kept": (
        {"prompt_cache_mb": "1", "adapters": "a=model.gguf"},
        "parameter prompt_cache_mb of model 'kept' must be 0 for a model with adapters, not '1'",
    ),
    "adapter": ({"adapters": "a=b.gguf"}, "version 1 of model 'adapter' has no file for the adapter 'a'"),
    "draft": ({"draft_model": "b.gguf"}, "version 1 of model 'draft' has no file 'b.gguf'"),
    "defaults": ({"sampling_parameters": r"{\"top_p\": 2}"}, "parameter sampling_parameters of model 'defaults'"),
}
"""What is special about a model, and the reason why it is not served."""


def test_invalid_model_files_and_settings_are_reported(tmp_path: Path) -> None:
    files = {name: gguf_models.served(tmp_path, name, **given) for name, (given, _) in INVALID.items()}
    files["half"].write_bytes(files["garbage"].read_bytes()[: files["garbage"].stat().st_size // 2])
    files["garbage"].write_bytes(b"garbage" * 99)
    with Server(tmp_path) as server, server.client() as client:
        reasons = {entry["name"]: entry["reason"] for entry in client.models()}
    assert {name: reasons[name] for name, (_, text) in INVALID.items() if text not in reasons[name]} == {}
    assert reasons.keys() == INVALID.keys()


def test_grammars_samplers_and_draft_models(shared_server: SharedServer, tmp_path: Path) -> None:
    """A draft model changes no text. Its own is another one, as its weights are."""
    file = gguf_models.served(tmp_path, "m", grammars="true", draft_model="draft.gguf", slots="2")
    gguf_models.write(file.with_name("draft.gguf"), context=512, seed=1)
    (expected,) = llm_oracle.texts(file, [{"prompt": "hello", "max_tokens": 40, "temperature": 0}])
    with shared_server.serving(tmp_path) as server, server.client() as client:

        def complete(**sampling: object) -> str:
            (found,) = client.stream("m", tensors({"text_input": "hello"}), parameters={"temperature": 0, **sampling})
            return text_of(found).removeprefix("hello")

        assert complete(max_tokens=40) == expected
        assert complete(max_tokens=40, repetition_penalty=1e6) != expected
        assert complete(max_tokens=40, repetition_penalty=1e6, repeat_last_n=0) == expected
        assert complete(structured_outputs='{"grammar": "root ::= \\"yes\\" | \\"no\\""}') in ("yes", "no")
        with pytest.raises(InvalidRequest, match="failed to parse grammar"):
            complete(structured_outputs='{"grammar": "root := x"}')


def test_prompts_that_have_left_their_slot_are_kept(shared_server: SharedServer, tmp_path: Path) -> None:
    gguf_models.served(tmp_path, "keeps", network={"context": 2048}, slots="1", prompt_cache_mb="16")
    first, second = "The first conversation. " * 20, "Another one. " * 20
    with shared_server.serving(tmp_path) as server, server.client() as client:
        for prompt in (first, second, first):
            list(client.stream("keeps", tensors({"text_input": prompt})))
        hits = 'llm_prefix_cache_hits_total{model="keeps",version="1"}'
        until(client, lambda: counted(client)[hits] >= len(first) - 1)


def test_requests_are_refused_by_the_tokens_that_wait(shared_server: SharedServer, tmp_path: Path) -> None:
    gguf_models.served(tmp_path, "m", network={"context": 4096}, slots="1", max_queue_tokens="1000")
    with shared_server.serving(tmp_path) as server, server.client() as client:

        def waiting() -> int:
            return int(client.statistics("m")["model_stats"][0].get("language", {}).get("waiting_tokens", 0))

        def ask(prompt: str, **more: object) -> Iterator[shmserve.Result]:
            return client.stream(
                "m", tensors({"text_input": prompt, "stream": True, **more}), parameters={"max_tokens": 1}
            )

        endless = client.stream("m", tensors({"text_input": "a" * 90, "stream": True}), parameters={"max_tokens": 3900})
        next(endless)
        assert waiting() == 0, "its prompt has been computed"
        second = ask("b" * 700)
        until(client, lambda: 650 < waiting() < 750, "a byte is a token")
        with pytest.raises(Unavailable, match=r"tokens wait for model 'm', .* the limit is 1000 \(max_queue_tokens\)"):
            list(ask("c" * 700))
        endless.close()
        assert list(second)
        assert list(ask("c" * 700))
        assert waiting() == 0


def test_texts_are_filled_in(shared_server: SharedServer, tmp_path: Path) -> None:
    """The special tokens can also be written out."""
    for name, fills in ("m", True), ("none", False):
        gguf_models.served(tmp_path, name, network={"fills": fills})
    with shared_server.serving(tmp_path) as server, openai_client(server.endpoints["http"]) as client:
        given: dict[str, Any] = {"max_tokens": 9, "temperature": 0}

        def filled(prompt: str | list[int], suffix: str) -> str:
            return str(client.completions.create(model="m", prompt=prompt, suffix=suffix, **given).choices[0].text)

        for prompt, suffix in ("def f(", "return x"), ("", "an end"):
            written = f"<fim_pre>{prompt}<fim_suf>{suffix}<fim_mid>"
            expected = client.completions.create(model="m", prompt=written, **given).choices[0].text
            assert filled(prompt, suffix) == expected
        tokens = client.post("/../tokenize", body={"model": "m", "prompt": "<fim_pre>def f("}, cast_to=dict[str, Any])
        first = client.completions.create(model="m", prompt="<fim_pre>def f(<fim_suf>b<fim_mid>", **given)
        assert filled(tokens["tokens"][2:], "b") == first.choices[0].text, "a prompt of tokens"
        with pytest.raises(openai.BadRequestError, match="its vocabulary has no tokens for that"):
            client.completions.create(model="none", prompt="a", suffix="b", **given)


def test_a_gguf_file_is_served_without_a_repository(tmp_path: Path) -> None:
    file = gguf_models.write(tmp_path / "chat.gguf", context=512)
    (expected,) = llm_oracle.texts(file, [{"prompt": "hello", "max_tokens": 16, "temperature": 0}])
    with Server(file) as server, server.client() as client:
        (found,) = client.stream("chat", tensors({"text_input": "hello"}), parameters={"temperature": 0})
    assert text_of(found) == "hello" + expected


def test_what_a_model_thinks_is_not_its_answer(shared_server: SharedServer, tmp_path: Path) -> None:
    """The engine knows the tags from the template, which begins the thinking here. This model never ends it."""
    gguf_models.served(tmp_path, "m", network={"template": gguf_models.THINKING})
    given: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": 20}
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Why?"}], **given}
    with shared_server.serving(tmp_path) as server, openai_client(server.endpoints["http"]) as client:
        expected = client.completions.create(prompt="user: Why?\nassistant:<think>", **given).choices[0].text
        message = client.chat.completions.create(**asked).choices[0].message
        assert (message.content, message.reasoning_content) == ("", expected)
        chunks = list(client.chat.completions.create(stream=True, **asked))
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == expected
        assert not any(delta.content for delta in deltas)
        chosen = client.chat.completions.create(**asked, extra_body={"structured_outputs": {"choice": ["yes"]}})
        assert chosen.choices[0].message.content == "yes"

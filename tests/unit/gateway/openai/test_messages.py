"""Requests in Anthropic's form: what they refuse before a model is asked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shmserve.gateway.openai import messages
from shmserve.gateway.openai.errors import BadParameter


def result(content: Any) -> list[dict[str, Any]]:
    return [{"type": "tool_result", "tool_use_id": "t", "content": content}]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (5, "is neither a string nor a list"),
        (result(5), "is neither a string nor a list"),
        (result([{"type": "image"}]), "a part of the type 'image'; only texts are supported"),
        ([{"type": "text", "text": 5}], "only texts and images are supported"),
    ],
)
def test_contents_that_are_no_texts(content: Any, text: str) -> None:
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    with pytest.raises(BadParameter, match=text):
        messages.request_of(json.dumps(body).encode())


def test_a_result_of_a_tool_is_a_message_of_its_own() -> None:
    content = [*result("warm"), {"type": "text", "text": "And?"}]
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    assert messages.request_of(json.dumps(body).encode()).messages == [
        {"role": "tool", "tool_call_id": "t", "content": "warm"},
        {"role": "user", "content": [{"type": "text", "text": "And?"}]},
    ]

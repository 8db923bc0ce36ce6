"""Prompts for language models from files, and random ones."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from shmserve.terminal.errors import Misuse
from shmserve.tools.load.generation.prompts import make_prompts
from shmserve.tools.load.plan import DEFAULT_OUTPUT, Lengths, PromptPlan
from shmserve.tools.load.targets.base import PromptRequest
from tests.support.cases import cases

TEMPLATE = 7
"""Tokens that are part of every prompt."""


async def count(prompt: PromptRequest) -> int:
    """Three tokens for two words."""
    return TEMPLATE + len(prompt.text.split()) * 3 // 2


def made(wanted: PromptPlan, counts: bool = True) -> list[PromptRequest]:
    async def uncounted(prompt: PromptRequest) -> int:
        return 0

    return asyncio.run(make_prompts(wanted, count if counts else uncounted))


def test_random_prompts_have_the_wanted_lengths() -> None:
    found = made(PromptPlan(words=Lengths(100, 200), output=Lengths(8, 16), distinct=400, seed=3))
    tokens = [asyncio.run(count(prompt)) for prompt in found]
    assert min(tokens) < 105
    assert max(tokens) > 195
    assert all(98 <= number <= 202 for number in tokens)
    assert {prompt.max_tokens for prompt in found} == set(range(8, 17))
    assert len({prompt.text for prompt in found}) == len(found)
    assert found == made(PromptPlan(words=Lengths(100, 200), output=Lengths(8, 16), distinct=400, seed=3))
    normal = [asyncio.run(count(prompt)) for prompt in made(PromptPlan(words=Lengths(1, 199, 10.0), distinct=400))]
    assert sum(85 <= number <= 115 for number in normal) > 300
    with pytest.raises(Misuse, match="does not count the tokens of prompts"):
        made(PromptPlan(), counts=False)


LINES = (
    {"prompt": "one", "output_tokens": 5},
    {"messages": [{"role": "user", "content": "two"}]},
    {"custom_id": "3", "body": {"messages": [{"role": "user", "content": "three"}], "max_tokens": 6}},
    {"text": "four"},
    {"body": "no object", "text": "five"},
    {"conversations": ["no object"]},
)
MADE = [
    PromptRequest(text="one", max_tokens=5),
    PromptRequest(messages=[{"role": "user", "content": "two"}], max_tokens=DEFAULT_OUTPUT),
    PromptRequest(messages=[{"role": "user", "content": "three"}], max_tokens=6),
    PromptRequest(text="four", max_tokens=DEFAULT_OUTPUT),
    PromptRequest(text="five", max_tokens=DEFAULT_OUTPUT),
]


def test_prompts_of_files(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("\n".join(map(json.dumps, LINES)))
    assert made(PromptPlan(file=str(file))) == MADE
    assert {prompt.max_tokens for prompt in made(PromptPlan(file=str(file), output=Lengths(9, 9)))} == {9}
    turns = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]
    file.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[1:]}]))
    assert made(PromptPlan(file=str(file))) == [PromptRequest(text="Hello", max_tokens=DEFAULT_OUTPUT)]


@cases(
    ("{}", "has no entry with 'prompt'"),
    ('{"prompt": "x"}\n{"prompt": "y", "max_tokens": "many"}', "file, entry 2: 'many' is not a number of tokens"),
    ("no JSON", "has neither one JSON object per line nor one JSON list"),
    (None, "cannot read .*: No such file"),
)
def test_files_without_prompts_are_refused(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "file").write_text(text)
    with pytest.raises(Misuse, match=message):
        made(PromptPlan(file=str(tmp_path / "file")))

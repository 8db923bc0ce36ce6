"""The prompts for a language model: those of a file, or random words whose number of tokens the model has counted.

Invariant: the same seed gives the same prompts, so that all generator processes send the same.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

from shmserve.terminal.errors import Misuse
from shmserve.tools.load.plan import DEFAULT_OUTPUT, PromptPlan
from shmserve.tools.load.targets.base import PromptRequest

_TEXT = (
    "time year work life hand part case week home door line city name team kind head side book word game body back "
    "face road term form idea food land rate size view type bank fish tree king film song wall ship wind rain snow "
    "farm park hill lake moon star fire gold iron wood rock sand salt milk rice corn meat cake coat shoe ring"
)
_WORDS = _TEXT.split()
"""Of equal length and common, so that each takes the same number of tokens, usually one."""
_FEW, _MANY = 8, 24
"""Words of the prompts whose tokens are counted."""
CountTokens = Callable[[PromptRequest], Awaitable[int]]


async def make_prompts(wanted: PromptPlan, count: CountTokens) -> list[PromptRequest]:
    """`count`: returns the number of tokens of a prompt, 0 if the model does not tell."""
    random = Random(wanted.seed)
    if wanted.file is not None:
        prompts = list(_from_file(Path(wanted.file)))
        return [_with_length(prompt, wanted, random) for prompt in prompts]
    few, many = [await count(PromptRequest(text=_text(random, words))) for words in (_FEW, _MANY)]
    each = (many - few) / (_MANY - _FEW)
    if each <= 0:
        raise Misuse("the model does not count the tokens of prompts, so their length cannot be chosen: use --prompts")
    around = few - each * _FEW  # of the template of a chat
    lengths = (wanted.words.draw(random) for _ in range(wanted.distinct))
    texts = [_text(random, max(1, round((tokens - around) / each))) for tokens in lengths]
    return [_with_length(PromptRequest(text=text, max_tokens=0), wanted, random) for text in texts]


def _text(random: Random, words: int) -> str:
    return " ".join(random.choices(_WORDS, k=words))


def _with_length(prompt: PromptRequest, wanted: PromptPlan, random: Random) -> PromptRequest:
    tokens = wanted.output.draw(random) if wanted.output is not None else prompt.max_tokens or DEFAULT_OUTPUT
    return PromptRequest(prompt.text, prompt.messages, tokens)


def _from_file(path: Path) -> Iterator[PromptRequest]:
    """The prompts of a JSONL file, or of a JSON list in the format of ShareGPT."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Misuse(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        entries = json.loads(text) if text.lstrip().startswith("[") else list(map(json.loads, text.splitlines()))
    except ValueError as error:
        raise Misuse(f"{path} has neither one JSON object per line nor one JSON list: {error}") from error
    read = [_prompt_of(entry, f"{path}, entry {number}") for number, entry in enumerate(entries, 1)]
    prompts = [prompt for prompt in read if prompt is not None]
    if not prompts:
        raise Misuse(f"{path} has no entry with 'prompt', 'messages' or 'conversations'")
    yield from prompts


def _prompt_of(entry: Any, where: str) -> PromptRequest | None:
    """None for an entry without a prompt, such as a ShareGPT conversation that the assistant begins."""
    if isinstance(entry, str):
        return PromptRequest(text=entry, max_tokens=0)
    if not isinstance(entry, dict):
        return None
    if isinstance(body := entry.get("body"), dict):  # of OpenAI's batches
        entry = body
    tokens = _tokens_of(entry, where)
    if isinstance(entry.get("messages"), list):
        return PromptRequest(messages=entry["messages"], max_tokens=tokens)
    turns = entry.get("conversations")
    if isinstance(turns, list):
        first = turns[0] if turns and isinstance(turns[0], dict) else {}
        text = first.get("value") if first.get("from") in ("human", "user") else None
    else:
        text = next((entry[name] for name in ("prompt", "text_input", "text") if name in entry), None)
    return PromptRequest(text=text, max_tokens=tokens) if isinstance(text, str) else None


def _tokens_of(entry: Mapping[str, Any], where: str) -> int:
    """The length of the output; 0: not given."""
    tokens = entry.get("output_tokens") or entry.get("max_tokens") or 0
    try:
        return int(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise Misuse(f"{where}: {tokens!r} is not a number of tokens") from error

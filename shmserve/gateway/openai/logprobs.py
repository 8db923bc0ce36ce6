"""Converts log probabilities from the model's JSON to OpenAI's two formats.

For each token, the model returns an object: token id -> `logprob`, `rank` and `decoded_token`. It contains the chosen
token and the most probable ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shmserve.errors import ModelFailed
from shmserve.gateway.openai.texts import Delta

_LEAST = -9999.0
"""Replaces minus infinity, which JSON does not have."""


class TokenLogprobs:
    """Log probabilities for one chosen token. `top`: the most probable tokens and their log probabilities, in order."""

    __slots__ = ("logprob", "text", "top")

    def __init__(self, text: str, logprob: float, top: list[tuple[str, float]]) -> None:
        self.text = text
        self.logprob = logprob
        self.top = top


def tokens_of(delta: Delta, most: int) -> list[TokenLogprobs]:
    """`most`: number of alternatives that were requested."""
    given = delta.logprobs or []
    ids = delta.token_ids if delta.token_ids is not None and len(delta.token_ids) == len(given) else [None] * len(given)
    try:
        return [_token(entries, chosen, most) for entries, chosen in zip(given, ids, strict=True)]
    except (AttributeError, KeyError, TypeError, ValueError, StopIteration):
        raise ModelFailed("the output 'logprobs' of the model is not a list of objects, one for each token") from None


def _token(entries: dict[str, Any], chosen: int | None, most: int) -> TokenLogprobs:
    """Without `chosen`, the first entry is the chosen token."""
    key = str(chosen)
    entry = entries[key] if key in entries else next(iter(entries.values()))
    ranked = sorted(entries.values(), key=lambda one: one.get("rank") or 0)
    return TokenLogprobs(_text(entry), _value(entry), [(_text(one), _value(one)) for one in ranked[:most]])


def _text(entry: dict[str, Any]) -> str:
    text = entry.get("decoded_token")
    return text if isinstance(text, str) else ""


def _value(entry: dict[str, Any]) -> float:
    return max(float(entry["logprob"]), _LEAST)


def of_chat(tokens: list[TokenLogprobs]) -> dict[str, Any]:
    return {
        "content": [
            {
                **_described(token.text, token.logprob),
                "top_logprobs": [_described(text, logprob) for text, logprob in token.top],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _described(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace"))}


def of_completion(tokens: list[TokenLogprobs], offset: int) -> dict[str, Any]:
    """`offset`: characters before the first token."""
    return {
        "text_offset": list(_offsets(tokens, offset)),
        "token_logprobs": [token.logprob for token in tokens],
        "tokens": [token.text for token in tokens],
        "top_logprobs": [dict(token.top) or {token.text: token.logprob} for token in tokens],
    }


def _offsets(tokens: list[TokenLogprobs], offset: int) -> Iterator[int]:
    for token in tokens:
        yield offset
        offset += len(token.text)

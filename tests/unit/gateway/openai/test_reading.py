"""The thinking in the text of a model, which arrives in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.errors import InvalidRequest
from shmserve.gateway.openai.models import LanguageModel
from shmserve.gateway.openai.reading import Thinking, tags_of
from tests.support.hypothesis_profiles import examples

TEXTS = [
    ("<think>a<b</think>\n\nc", "a<b", "\n\nc"),
    ("\n<think></think>c</think>", "", "c</think>"),
    ("<thin", "", "<thin"),
    ("a<think>b</think>", "", "a<think>b</think>"),
    ("<think>a</thin", "a</thin", ""),
    ("", "", ""),
]
OPEN = [("a\n</think>b", "a\n", "b"), ("a</", "a</", "")]
"""The template has begun the thinking."""


@pytest.mark.parametrize(
    ("start", "text", "thought", "answer"), [*[("<think>", *one) for one in TEXTS], *[("", *one) for one in OPEN]]
)
@settings(max_examples=examples(30))
@given(data=st.data())
def test_pieces_make_no_difference(data: st.DataObject, start: str, text: str, thought: str, answer: str) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    reader = Thinking((start, "</think>"))
    found = [reader.feed(piece, number + 1 == len(pieces)) for number, piece in enumerate(pieces)]
    assert ("".join(one for one, _ in found), "".join(one for _, one in found)) == (thought, answer)


def test_tags_of_a_model() -> None:
    for text, expected in (("", None), ("</t>", ("", "</t>")), ("<t> </t>", ("<t>", "</t>"))):
        assert tags_of(LanguageModel("m", {}, frozenset(), {"reasoning_tags": text})) == expected
    with pytest.raises(InvalidRequest, match="more than two tags"):
        tags_of(LanguageModel("m", {}, frozenset(), {"reasoning_tags": "a b c"}))

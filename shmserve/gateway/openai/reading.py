"""How the text of a chat is read: the thinking of the model is separated from it, and tool calls are made of it."""

from __future__ import annotations

from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.gateway.openai.models import LanguageModel
from shmserve.llm.tool_choice import ForcedCalls

REASONING_TAGS = "reasoning_tags"
"""The parameter of a model that has the tags."""


class TextReading(Struct, frozen=True):
    """`forced`: the tool calls that each choice must consist of. `calls_in_text`: they are JSON in the text. `tags`:
    the thinking stands between these two at the beginning of the text; if the first one is empty, the text begins with
    it."""

    forced: ForcedCalls | None = None
    calls_in_text: bool = False
    tags: tuple[str, str] | None = None


PLAIN = TextReading()
"""The text is the answer."""


def tags_of(model: LanguageModel) -> tuple[str, str] | None:
    text = model.parameters.get(REASONING_TAGS, "")
    match text.split():
        case []:
            return None
        case [end]:
            return "", end
        case [start, end]:
            return start, end
    raise InvalidRequest(f"the parameter {REASONING_TAGS} of model '{model.name[:80]}' has more than two tags")


class Thinking:
    """Separates the thinking from the answer, in a text that arrives in pieces."""

    __slots__ = ("_held", "_tag", "_tags", "_thinks")

    def __init__(self, tags: tuple[str, str]) -> None:
        self._tags = tags
        self._thinks = not tags[0]
        self._tag: str | None = tags[0] or tags[1]
        """The tag that may come next; None: no other."""
        self._held = ""
        """Text that may be the beginning of the tag."""

    def feed(self, text: str, last: bool) -> tuple[str, str]:
        """The thinking and the answer in a piece. `last`: no other piece follows."""
        thought = ""
        text, self._held = self._held + text, ""
        if self._tag is not None and not self._thinks:
            begun = text.lstrip()
            if begun.startswith(self._tag):
                self._thinks, text, self._tag = True, begun[len(self._tag) :], self._tags[1]
            elif self._tag.startswith(begun) and not last:
                self._held = text
                return "", ""
            else:
                self._tag = None
        if self._thinks and self._tag is not None:
            thought, end, text = text.partition(self._tag)
            if end:
                self._thinks, self._tag = False, None
            elif not last:
                kept = _kept(thought, self._tag)
                thought, self._held = thought[: len(thought) - kept], thought[len(thought) - kept :]
        return thought, text


def _kept(text: str, tag: str) -> int:
    """How many characters at the end of the text may be the beginning of the tag."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-size:])), 0)

"""The prompts of a language model that wait: how many tokens they have, and how long they will wait.

The engine reports when it has computed a prompt, and how many tokens that had. From these reports follow the number of
tokens per byte, with which the prompts of waiting requests are estimated, and the rate at which prompts are computed.
The rate is low while all slots generate long texts, because prompts wait for slots then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Iterable

from msgspec import Struct

from shmserve.core.limits import SECOND
from shmserve.protocol.messages import Tensor

MIN_REPORTS = 4
"""Reports after which the rate is used."""
DECAY = 7 / 8
"""What a report leaves of the sums of earlier ones."""
TOKENS_PER_BYTE = 0.25
"""Until a prompt has been reported. That of English text, and of token ids."""


def size_of(inputs: Iterable[Tensor], names: Container[str]) -> int:
    """The number of bytes of the inputs with these names."""
    size = 0
    for tensor in inputs:
        if tensor.name in names:
            data = tensor.data
            assert not isinstance(data, int), "a frame, which the checks have resolved"
            size += len(data) if isinstance(data, bytes) else sum([handle.size for handle in data])
    return size


class Prompt(Struct, eq=False, gc=False):
    """A prompt that waits, or is being computed. `payer`: the caller whose share it uses. `tokens` is an estimate."""

    backlog: PromptBacklog
    payer: Hashable
    level: int
    size: int
    tokens: int


class PromptBacklog:
    """The prompts of a version that have not been computed. Invariant: `shares` has the tokens of each payer that has
    any, by priority level, and `total` is their sum."""

    def __init__(self, inputs: tuple[str, ...], limit: int) -> None:
        """`inputs`: those that contain the prompt. `limit`: maximum number of tokens that wait; 0: no limit."""
        self.inputs = frozenset(inputs)
        self.limit = limit
        self.total = 0
        self.shares: dict[int, Counter[Hashable]] = {}
        self._reports = 0
        self._size = self._tokens = self._spent_ns = 0.0
        """Sums over the last reports: bytes and tokens of prompts, and the time in which prompts waited."""
        self._since = 0
        """The last report, or when the first of the waiting prompts came."""

    def estimate(self, size: int) -> int:
        """The number of tokens of a prompt with this many bytes."""
        return max(1, round(size * (self._tokens / self._size if self._size else TOKENS_PER_BYTE)))

    def add(self, payer: Hashable, level: int, size: int, now: int) -> Prompt:
        prompt = Prompt(self, payer, level, size, self.estimate(size))
        if not self.total:
            self._since = now
        self.total += prompt.tokens
        self.shares.setdefault(level, Counter())[payer] += prompt.tokens
        return prompt

    def remove(self, prompt: Prompt) -> None:
        """The prompt has been computed, or its request has ended."""
        share = self.shares[prompt.level]
        self.total -= prompt.tokens
        share[prompt.payer] -= prompt.tokens
        if not share[prompt.payer]:
            del share[prompt.payer]
            if not share:
                del self.shares[prompt.level]

    def computed(self, prompt: Prompt, tokens: int, now: int) -> None:
        """The engine has computed a prompt, which had this many tokens."""
        self.remove(prompt)
        self._reports += 1
        self._size = DECAY * self._size + prompt.size
        self._tokens = DECAY * self._tokens + tokens
        self._spent_ns = DECAY * self._spent_ns + now - self._since
        self._since = now

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Asserts that exactly these prompts wait."""
        shares: dict[int, Counter[Hashable]] = {}
        for prompt in prompts:
            shares.setdefault(prompt.level, Counter())[prompt.payer] += prompt.tokens
        assert self.shares == shares
        assert self.total == sum(share.total() for share in shares.values())

    def rate(self, now: int) -> float:
        """Tokens per second; 0: not known yet."""
        spent_ns = self._spent_ns + (now - self._since if self.total else 0)
        return self._tokens * SECOND / spent_ns if self._reports >= MIN_REPORTS and spent_ns > 0 else 0.0

    def ahead(self, payer: Hashable, level: int, tokens: int) -> int:
        """The tokens that are computed before a new prompt of this payer, who shares its level with others."""
        urgent = sum(share.total() for number, share in self.shares.items() if number < level)
        share = self.shares.get(level)
        if share is None:
            return urgent
        parties = len(share) + (payer not in share)
        return urgent + min(share.total(), (share[payer] + tokens) * parties - tokens)

    def exceeds(self, payer: Hashable, tokens: int) -> bool:
        """True if another prompt would exceed the limit, and this payer uses at least an equal share of it."""
        if not self.limit or not self.total or self.total + tokens <= self.limit:
            return False
        payers = {one for share in self.shares.values() for one in share}
        used = tokens + sum(share[payer] for share in self.shares.values())
        return used * len(payers | {payer}) >= self.limit

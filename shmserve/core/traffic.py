"""Which versions of a model get the requests that name no version, and names for versions (aliases).

A version is chosen once for each turn, so that requests cost nothing more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct

ALIAS = "@"
"""`MODEL@NAME` is the version with this alias."""
STEP = 0.6180339887498949
"""Adding this golden ratio, modulo 1, meets every interval as often as it is long, also at every second or n-th turn:
shares hold for requests that come only in certain turns."""


class Traffic(Struct, frozen=True):
    """What operators have set for a model. `shares`: version -> percent of the requests that name no version; the rest
    goes to the highest READY version without a share. Shares of versions that are not READY are divided among the
    others. `aliases`: name -> version. `shadow`: a version -> percent of the requests that name no version, which it
    gets in addition to the version that answers them.
    """

    shares: dict[int, int] = {}
    aliases: dict[str, int] = {}
    shadow: dict[int, int] = {}

    def changed(
        self,
        shares: Mapping[int, int] | None,
        aliases: Mapping[str, int | None],
        shadow: Mapping[int, int] | None = None,
    ) -> Traffic:
        """With these shares and this shadow in place of all others (None: they stay), and these aliases besides the
        others (None as version: without the alias)."""
        merged = {**self.aliases, **aliases}
        kept = {alias: number for alias, number in merged.items() if number is not None}
        return Traffic(
            self.shares if shares is None else dict(shares), kept, self.shadow if shadow is None else dict(shadow)
        )

    def weights(self, ready: Collection[int]) -> list[tuple[int, int]]:
        """The versions that get requests while these are READY, each with its weight: that with the largest first."""
        found = [(number, percent) for number, percent in self.shares.items() if percent and number in ready]
        others = set(ready) - self.shares.keys()
        left = 100 - sum(self.shares.values())
        if others and left > 0:
            found.append((max(others), left))
        return sorted(found, key=lambda entry: (entry[1], entry[0]), reverse=True)

    @property
    def text(self) -> str:
        parts = [f"{percent} % to version {number}" for number, percent in sorted(self.shares.items())]
        parts += [f"{percent} % also to version {number}" for number, percent in sorted(self.shadow.items())]
        parts += [f"'{alias}' is version {number}" for alias, number in sorted(self.aliases.items())]
        return ", ".join(parts) or "all to the highest version"


UNSET = Traffic()


class Split(Struct):
    """The weights of several versions, and where the sequence of choices is."""

    weights: list[tuple[int, int]]
    phase: float = 0.0

    def choose(self) -> int:
        self.phase = (self.phase + STEP) % 1.0
        left = self.phase * sum(weight for _, weight in self.weights)
        for number, weight in self.weights:
            left -= weight
            if left < 0:
                return number
        return self.weights[0][0]


class Shadow(Struct, eq=False):
    """The version that gets `percent` of the requests in addition, and where the sequence of choices is."""

    version: int
    percent: int
    phase: float = 0.0
    pending: int = 0
    """Its requests in flight."""
    log_at: int = 0
    """When the next entry in the log about it is allowed."""

    def choose(self) -> bool:
        self.phase = (self.phase + STEP) % 1.0
        return 100 * self.phase < self.percent

"""Restricted APIs: groups of actions that require a header with a secret value.

Invariant: secret values are compared in constant time, and never appear in error messages or logs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from shmserve.protocol.actions import Action

GROUPS = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)
"""Triton's names."""
RPC_PREFIX = "triton-grpc-protocol-"
"""In gRPC, the header's name is this prefix plus the name in the flag."""


class Restriction(NamedTuple):
    """One restriction, as given by a flag."""

    groups: tuple[str, ...]
    header: str
    value: bytes


def read(text: str, prefix: str = "") -> Restriction:
    """Parses `GROUP,GROUP:HEADER=VALUE`; `prefix` is added to the header's name. Raises ValueError."""
    names, colon, rest = text.partition(":")
    header, equals, value = rest.partition("=")
    if not colon or not equals or not header or not value:
        raise ValueError("expected GROUP,GROUP:HEADER=VALUE")
    groups = tuple(names.split(","))
    for name in groups:
        if name not in GROUPS:
            raise ValueError(f"{name!r} is not a group of APIs; groups are {', '.join(GROUPS)}")
    if not all(letter.isalnum() or letter in "-_." for letter in header) or not header.isascii():
        raise ValueError(f"{header!r} is not a valid header name")
    if not value.isascii() or not value.isprintable() or value != value.strip():
        raise ValueError(f"the value of {header} must be printable ASCII")
    return Restriction(groups, prefix + header, value.encode())


class Restrictions:
    """The restrictions of one endpoint. `what`: "API" or "protocol", so that error messages match Triton's."""

    def __init__(self, restrictions: Iterable[Restriction] = (), what: str = "API") -> None:
        self._what = what
        self._by_group: dict[str, tuple[str, Restriction]] = {}
        self.headers: set[str] = set()
        """Names, in lower case, of the headers with secrets. They are never forwarded to models."""
        for one in restrictions:
            name = one.header.lower()
            self.headers.add(name)
            for group in one.groups:
                if group in self._by_group:
                    raise ValueError(f"the group {group} is restricted more than once")
                self._by_group[group] = name, one

    def refusal(self, action: Action, header: Callable[[str], str | None]) -> str | None:
        """Why the action is refused, or None. `header` takes a header's name in lower case and returns its value."""
        for group in action.row.groups:
            restricted = self._by_group.get(group)
            if restricted is not None and not _is_allowed(header(restricted[0]), restricted[1]):
                return f"This {self._what} is restricted, expecting header '{restricted[1].header}'"
        return None


def _is_allowed(value: str | None, rule: Restriction) -> bool:
    from hmac import compare_digest  # not at the top: `shmserve --help` imports this module

    return value is not None and compare_digest(value.encode(errors="replace"), rule.value)

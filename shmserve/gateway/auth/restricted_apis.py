"""Restricted APIs: groups of actions that need a header with a secret value. Invariant: values are compared in constant
time, and appear in no text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

GROUPS = {
    "health": ("live", "ready", "model_ready"),
    "metadata": ("metadata", "model_metadata", "openapi"),
    "inference": ("infer", "generate", "generate_stream"),
    "shared-memory": ("memory_status", "memory_register", "memory_unregister"),
    "model-config": ("config",),
    "model-repository": ("index", "load", "unload", "named_repository"),
    "statistics": ("statistics",),
    "trace": ("trace", "set_trace"),
    "logging": ("log", "set_log"),
}
"""Triton's names -> actions, as in access.NEEDS."""
RPC_PREFIX = "triton-grpc-protocol-"
"""Prefix of the header's name in gRPC; the flag omits it."""


class Restriction(NamedTuple):
    """One restriction, as given by a flag."""

    groups: tuple[str, ...]
    header: str
    value: bytes


def read(text: str, prefix: str = "") -> Restriction:
    """Parses `GROUP,GROUP:header=value`. The text of a ValueError does not contain the value."""
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
    """`what`: API or protocol, as in Triton's texts."""

    def __init__(self, given: Iterable[Restriction] = (), what: str = "API") -> None:
        from hmac import compare_digest  # not at the top: `shmserve --help` imports this module

        self._same = compare_digest
        self._what = what
        self._of: dict[str, tuple[str, Restriction]] = {}
        self.headers: set[str] = set()
        """In lower case; never passed on to models."""
        for one in given:
            name = one.header.lower()
            self.headers.add(name)
            for group in one.groups:
                for action in GROUPS[group]:
                    if action in self._of:
                        raise ValueError(f"the group {group} is restricted more than once")
                    self._of[action] = name, one

    def refusal(self, action: str, header: Callable[[str], str | None]) -> str | None:
        """Why the action is refused, or None. `header` returns the value of a header, given its name in lower case."""
        found = self._of.get(action)
        if found is None:
            return None
        name, rule = found
        given = header(name)
        if given is not None and self._same(given.encode(errors="replace"), rule.value):
            return None
        return f"This {self._what} is restricted, expecting header '{rule.header}'"

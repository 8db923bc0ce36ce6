"""Restricted APIs: groups of what can be wanted, each behind a header with a value that only some callers know. The
rule of the file: values are compared in a time that says nothing of them, and stand in no text.
"""

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
"""Triton's names -> what is wanted, as in access.NEEDS."""
RPC_PREFIX = "triton-grpc-protocol-"
"""What the header's name begins with in gRPC, and the flag leaves out."""


class Restriction(NamedTuple):
    """What one flag says."""

    groups: tuple[str, ...]
    header: str
    value: bytes


def read(text: str, prefix: str = "") -> Restriction:
    """`GROUP,GROUP:header=value`. ValueError says what is wrong with it, without the value."""
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
    """`what`: api or protocol, as the texts of Triton have it."""

    def __init__(self, given: Iterable[Restriction] = (), what: str = "API") -> None:
        from hmac import compare_digest  # here, as `shmserve --help` reads this file

        self._same = compare_digest
        self._what = what
        self._of: dict[str, tuple[str, Restriction]] = {}
        self.headers: set[str] = set()
        """In lower case: models do not get to see them."""
        for one in given:
            name = one.header.lower()
            self.headers.add(name)
            for group in one.groups:
                for action in GROUPS[group]:
                    if action in self._of:
                        raise ValueError(f"the group {group} is restricted more than once")
                    self._of[action] = name, one

    def refusal(self, action: str, header: Callable[[str], str | None]) -> str | None:
        """`header` gives the value of a header, whose name is in lower case. None: go on."""
        found = self._of.get(action)
        if found is None:
            return None
        name, rule = found
        given = header(name)
        if given is not None and self._same(given.encode(errors="replace"), rule.value):
            return None
        return f"This {self._what} is restricted, expecting header '{rule.header}'"

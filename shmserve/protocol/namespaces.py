"""Names of models with --model-namespacing: NAMESPACE/NAME, where the namespace is the directory of the repository.

Invariant: without namespacing, the name of a model has no `/`.
"""

from __future__ import annotations

SEPARATOR = "/"


def qualified(namespace: str, name: str) -> str:
    return f"{namespace}{SEPARATOR}{name}" if namespace else name


def namespace_of(name: str) -> str:
    """The part before the separator; empty without namespacing."""
    return name.rpartition(SEPARATOR)[0]


def plain(name: str) -> str:
    """The name as Triton's clients know it."""
    return name.rpartition(SEPARATOR)[2]

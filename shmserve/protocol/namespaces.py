"""Names of models with --model-namespacing: NAMESPACE/NAME, where the namespace is the directory of the repository.

Invariant: without namespacing, the name of a model has no `/`.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

SEPARATOR = "/"


def namespace(repository: Path) -> str:
    """The namespace of the models in a repository."""
    return repository.absolute().name


def qualified(space: str, name: str) -> str:
    return f"{space}{SEPARATOR}{name}" if space else name


def namespace_of(name: str) -> str:
    """The part before the separator; empty without namespacing."""
    return name.rpartition(SEPARATOR)[0]


def resolved(name: str, near: str, candidates: Collection[str]) -> str:
    """The full name of the model that a step of the ensemble `near` runs. `candidates`: all models of this name."""
    own = qualified(namespace_of(near), name)
    return next(iter(candidates)) if len(candidates) == 1 else own


def plain(name: str) -> str:
    """The name as Triton's clients know it."""
    return name.rpartition(SEPARATOR)[2]

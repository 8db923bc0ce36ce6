"""The tensors of an ONNX model, and readable error texts of the engine.

Invariant: a tensor that requests cannot contain fails the load, and the error says how to change the model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from shmserve.dtypes import BY_NAME
from shmserve.errors import Unsupported
from shmserve.repo.config.complete import TensorFacts

DTYPES = {
    f"tensor({name})": dtype
    for name, dtype in (BY_NAME | {"float": "FP32", "double": "FP64", "string": "BYTES"}).items()
}

_WHERE = re.compile(r"\S*/\S+\.(?:cc|cpp|cu|h):\d+ (?:[^\n()]*\([^()]*\)(?: const)?:?)? ?")
"""The source location at the start of the engine's errors."""


def engine_text(error: Exception) -> str:
    """Returns the engine's error text without the source location and repeated whitespace."""
    return " ".join(_WHERE.sub("", str(error)).split())


def facts_of(nodes: Iterable[Any], needed: Collection[str] | None = None) -> list[TensorFacts]:
    """`needed`: tensors that must have a supported type; other tensors with unsupported types are left out. None:
    all."""
    facts = []
    for node in nodes:
        dtype = DTYPES.get(node.type)
        if dtype is not None:
            dims = tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in node.shape or ())
            facts.append(TensorFacts(node.name, dtype, dims))
        elif needed is None or node.name in needed:
            raise Unsupported(
                f"tensor '{node.name}' of the model has the type {node.type}, which is not supported: {_why(node.type)}"
            )
    return facts


def _why(kind: str) -> str:
    if kind.startswith("tensor("):
        return "requests have no such data type; cast the tensor inside the model"
    if kind.startswith("optional("):
        return "make it a plain tensor in the model, with an initializer of its name if requests may leave it out"
    return (
        "requests and responses have tensors only; export the model without such values (for classifiers: "
        "zipmap=False), or convert them with an operator"
    )

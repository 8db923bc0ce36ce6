"""What an ONNX model says of its tensors, and whether the configuration says the same.

The rule: what does not fit is found at load, and the error names the tensor and both sides.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from shmserve.errors import InvalidRequest, Unsupported
from shmserve.repo.complete import TensorFacts
from shmserve.workers.specs import Spec

DTYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(bfloat16)": "BF16",
    "tensor(string)": "BYTES",
}

_WHERE = re.compile(r"\S*/\S+\.(?:cc|cpp|cu|h):\d+ (?:[^\n()]*\([^()]*\)(?: const)?:?)? ?")
"""The place in the engine's source that its errors begin with."""


def said(error: Exception) -> str:
    """What the engine says, without the place in its source and what it says twice."""
    return " ".join(_WHERE.sub("", str(error)).split())


def facts_of(nodes: Iterable[Any], needed: Collection[str] | None = None) -> list[TensorFacts]:
    """`needed`: the others may be of any type, and are left out if they are not tensors; None: all are needed."""
    found = []
    for node in nodes:
        dtype = DTYPES.get(node.type)
        if dtype is not None:
            dims = tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in node.shape or ())
            found.append(TensorFacts(node.name, dtype, dims))
        elif needed is None or node.name in needed:
            raise Unsupported(f"tensor '{node.name}' of the model is a {node.type}, not supported: {_why(node.type)}")
    return found


def _why(kind: str) -> str:
    if kind.startswith("tensor("):
        return "it has no data type among those of requests; cast it inside the model"
    if kind.startswith("optional("):
        return "give the tensor itself in the model, and an initializer of its name if it may be left out"
    return "only tensors travel; an exporter's switch (zipmap, for classifiers) or an operator at its end makes it one"


def match(
    model: str, kind: str, specs: Sequence[Spec], facts: list[TensorFacts], optional: list[TensorFacts] | None
) -> None:
    """The configuration must say what the model says. `optional`: those that the model has values for by itself, whose
    shapes are those of the values; None: these are outputs, of which the configuration may leave some out."""
    by_name = {fact.name: fact for fact in facts}
    optional_names = {fact.name: fact for fact in optional or ()}
    given = {spec.name for spec in specs}
    for spec in specs:
        fact = by_name.get(spec.name) or optional_names.get(spec.name)
        if fact is None:
            raise InvalidRequest(
                f"unable to load model '{model}': unexpected inference {kind} '{spec.name}', "
                f"allowed {kind}s are: {', '.join(by_name)}"
            )
        if fact.dtype != spec.dtype:
            raise InvalidRequest(
                f"unable to load model '{model}': {kind} '{spec.name}' is {spec.dtype} in the configuration and "
                f"{fact.dtype} in the model"
            )
        if spec.name in by_name and not (spec.flat and optional is None):
            _match_shape(model, kind, spec, fact)
    missing = [name for name in by_name if name not in given]
    if missing and optional is not None:
        raise InvalidRequest(
            f"unable to load model '{model}', configuration expects {len(specs)} {kind}s, model provides "
            f"{len(facts)}: it also has {', '.join(missing)}"
        )


def _match_shape(model: str, kind: str, spec: Spec, fact: TensorFacts) -> None:
    expected = (-1,) if spec.flat else ((-1,) if spec.batched else ()) + spec.shape
    if len(expected) != len(fact.dims) or any(
        -1 not in pair and pair[0] != pair[1] for pair in zip(expected, fact.dims, strict=True)
    ):
        raise InvalidRequest(
            f"unable to load model '{model}': {kind} '{spec.name}' has shape {list(expected)} in the "
            f"configuration{' (with the batch dimension)' if spec.batched else ''} and {list(fact.dims)} in the model"
        )
    if spec.batched and fact.dims[0] != -1:
        raise InvalidRequest(
            f"unable to load model '{model}': max_batch_size is above 0, but the first dimension of {kind} "
            f"'{spec.name}' is {fact.dims[0]} in the model; a batch needs a dynamic one. Set max_batch_size: 0"
        )

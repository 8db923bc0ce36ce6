"""Code shared by HTTP and gRPC: tensors as bytes or JSON, and request parameters."""

from __future__ import annotations

from typing import Any

from shmserve.errors import Unsupported
from shmserve.shm.strings import encode_bytes
from shmserve.terminal.values import Spec
from shmserve.tools.load.targets.base import ModelFacts, SequencePart, TargetOptions


def raw_bytes(array: Any) -> bytes:
    """A tensor as the protocol sends it: little-endian; BYTES with a length of 4 bytes before each string."""
    return encode_bytes(array) if array.dtype == object else array.tobytes()


def json_values(array: Any, spec: Spec, facts: ModelFacts) -> Any:
    """A tensor in the form that generate takes: one value, or a list of all values. Raises Unsupported for tensors that
    this cannot express."""
    name, elsewhere = spec["name"], "measure it natively or over gRPC"
    if spec["datatype"] in ("FP16", "BF16"):
        raise Unsupported(f"input '{name}' is {spec['datatype']}, which generate_stream cannot carry: {elsewhere}")
    dims = list(array.shape)
    if facts.max_batch:
        if dims[0] != 1:
            raise Unsupported(f"generate_stream takes one row, and input '{name}' has {dims[0]}: {elsewhere}")
        dims = dims[1:]
    if sum(dim < 0 for dim in spec["shape"][-len(dims) :]) > 1 and any(dim != 1 for dim in dims[:-1]):
        raise Unsupported(f"generate_stream cannot express the shape {dims} of input '{name}': {elsewhere}")
    values = [_text_of(item, name) for item in array.flat] if array.dtype == object else array.reshape(-1).tolist()
    return values[0] if len(values) == 1 else values


def _text_of(item: Any, name: str) -> str:
    try:
        return item if isinstance(item, str) else bytes(item).decode()
    except UnicodeDecodeError as error:
        text = f"input '{name}' is not UTF-8 text ({error.reason}), which generate_stream needs"
        raise Unsupported(f"{text}: measure it natively or over gRPC") from error


def parameters(options: TargetOptions, part: SequencePart | None) -> dict[str, Any]:
    results: dict[str, Any] = {}
    if options.deadline_ns:
        results["timeout"] = options.deadline_ns // 1000
    if part is not None:
        results |= {"sequence_id": part.sequence, "sequence_start": part.start, "sequence_end": part.end}
    return results

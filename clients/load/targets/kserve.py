"""What HTTP and gRPC have in common: raw tensors, request parameters, and metadata and configuration as facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shmserve.clients.load.targets.base import ModelFacts, Part, RequestOptions


def raw_bytes(array: Any) -> bytes:
    """A tensor as the protocol sends it: little-endian; BYTES with a length of 4 bytes before each string."""
    if array.dtype == object:
        parts = []
        for item in array.reshape(-1):
            data = item.encode() if isinstance(item, str) else bytes(item)
            parts += [len(data).to_bytes(4, "little"), data]
        return b"".join(parts)
    return np.ascontiguousarray(array).tobytes()


def parameters(options: RequestOptions, part: Part | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if options.deadline_ns:
        found["timeout"] = options.deadline_ns // 1000
    if part is not None:
        found |= {"sequence_id": part.sequence, "sequence_start": part.start, "sequence_end": part.end}
    return found


def facts_of(metadata: Mapping[str, Any], config: Mapping[str, Any], server: Mapping[str, Any]) -> ModelFacts:
    def specs(kind: str) -> dict[str, dict[str, Any]]:
        return {
            spec["name"]: {
                "name": spec["name"],
                "datatype": spec["datatype"],
                "shape": [int(dim) for dim in spec.get("shape", ())],
            }
            for spec in metadata.get(kind, ())
        }

    return ModelFacts(
        inputs=specs("inputs"),
        outputs=specs("outputs"),
        max_batch=int(config.get("max_batch_size", 0)),
        decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
        server={name: str(server.get(name, "")) for name in ("name", "version")},
    )

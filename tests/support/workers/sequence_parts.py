"""Controls and requests of sequences."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from shmserve.protocol.messages import Options, Tensor
from shmserve.protocol.worker_messages import Work
from shmserve.repo.config.schema import ModelSequenceBatchingControl, ModelSequenceBatchingControlInput
from tests.support.workers.worker_harness import work


def control(name: str, kind: str, **pair: Any) -> ModelSequenceBatchingControlInput:
    made = ModelSequenceBatchingControl(kind=f"CONTROL_SEQUENCE_{kind}", **pair)  # type: ignore[arg-type]
    return ModelSequenceBatchingControlInput(name=name, control=(made,))


def step(
    request: int,
    key: int | str,
    *inputs: Tensor,
    start: bool = False,
    end: bool = False,
    slot: int = -1,
    rows: int | None = None,
) -> Work:
    options = Options(sequence=key, sequence_start=start, sequence_end=end)
    return replace(work(request, *inputs, rows=rows, options=options), slot=slot)

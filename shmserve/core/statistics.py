"""What is counted of a model version. Durations are sums in ns; `batches` is by batch size."""

from __future__ import annotations

from msgspec import Struct

from shmserve.core.batcher import Reason


class BatchCount(Struct):
    count: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0


class Statistics(Struct):
    inference_count: int = 0
    execution_count: int = 0
    last_inference_ns: int = 0
    success_count: int = 0
    success_ns: int = 0
    fail_count: int = 0
    fail_ns: int = 0
    queue_ns: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    rejected: int = 0
    cancelled: int = 0
    reasons: dict[Reason, int] = {}
    batches: dict[int, BatchCount] = {}

    def batch_done(self, rows: int, requests: int, reason: Reason, times: tuple[int, int, int, int], now: int) -> None:
        """The times of a batch count once for the batch, and for each of its requests."""
        taken, ready, computed, placed = times
        count = self.batches.get(rows)
        if count is None:
            count = self.batches[rows] = BatchCount()
        count.count += 1
        count.input_ns += ready - taken
        count.infer_ns += computed - ready
        count.output_ns += placed - computed
        self.input_ns += (ready - taken) * requests
        self.infer_ns += (computed - ready) * requests
        self.output_ns += (placed - computed) * requests
        self.execution_count += 1
        self.last_inference_ns = now
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

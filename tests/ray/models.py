"""The models of these tests. Each response names its process, which identifies the node."""

from __future__ import annotations

from pathlib import Path

from tests.support.living import group
from tests.support.model_files import python_model, write_model

CONFIG = """
backend: "python" max_batch_size: 8
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 1 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 2 ] }} ]
{more}"""
TIMES = """
select.select([], [], [], {seconds})
return self.respond(np.concatenate([x * {factor}, np.full_like(x, os.getpid())], axis=1))
"""
SUMS = """
name, flags = request.correlation_id(), request.flags()
if flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
    self.sums[name] = 0.0
self.sums[name] += x[0, 0]
return self.respond(np.array([[self.sums[name], os.getpid()]], np.float32))
"""
SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 600000000 oldest { max_candidate_sequences: 64 } }\n"
NO_SLEEP = 0.0
WORK_S = 0.002
"""Duration of a request, so that some are always in flight."""


def write_times(
    root: Path, name: str, factor: float = 2.0, seconds: float = WORK_S, more: str = "", load_seconds: float = 0.0
) -> None:
    """y[0] = factor * x, y[1] = pid."""
    body = TIMES.format(factor=factor, seconds=seconds)
    source = python_model(body, f"select.select([], [], [], {load_seconds})")
    write_model(root, name, CONFIG.format(more=group(1) + more), source)


def write_sums(root: Path) -> None:
    """y[0] = the sum of the sequence, y[1] = pid."""
    write_model(root, "sums", CONFIG.format(more=group(1) + SEQUENCES), python_model(SUMS, "self.sums = {}"))

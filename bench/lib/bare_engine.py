"""The bare engine in one process without a server, the baseline: ONNX Runtime with the server's session options (one
thread, no spinning) and the plainest call.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

from bench.lib.child import Answer, Handler
from bench.lib.clock import durations, summary


def session(model: str) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def engine(model: str, batch: int, shape: list[int]) -> Handler:
    """Runs batches. `per_s` counts rows, not batches."""
    import numpy as np

    run = session(model).run
    x = np.random.default_rng(1).standard_normal((batch, *shape)).astype(np.float32)
    feed = {"x": x}

    def handle(seconds: float) -> Answer:
        taken = summary(durations(lambda: run(None, feed), seconds))
        return {**taken, "per_s": taken["per_s"] * batch}

    return handle


def memcpy(size: int) -> Handler:
    """One copy of `size` bytes between two warm buffers: the cost of moving a tensor once."""
    import numpy as np

    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)

    def handle(seconds: float) -> Answer:
        return summary(durations(lambda: np.copyto(target, source), seconds))

    return handle


def create_sessions(repository: str) -> Handler:
    """The baseline for start-up: import the engine and create the sessions of a repository."""
    started = perf_counter()
    models = sorted(Path(repository).glob("*/*/model.onnx"))
    kept = [session(str(path)) for path in models]
    seconds = perf_counter() - started
    return lambda: {"seconds": seconds, "models": [path.parent.parent.name for path in models], "kept": len(kept)}

"""The worker's cost of a request for a backend in C, beside the built-in identity: batches of 1 and 32 requests of 16
floats inside the messages.

    python -m bench.suites.native

Only the worker's part is timed: reading the inputs, running the backend, placing the outputs. The backend is the sample
`scale`, so its own time is in the figures.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from shmserve.protocol.messages import Tensor
from shmserve.protocol.worker_messages import Load, Work
from shmserve.repo import samples
from shmserve.repo.config.schema import encode_config
from shmserve.repo.storage.store import scan_model
from shmserve.workers.loading import LoadedModel, load

IDENTITY = """
backend: "identity"
max_batch_size: 32
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
"""
ROUNDS, BATCHES = 40, 50
"""The best round is reported; the others were disturbed."""


def loaded(path: Path) -> LoadedModel:
    config = scan_model(path).config
    assert config is not None
    order = Load(1, path.name, 1, f"{path.name}_0_0", str(path), {})
    return load(order, encode_config(config), None)


def small(count: int) -> list[Work]:
    data = np.arange(16, dtype=np.float32).tobytes()
    return [Work(number, 1, (Tensor("x", "FP32", (1, 16), data),), None, "user") for number in range(count)]


def microseconds(model: LoadedModel, work_items: Sequence[Work]) -> float:
    """The time of a request, in the best round."""
    best = float("inf")
    for _ in range(ROUNDS):
        begin = perf_counter_ns()
        for _ in range(BATCHES):
            rows, _, _ = model.runner.run(work_items)
            for row in rows:
                assert row.error is None, row.error
                model.runner.discard(row)
        best = min(best, (perf_counter_ns() - begin) / BATCHES / len(work_items) / 1000)
    return best


def main() -> None:
    if shutil.which("cc") is None:
        raise SystemExit("the sample needs a C compiler")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        samples.build(root, lambda text: None, ["native"])
        scale = root / "scale"
        library = scale / "1" / "libtriton_scale.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, scale / "scale.c"], check=True)
        identity = root / "identity"
        (identity / "1").mkdir(parents=True)
        (identity / "config.pbtxt").write_text(IDENTITY)
        print("| backend | 1 request | each of 32 requests |")
        print("| --- | --- | --- |")
        for path in (identity, scale):
            model = loaded(path)
            times = [microseconds(model, work_items) for work_items in (small(1), small(32))]
            print(f"| {path.name} | {' | '.join(f'{time:.1f} us' for time in times)} |")
            model.backend.close()


if __name__ == "__main__":
    main()

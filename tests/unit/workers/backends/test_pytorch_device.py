"""PyTorch models that read and write tensors on a GPU. PyTorch computes on the host, whose memory serves as device
memory of the stand-in, which counts copies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.protocol.worker_messages import StepOptions
from shmserve.repo.config.schema import ModelConfig
from shmserve.workers.backends.device_inputs import DeviceInputs
from shmserve.workers.batch.specs import Spec, inputs_of
from tests.support.optional import OnDemand, optional
from tests.support.workers.gpu.device_arrays import view
from tests.support.workers.gpu.device_pair import WIDTH, Pair, arrays, gathered
from tests.support.workers.models.worker_models import torch_forward
from tests.support.workers.worker_harness import config

torch = optional("torch")
DEVICE = "shmserve.workers.backends.pytorch.device"
torch_device = OnDemand(DEVICE)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(f"{DEVICE}.as_tensor", lambda memory, device: torch.from_numpy(view(memory)))
    monkeypatch.setattr(f"{DEVICE}.settle", found.append)
    return found


@pytest.fixture
def torch_pair(settled: list[Any], pair: Pair, tmp_path: Path) -> Pair:
    """The producer (x + 1), followed by PyTorch: y = 3 x, and z, for which the model writes to x."""
    from shmserve.workers.backends.pytorch.backend import Torch

    class TorchHere(Torch):
        def load(self, config: ModelConfig) -> None:
            super().load(config)
            self.on_device, self._near = True, DeviceInputs()

    (tmp_path / "torch").mkdir()
    torch_forward(tmp_path / "torch", "x", "y = 3 * x", "x.add_(1)", "return y, x")
    row = ("FP32", (WIDTH,))
    outputs = {"y__0": row, "z__1": row}
    threads = {"INTRA_OP_THREAD_COUNT": "1"}
    consumer = config("pytorch", {"x": row}, outputs, max_batch=8, parameters=threads)
    pair.replace_consumer(TorchHere, tmp_path / "torch", consumer)
    return pair


@pytest.mark.parametrize("shares", [(1,), (3,), (1, 2, 1)], ids=str)
def test_pytorch_reads_and_writes_on_the_gpu(torch_pair: Pair, settled: list[Any], shares: tuple[int, ...]) -> None:
    pair, given = torch_pair, arrays(*shares)
    rows = pair.produce(*given)
    for near in ((), ("y__0",), ("y__0", "z__1")):
        work_items = [replace(work, step=StepOptions(near)) for work in pair.pass_on(*rows)]
        pair.copies()
        settled.clear()
        found = pair.consumer.run(*work_items)
        assert pair.copies() == gathered(shares)
        assert len(settled) == 1, "it waits for the GPU before it responds"
        for row, array in zip(found, given, strict=True):
            # The model writes to a copy: the input stays the same in each run.
            pair.check(row, {"y__0": (array + 1) * 3, "z__1": array + 2}, near)
    pair.give_back(*rows)
    assert pair.consumer.arenas.used == 0


def test_tensors_on_the_gpu_have_the_type_of_the_model(settled: list[Any]) -> None:
    for dtype, kind in (
        ("FP16", torch.float16),
        ("INT64", torch.int64),
        ("BOOL", torch.bool),
        ("BF16", torch.bfloat16),
    ):
        (spec,) = inputs_of(config("pytorch", {"x": (dtype, (2,))}, {}))
        assert isinstance(spec, Spec)
        memory = np.arange(4 * spec.item, dtype=np.uint8) % 2
        tensor = torch_device.over(memory.ctypes.data, (2, 2), spec, torch.device("cpu"))
        assert (tensor.dtype, tuple(tensor.shape)) == (kind, (2, 2))
        assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == memory.tobytes()

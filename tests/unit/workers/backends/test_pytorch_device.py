"""PyTorch models that read and write tensors where they are on a GPU. PyTorch computes on the host, whose memory the
stand-in's device memory is; what is copied for it there is counted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.repo.config.schema import ModelConfig, ModelInput, ModelInstanceGroup, ModelOutput, ModelParameter
from shmserve.workers.backends.device_inputs import DeviceInputs
from shmserve.workers.gpu.shared import memory_of
from tests.support.workers.gpu_harness import Instance, standins
from tests.support.workers.worker_models import torch_forward
from tests.unit.workers.gpu.test_tensors import WIDTH, WITHIN, Pair, arrays

torch = pytest.importorskip("torch")
from shmserve.workers.backends.pytorch import device as torch_device  # noqa: E402
from shmserve.workers.backends.pytorch.backend import Torch  # noqa: E402
from shmserve.workers.batch.specs import Spec, inputs_of  # noqa: E402


class TorchHere(Torch):
    def load(self, config: ModelConfig) -> None:
        super().load(config)
        self.on_device, self._near = True, DeviceInputs()


def host_memory(memory: Any, device: Any) -> Any:
    """What `as_tensor` makes of memory on a GPU."""
    interface = memory.__cuda_array_interface__
    dtype, size = np.dtype(interface["typestr"]), int(np.prod(interface["shape"]))
    raw = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(interface["data"][0])
    return torch.from_numpy(np.frombuffer(raw, dtype).reshape(interface["shape"]))


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(torch_device, "as_tensor", host_memory)
    monkeypatch.setattr(torch_device, "settle", found.append)
    return found


@pytest.fixture
def pair(settled: list[Any], tmp_path: Path) -> Iterator[Pair]:
    """TensorRT, x + 1, and then PyTorch: y = 3 x, and z, for which x is written to."""
    with standins() as (runtime, _):
        made = Pair(runtime, tmp_path)
        made.consumer.close()
        (tmp_path / "torch").mkdir()
        torch_forward(tmp_path / "torch", "x", "y = 3 * x", "x.add_(1)", "return y, x")
        entry: dict[str, Any] = {"data_type": "TYPE_FP32", "dims": (WIDTH,)}
        config = ModelConfig(
            name="m",
            backend="pytorch",
            max_batch_size=8,
            input=(ModelInput(name="x", **entry),),
            output=(ModelOutput(name="y__0", **entry), ModelOutput(name="z__1", **entry)),
            instance_group=(ModelInstanceGroup(name="m_0", kind="KIND_CPU", count=1),),
            parameters={"INTRA_OP_THREAD_COUNT": ModelParameter(string_value="1")},
        )
        made.consumer = Instance(TorchHere, tmp_path / "torch", config, owner=8)
        yield made
        made.close()
        assert runtime.state.left() == {}


@pytest.mark.parametrize("shares", [(1,), (3,), (1, 2, 1)], ids=str)
def test_tensors_stay_there(pair: Pair, settled: list[Any], shares: tuple[int, ...]) -> None:
    given = arrays(*shares)
    rows = pair.produce(*given)
    for near in ((), ("y__0",), ("y__0", "z__1")):
        works = [replace(work, near=near) for work in pair.pass_on(*rows)]
        pair.copies()
        settled.clear()
        found = pair.consumer.run(*works)
        assert pair.copies() == ([(share, WITHIN) for share in shares] if len(shares) > 1 else [])
        assert len(settled) == 1, "before the answer is told"
        for row, array in zip(found, given, strict=True):
            assert row.error is None, row.error
            # What the model writes to is a copy of its own: the same input again and again.
            wanted = {"y__0": (array + 1) * 3, "z__1": array + 2}
            for made in row.outputs:
                assert isinstance(made.data, tuple)
                (handle,) = made.data
                assert (handle.segment in pair.consumer.mapped.on_device) == (made.name in near)
                if made.name in near:
                    device = memory_of(pair.consumer.mapped)
                    values = device.piece(handle, np.dtype(np.float32), made.shape).host()
                else:
                    values = pair.consumer.mapped.view(handle, np.dtype(np.float32), made.shape)
                np.testing.assert_array_equal(values, wanted[made.name])
                del values
                pair.consumer.arenas.free(made.data)
    pair.give_back(*rows)
    assert pair.consumer.arenas.used == 0


def test_what_a_tensor_there_is_of(settled: list[Any]) -> None:
    """The model's types, and BF16, of which others know no name."""
    for dtype, kind in (
        ("FP16", torch.float16),
        ("INT64", torch.int64),
        ("BOOL", torch.bool),
        ("BF16", torch.bfloat16),
    ):
        config = ModelConfig(name="m", input=(ModelInput(name="x", data_type=f"TYPE_{dtype}", dims=(2,)),))  # type: ignore[arg-type]
        (spec,) = inputs_of(config)
        assert isinstance(spec, Spec)
        memory = np.arange(4 * spec.item, dtype=np.uint8) % 2
        made = torch_device.over(memory.ctypes.data, (2, 2), spec, torch.device("cpu"))
        assert (made.dtype, tuple(made.shape)) == (kind, (2, 2))
        assert made.contiguous().view(torch.uint8).numpy().tobytes() == memory.tobytes()

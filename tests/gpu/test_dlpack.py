"""Python models that read and write tensors on the GPU by DLPack, with CuPy and PyTorch, and PyTorch clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gpu.conftest import Serve
from tests.gpu.gpu_models import ADD, TORCH_ADD, WIDTH, chain, gpu_model, numbers

pytestmark = [pytest.mark.gpu, pytest.mark.process]
KEEP = """
    def one(self, x):
        array = self.on_device(x)
        self.kept = getattr(self, "kept", None)
        before, self.kept = self.kept, array + 0
        return pb_utils.Tensor.from_dlpack("y", self.kept if before is None else before)
"""


def test_cupy_models_keep_their_own_memory(serve: Serve, tmp_path: Any) -> None:
    """A model may return an array that it made earlier: the server copies it before the model runs again."""
    gpu_model(tmp_path, "keep", KEEP)
    with serve(tmp_path).client() as client:
        given = [numbers(1, seed) for seed in range(6)]
        found = [client.infer("keep", {"x": x})["y"] for x in given]
    for made, expected in zip(found, [given[0], *given], strict=False):
        np.testing.assert_array_equal(made, expected)


def test_torch_and_cupy_models_in_a_chain(torch: Any, cupy: Any, serve: Serve, tmp_path: Any) -> None:
    gpu_model(tmp_path, "cupy", ADD)
    gpu_model(tmp_path, "torch", TORCH_ADD)
    chain(tmp_path, "chain", "cupy", "torch", "cupy", "torch")
    with serve(tmp_path).client() as client:
        for seed in range(5):
            given = numbers(2, seed)
            np.testing.assert_array_equal(client.infer("chain", {"x": given})["y"], given + 4)
        x, y = (client.empty((2, WIDTH), "float32", device="cuda:0") for _ in range(2))
        torch.as_tensor(x, device="cuda").copy_(torch.from_numpy(given))
        client.infer("chain", {"x": x}, outputs={"y": y})
        assert torch.equal(torch.as_tensor(y, device="cuda").cpu(), torch.from_numpy(given + 4))
        assert torch.from_dlpack(x).data_ptr() == torch.as_tensor(x, device="cuda").data_ptr()


def test_torch_tensors_as_inputs_and_outputs(torch: Any, serve: Serve, tmp_path: Any) -> None:
    """Memory of PyTorch's allocator, written by work that has not finished."""
    gpu_model(tmp_path, "add", TORCH_ADD)
    with serve(tmp_path).client() as client:
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                for value in range(5):
                    x = torch.zeros((2, WIDTH), device="cuda")
                    y = torch.zeros((2, WIDTH), device="cuda")
                    for _ in range(50):
                        x += 1
                    x += value
                    client.infer("add", {"x": x}, outputs={"y": y})
                    assert y.unique().tolist() == [51 + value]

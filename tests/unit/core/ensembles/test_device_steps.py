"""Which tensors between steps stay on a GPU. tests/scenarios/ensemble_devices.txt has what becomes of them."""

from __future__ import annotations

import pytest

from tests.support.core.scenarios.scenario import Scenario

GPU = "device gpu=0"


@pytest.mark.parametrize(
    ("maker", "reader", "stays"),
    [
        (GPU, GPU, True),
        (f"{GPU} instances=2", f"{GPU} instances=2", True),
        ("device gpu=1", "device gpu=1", True),
        (GPU, "device gpu=1", False),
        (GPU, "device gpu=0,1 instances=2", False),
        ("device gpu=0,1 instances=2", GPU, False),
        (GPU, "device", False),
        ("device", "device", False),
        (GPU, "device gpu=0,-1 instances=2", False),
        ("gpu=0", GPU, False),
        (GPU, "gpu=0", False),
    ],
)
def test_a_tensor_stays_on_the_gpu_only_if_all_its_readers_run_there(maker: str, reader: str, stays: bool) -> None:
    world = Scenario()
    for line in (
        f"model m large=y {maker}",
        f"model n large=y {reader}",
        "ensemble e inputs=x outputs=y max_batch=8 m(x:x)->(y:t) n(x:t)->(y:y)",
        "client a",
        "infer a 1",
    ):
        world.run(line)
    world.finish_all()
    made, read = [line for line in world.lines if ": execute" in line]
    assert made.endswith(", y on its GPU") == stays
    assert not read.endswith("GPU"), "the caller reads it"
    assert 1 in world.named["a"].answers

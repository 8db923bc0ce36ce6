"""Names of devices in the names of segments on a GPU."""

from __future__ import annotations

import pytest

from shmserve.shm.extents.cuda import name_of, parts_of, slice_uuid, uuid_bytes

GPU = bytes(range(1, 17))
SLICE = "MIG-a65afc88-50b5-5ccf-b0a8-f93b3247ae9e"


def test_a_process_in_a_slice_uses_the_uuid_of_the_slice() -> None:
    """Two slices of one GPU differ, even if the runtime reports the UUID of the GPU for both."""
    assert slice_uuid(GPU, SLICE) == uuid_bytes(SLICE) == bytes.fromhex("a65afc8850b55ccfb0a8f93b3247ae9e")
    assert slice_uuid(GPU, f" {SLICE} ,MIG-x") == uuid_bytes(SLICE), "only the first device counts"
    exported = bytes(64)
    assert parts_of(name_of(exported, slice_uuid(GPU, SLICE))) != parts_of(name_of(exported, GPU))


@pytest.mark.parametrize("visible", ["", "0", "1,2", "GPU-8f2c", "MIG-a65", "MIG-GPU-8f2c/1/0"])
def test_otherwise_the_runtime_tells_the_uuid(visible: str) -> None:
    assert slice_uuid(GPU, visible) == GPU

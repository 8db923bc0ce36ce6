"""What is copied between the steps of ensembles: nothing that need not be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shmserve.testing import Server
from tests.process.pipelines.test_ensembles import numbers, write_chain

pytestmark = pytest.mark.process


def own_segments(server: Server, name: str) -> int:
    """How many segments a worker has made: it alone keeps their descriptors."""
    for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split():
        command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if f"{name}_0_0" in command:
            return sum("memfd:shmserve" in os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir())
    raise AssertionError(f"{name} has no worker")


def test_between_steps_nothing_is_copied(tmp_path: Path) -> None:
    """Identities: only the last one makes anything, which is the caller's."""
    write_chain(tmp_path)
    with Server(tmp_path, "--exit-on-error", "true") as server, server.client() as client:
        x = numbers(1 << 20)
        for _ in range(3):
            assert (client.infer("chain", {"x": x})["z"] == x).all()
        assert [own_segments(server, f"pass{index}") for index in range(3)] == [0, 0, 1]

"""A model whose number of instances follows the load. It waits for a byte per request, so the test decides when a
request is answered."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import shmserve
from tests.support.living import ONE, PYTHON, group, index, pids, until
from tests.support.model_files import parameters, python_model, write_model
from tests.support.shared_server import SharedServer

pytestmark = pytest.mark.process

WAITS = """
os.read(self.gate, 1)
return self.respond(x)
"""


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[int]:
    os.mkfifo(tmp_path / "gate")
    descriptor = os.open(tmp_path / "gate", os.O_RDWR)
    yield descriptor
    os.close(descriptor)


def test_instances_follow_the_queue_up_and_down(shared_server: SharedServer, tmp_path: Path, gate: int) -> None:
    """The processes of what the simulator and the scenarios decide."""
    given = parameters(max_instances="3", scale_up_queue_ms="5", scale_down_secs="0.3")
    source = python_model(WAITS, f"self.gate = os.open({str(tmp_path / 'gate')!r}, os.O_RDWR)")
    write_model(tmp_path / "models", "scaled", PYTHON + group(1) + given, source)

    def await_size(client: shmserve.Client, count: int) -> dict[str, int]:
        """Waits until this many processes exist and all others have ended. Returns the pids of the instances."""

        def found() -> list[str]:
            return [one["state"] for one in index(client, "scaled")["scaled/1"]["instances"]]

        until(client, lambda: found() == ["ready"] * count)
        return pids(client, "scaled")

    def scales(client: shmserve.Client) -> dict[str, int]:
        lines = re.findall(r"\nshmserve_model_scale_total\{(.*)\} (\d+)", client.metrics())
        return {re.sub(r'.*direction="(\w+)".*', r"\1", labels): int(n) for labels, n in lines if '"scaled"' in labels}

    with shared_server.serving(tmp_path / "models") as server, server.client() as client:
        for _ in range(2):
            (first,) = await_size(client, 1).items()
            futures = [client.submit("scaled", {"x": ONE}) for _ in range(20)]
            there = await_size(client, 3)
            assert sorted(there) == ["1 scaled_0_0", "1 scaled_0_1", "1 scaled_0_2"]
            assert first in there.items(), "the first one was not restarted"
            assert index(client, "scaled")["scaled/1"]["scaled"] == [1, 3]
            os.write(gate, b"." * len(futures))
            assert all((future.result()["y"] == ONE).all() for future in futures)
        await_size(client, 1)
        assert scales(client) == {"up": 4, "down": 4}
        assert "gets one more instance, 'scaled_0_2' (3 of at most 3): requests waited" in server.log
        text = "needs one instance less, so 'scaled_0_2' leaves (2 remain, of at least 1): fewer were enough for"
        assert text in server.log

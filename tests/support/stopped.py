"""Workers that do not run, so that requests wait for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import shmserve
from tests.support.living import pids


@contextmanager
def stopped(client: shmserve.Client, model: str) -> Iterator[None]:
    """Stops the workers of a model for the duration of the block. The block should wait until the requests wait."""
    found = set(pids(client, model).values())
    assert found
    try:
        for pid in found:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in found:
            os.kill(pid, signal.SIGCONT)


def succeeded(client: shmserve.Client, model: str) -> int:
    """The number of requests to a model that have succeeded."""
    (found,) = client.statistics(model)["model_stats"]
    return int(found["inference_stats"]["success"]["count"])

"""Requests that wait behind stopped workers, and so share batches."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from shmserve import Client
from tests.support.living import pids, until


@contextmanager
def stopped(client: Client, model: str, waiting: int) -> Iterator[None]:
    """Stops the workers of a model until this many requests wait for them."""
    pending = re.compile(rf'^nv_inference_pending_request_count{{model="{model}",version="1"}} (\d+)$', re.MULTILINE)
    workers = pids(client, model).values()
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
        until(client, lambda: sum(map(int, pending.findall(client.metrics()))) >= waiting)
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)

"""The thread that reads for all threads of a client."""

from __future__ import annotations

import shmserve


def await_leader(client: shmserve.Client) -> None:
    """Returns once a thread waits for packets."""
    while not client._link._leading:  # noqa: SLF001 - nothing public tells that a thread is about to sleep
        pass

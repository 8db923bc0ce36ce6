"""Recalls: takes back requests that a worker has not started, removes them from their batch, and queues them again."""

from __future__ import annotations

from shmserve.core.exit import exit
from shmserve.core.records import Batch, Instance, Request, Version
from shmserve.core.state import State
from shmserve.core.states import RequestState
from shmserve.protocol.worker_messages import Withdraw


def recall(state: State, instance: Instance, batch: Batch) -> None:
    """Asks the worker to return its waiting batch."""
    if not batch.recalled:
        batch.recalled = True
        state.send(instance.peer, Withdraw(tuple(request.number for request in batch.requests()), True))


def take_out(state: State, version: Version, instance: Instance, batch: Batch, request: Request) -> None:
    """Removes a request from a batch that waits at a worker and will not run it."""
    batch.rows -= request.cost
    batch.remaining -= 1
    if request.state is RequestState.LINGERING:
        request.batch = None
        exit.released(state, request)
    else:
        request.take_back()
        put_back(state, version, request)
    if not batch.remaining:
        batch.end()
        instance.waiting = None


def put_back(state: State, version: Version, request: Request) -> None:
    """Queues the request again in its version or, after a restart, in the next generation."""
    target = version.requeue_target
    if target is not version:
        request.version = target
        request.miss = None  # its key contains the generation
        target.service.move_in_order(request, version.service)
        exit.respond_in_order(state, version)
    target.service.queue.put_back(request)
    state.to_dispatch[target] = None

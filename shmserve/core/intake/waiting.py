"""Requests that wait for their model to load.

A request for a version that is loading is queued unchecked, because the version's configuration is known only when its
first worker has loaded it. When the version is READY, the request is checked like a new one. If the version cannot be
loaded, or is replaced, the request goes to the version that serves it instead, or fails with the reason why there is
none.

Invariant: a request is in `Version.unchecked` of its version if and only if `Request.unchecked` is set.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import nsmallest
from typing import TypeVar

from msgspec.structs import replace

from shmserve.core.exit import exit
from shmserve.core.records import Request, Version
from shmserve.core.service.graph import HANDLE_BYTES
from shmserve.core.service.validation import options_bytes
from shmserve.core.state import STOPPING, State, Timer
from shmserve.errors import ServeError, Unavailable
from shmserve.protocol.messages import Fail, Infer
from shmserve.protocol.worker_messages import Call

RESUMED = 256
"""Limit of requests that are checked in one turn after a wait: a few ms of work."""

FORM_BYTES = 128
"""What the broker needs for a tensor or a requested output, besides its name, shape and data."""
DIM_BYTES = 40

M = TypeVar("M", Infer, Call)


def find(state: State, model: str, number: int) -> Version:
    """The version that serves such requests now or, if it is loading, later. Raises if there is none."""
    try:
        return state.look_up(model, number)
    except Unavailable:
        loading = state.loading_version(model, number)
        if loading is None:
            raise
        if state.draining:  # loads have been cancelled
            raise Unavailable(STOPPING) from None
        return loading


def size_of(message: Infer | Call) -> tuple[int, bool]:
    """The bytes inside the message, and whether it refers to shared memory. Names and shapes count, too: nothing is
    known about the model, so a client could send any number of empty tensors."""
    options, outputs = message.options, message.outputs
    inline = options_bytes(options) if options is not None else 0
    shared = False
    for wanted in outputs or ():
        inline += FORM_BYTES + len(wanted.name)
        shared = shared or wanted.place is not None
    for tensor in message.inputs:
        inline += FORM_BYTES + len(tensor.name) + DIM_BYTES * len(tensor.shape)
        if isinstance(tensor.data, bytes):
            inline += len(tensor.data)
        else:
            shared = True
            inline += HANDLE_BYTES * len(tensor.data) if isinstance(tensor.data, tuple) else 0
    return inline, shared


def add(state: State, request: Request) -> None:
    """Lets a new request wait, at most until its own timeout."""
    options = request.options
    request.client.sent(request)
    state.requests[request.number] = request
    if request.deadline:
        state.set_timer(request.deadline, Timer.DEADLINE, request)
    if options is not None and options.queue_timeout_us:
        request.queue_expires = request.arrived + options.queue_timeout_us * 1000
        state.set_timer(request.queue_expires, Timer.QUEUE, request)
    request.version.unchecked.add(request)


def wait_again(request: Request, version: Version) -> None:
    """Lets a request wait for another version. `check` has taken it out of the queue of the previous one."""
    request.taken_over(version)
    request.client.sent(request)
    version.unchecked.add(request)


def check(state: State, admit: Callable[[Request, int], None], now: int) -> None:
    """Checks requests whose wait is over, up to RESUMED of them. `admit` replaces a request by one that has been
    checked, or calls `wait_again`; if it raises, the request fails."""
    remaining = RESUMED
    for version in list(state.loaded_versions):
        count = min(remaining, version.unchecked.count)
        remaining -= count
        for request in _take(version, count) if count else ():
            _check(state, request, admit, now)
        if version.unchecked.count:
            return
        del state.loaded_versions[version]


def _take(version: Version, count: int) -> list[Request]:
    """Removes the next requests from those that wait, at least one: in fair order or, with preserve_ordering, in order
    of arrival."""
    queue = version.unchecked
    if version.service.order is None:
        return queue.take(count)
    waiting = queue.in_order()
    oldest = nsmallest(count, range(len(waiting)), key=lambda place: waiting[place].number)
    return sorted(queue.pick(sorted(oldest)), key=lambda request: request.number)


def _check(state: State, request: Request, admit: Callable[[Request, int], None], now: int) -> None:
    client = request.client
    del client.requests[request.client_number]
    client.bytes -= request.inline
    client.input_bytes -= request.input_bytes
    try:
        admit(request, now)
    except ServeError as error:
        client.sent(request)
        exit.deliver(state, request, Fail(request.client_number, error.code, error.message))


def fail(state: State, version: Version, text: str) -> None:
    """Fails the requests that wait for this version."""
    for request in version.unchecked.take(version.unchecked.count):
        exit.fail_unsent(state, request, "UNAVAILABLE", text)


def message_of(request: Request, message: M, now: int) -> M:
    """The message of a request that has waited, with what is left of its timeouts."""
    options = request.options
    if options is not None and options.queue_timeout_us:
        options = replace(options, queue_timeout_us=max((request.queue_expires - now) // 1000, 1))
    timeout_us = max((request.deadline - now) // 1000, 1) if request.deadline else 0
    return replace(message, timeout_us=timeout_us, options=options)

"""Lower bound for a request that passes through several workers: the processes only decode and encode its messages.
There are no checks, queues, records or timers, and each process blocks in `recv` on the one socket whose message is
due. `relays.in_steps` is the same without decoding and encoding.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import numpy as np

from bench.lib.child import Answer, Handler
from bench.lib.clock import durations, summary
from bench.lib.relays import RECEIVE, chain
from shmserve.protocol.codec import Codec, encode
from shmserve.protocol.messages import Handle, Infer, Reply, Tensor, Wanted
from shmserve.protocol.worker_messages import Done, Execute, Row, Work

NAMES = ("one", "two", "three")


def in_steps(steps: int, copied: int) -> Handler:
    """The last worker copies a tensor of `copied` bytes between shared mappings; the others pass it on. Order: `count`,
    how many of the last workers to pass through.
    """
    client = chain(steps, copied, _worker, _broker)
    decode, room = Codec(Reply).decode, memoryview(bytearray(RECEIVE))
    whole = Handle(1, 0, copied)
    place = (Wanted("y", Handle(2, 0, copied)),)

    def handle(seconds: float, count: int) -> Answer:
        def trip() -> None:
            inputs = (Tensor("x", "FP32", (copied // 4,), (whole,)),)
            client.send(encode([Infer(1, NAMES[-1], count, inputs, place)]))
            (reply,) = decode(bytes(room[: client.recv_into(room)]))
            assert isinstance(reply, Reply), reply

        return summary(durations(trip, seconds, warm=10))

    return handle


def _broker(front: socket.socket, backs: list[socket.socket]) -> None:
    room = memoryview(bytearray(RECEIVE))
    requests, results = Codec(Infer).decode, Codec(Done).decode
    audience, number = f"uid:{os.getuid()}", 0
    while size := front.recv_into(room):
        (request,) = requests(bytes(room[:size]))
        assert isinstance(request, Infer), request
        tensors, chosen = request.inputs, backs[-request.version :]
        for back in chosen:
            number += 1
            wanted = request.outputs if back is chosen[-1] else (Wanted("y"),)
            inputs = tuple([Tensor("x", tensor.dtype, tensor.shape, tensor.data) for tensor in tensors])
            back.send(encode([Execute(number, 0, (Work(number, 0, inputs, wanted, audience, aliases=True),))]))
            (done,) = results(bytes(room[: back.recv_into(room)]))
            assert isinstance(done, Done), done
            tensors = done.rows[0].outputs
        front.send(encode([Reply(request.request, 1, tensors)]))


def _worker(end: socket.socket, memories: Any) -> None:
    room, decode, clock = memoryview(bytearray(RECEIVE)), Codec(Execute).decode, time.monotonic_ns
    while size := end.recv_into(room):
        taken = clock()
        (execute,) = decode(bytes(room[:size]))
        assert isinstance(execute, Execute), execute
        work = execute.work_items[0]
        (tensor,), (wanted,) = work.inputs, work.outputs or ()
        data = tensor.data
        if memories:
            np.copyto(memories[1], memories[0])
            assert wanted.place is not None
            data = (wanted.place,)
        row = Row(work.request, (Tensor("y", tensor.dtype, tensor.shape, data),))
        end.send(encode([Done(execute.batch, (row,), (taken, taken, clock(), clock()))]))

"""A process of another user that attacks the server over the lane, on the test's orders.

Invariant: all imports precede the change of user, because the new user may not read the interpreter's files. An order
returns plain values, which the test checks.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.random import default_rng

from bench.lib.child import Answer, Handler
from bench.lib.raw_client import ConnectionClosed, RawLane, RawSegment
from shmserve.protocol import codec
from shmserve.protocol.messages import (
    Ask,
    Fail,
    FailHeld,
    Goodbye,
    Handle,
    Infer,
    Map,
    Ping,
    Pong,
    Reply,
    Tensor,
    Unmap,
)

SIZE = 1 << 20
ROW = 16 * 1024
"""Number of values in a large tensor."""
ERRORS = (Fail, FailHeld, Goodbye)


class Attacker:
    def __init__(self, path: str) -> None:
        self._path = path
        self._lane: RawLane = RawLane(path)
        self._lane.hello("memfd")
        self._number = 0
        self._others: list[RawLane] = []
        self._segment: RawSegment | None = None
        self._stop = threading.Event()

    # ------------------------------------------------------------------------------------ what all need

    def _own(self) -> RawSegment:
        if self._segment is None:
            self._segment = RawSegment(self._lane, SIZE)
        return self._segment

    def _infer(self, model: str, *tensors: Tensor) -> Infer:
        self._number += 1
        return Infer(self._number, model, 0, tensors)

    def _answer(self) -> Any:
        return self._lane.receive_kind(Reply, *ERRORS)

    def _told(self, count: int) -> dict[str, int]:
        """Counts the answers to this many requests by kind: Reply, or code and text."""
        found: Counter[str] = Counter()
        for _ in range(count):
            answer = self._answer()
            if isinstance(answer, Reply):
                for tensor in answer.outputs:
                    self._lane.read(tensor)
            found["Reply" if isinstance(answer, Reply) else f"{answer.code}: {answer.text}"] += 1
        return dict(found)

    # ------------------------------------------------------------------------------------ orders

    def flip(self, requests: int) -> Answer:
        """Sends requests with constantly changing memory: numbers, and strings whose lengths change."""
        own = self._own()
        strings = b"".join((12).to_bytes(4, "little") + bytes(12) for _ in range(1024))

        rounds = 0

        def change() -> None:
            nonlocal rounds
            random = default_rng(1)
            view = np.frombuffer(own.memory, np.uint8)
            while not self._stop.is_set():
                view[random.integers(0, len(strings), 512)] = random.integers(0, 256, 512)
                own.memory[: len(strings)] = strings  # valid again for a moment
                rounds += 1

        self._stop.clear()
        thread = threading.Thread(target=change)
        thread.start()
        found: Counter[str] = Counter()
        try:
            for _ in range(requests // 8):
                for number in range(8):
                    if number % 2:
                        tensor = Tensor("x", "BYTES", (1, 1024), (Handle(own.id, 0, len(strings)),))
                        self._lane.send(self._infer("strings", tensor))
                    else:
                        tensor = Tensor("x", "FP32", (1, ROW), (Handle(own.id, 0, 4 * ROW),))
                        self._lane.send(self._infer("identity", tensor))
                found.update(self._told(8))
        finally:
            self._stop.set()
            thread.join()
        return {"told": dict(found), "rounds": rounds}

    def hold(self, most: int) -> Answer:
        """Requests large answers and returns none. Ends at the first refusal."""
        own = self._own()
        tensor = Tensor("x", "FP32", (1, SIZE // 4), own.put(0, bytes(SIZE)))
        for number in range(most):
            self._lane.send(self._infer("identity", tensor))
            answer = self._answer()
            if not isinstance(answer, Reply):
                return {"held": number, "told": f"{answer.code}: {answer.text}"}
        return {"held": most, "told": ""}

    def flood(self, model: str, requests: int) -> Answer:
        """Sends all requests at once, then reads."""
        tensor = Tensor("x", "FP32", (1, 4), bytes(16))
        for _ in range(requests // 50):
            self._lane.send(*(self._infer(model, tensor) for _ in range(50)))
        return {"told": self._told(requests // 50 * 50)}

    def ask_at_once(self, connections: int, questions: int, what: str) -> Answer:
        """Sends thousands of queries on each of many connections. Half of them close without reading; the others
        continue to read."""
        packets = [
            codec.encode([Ask(number, what) for number in range(start, start + 500)])
            for start in range(1, questions, 500)
        ]
        made = [RawLane(self._path) for _ in range(connections)]
        for lane in made:
            lane.hello("memfd")
            lane.limit_sends(0.2)
            with suppress(BlockingIOError):  # the server accepts no more for now, as it should
                for packet in packets:
                    lane.send_bytes(packet)
        for lane in made[::2]:
            lane.close()
        self._others += made[1::2]
        return {"sent": len(made)}

    def stuff(self) -> Answer:
        """Sends without reading until the socket is full or the connection has ended, and does not read afterwards."""
        lane = RawLane(self._path)
        lane.hello("memfd")
        lane.limit_sends(3.0)
        self._others.append(lane)
        packet = codec.encode([Ask(number, "metadata", "identity") for number in range(1, 400)])
        sent = 0
        with suppress(BlockingIOError, ConnectionError):
            while sent < 5000:
                lane.send_bytes(packet)
                sent += 1
        return {"sent": sent}

    def hold_lease(self, what: str) -> Answer:
        """Sends single requests until it has a lease, and misuses the lease. It neither reads the lease nor ends it."""
        lane = RawLane(self._path)
        lane.hello("memfd", leases=True)
        self._others.append(lane)
        request = self._infer("lent", Tensor("x", "FP32", (1, 4), bytes(16)))
        while not lane.leases:
            lane.send(request)
            lane.receive_kind(Reply, *ERRORS)
            lane.drain()
        (sock,) = lane.leases.values()
        sock.setblocking(False)
        packet, spare = codec.encode([request]), os.memfd_create("spare", os.MFD_CLOEXEC)
        with suppress(BlockingIOError, ConnectionError):
            if what == "descriptors":
                socket.send_fds(sock, [packet], [spare] * 100)
            elif what == "flood":
                for _ in range(100_000):
                    sock.send(packet)
        os.close(spare)
        return {}

    def cut_inputs(self) -> Answer:
        """Tries to shrink, grow and punch holes in memory while the server reads it: the errno of each attempt."""
        own = self._own()
        tensor = Tensor("x", "FP32", (1, ROW), own.put(0, bytes([7]) * 4 * ROW))
        self._lane.send(*(self._infer("identity", tensor) for _ in range(4)))
        attempts: dict[str, Callable[[], None]] = {
            "shrink": lambda: os.ftruncate(own.fd, 0),
            "grow": lambda: os.ftruncate(own.fd, 2 * SIZE),
            "hole": lambda: _hole(own.fd),
        }
        errors = {}
        for name, attempt in attempts.items():
            try:
                attempt()
                errors[name] = 0
            except OSError as error:
                errors[name] = error.errno or -1
        return {"errors": errors, "told": self._told(4)}

    def misplace(self) -> Answer:
        """Sends descriptors where none belong, too many of them, and too few."""
        own = self._own()
        fds = [os.memfd_create(f"spare{number}", os.MFD_CLOEXEC) for number in range(4)]
        inline = Tensor("x", "FP32", (1, 4), bytes(16))
        new = (self._lane.owner << 32) + 100
        packets = [
            (codec.encode([Ping(1)]), tuple(fds)),
            (codec.encode([self._infer("identity", inline)]), (fds[0],)),
            (codec.encode([Unmap(new)]), (fds[0],)),
            (codec.encode([Map(new, 4096), Map(new + 1, 4096)]), (fds[0],)),
            (codec.encode([Map(new, SIZE), Map(new, SIZE)]), (own.fd, own.fd)),
            (codec.encode([Map(new + 2, SIZE)]), (fds[0], own.fd, fds[1])),
            (b"\xc1\xc1", tuple(fds)),
            (b"", ()),
            (codec.encode([Ping(1)]), tuple(fds[0] for _ in range(100))),
            (codec.encode([Ping(1)]), tuple(fds[0] for _ in range(253))),
        ]
        told: Counter[str] = Counter()
        for packet, descriptors in packets:
            with suppress(BrokenPipeError, ConnectionResetError):
                self._lane.send_bytes(packet, descriptors)
            try:
                self._lane.send(Ping(2))
                while (message := self._lane.receive()) != Pong(2):
                    told[
                        f"{message.code}: {message.text}" if isinstance(message, ERRORS) else type(message).__name__
                    ] += 1
            except (ConnectionClosed, BrokenPipeError, ConnectionResetError):
                told["the end"] += 1
                self._lane.close()
                self._lane = RawLane(self._path)
                self._lane.hello("memfd")
        for fd in fds:
            os.close(fd)
        return {"told": dict(told)}


def _hole(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(SIZE)):  # PUNCH_HOLE | KEEP_SIZE
        raise OSError(ctypes.get_errno(), "fallocate")


def attacker(path: str, uid: int) -> Handler:

    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    made = Attacker(path)

    def handle(do: str, **order: Any) -> Answer:
        found: Answer = getattr(made, do)(**order)
        return found

    return handle

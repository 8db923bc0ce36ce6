"""The two clients of the hostile run: an attacker, and an honest client beside it that must not be affected.

Responses to the attacker are decoded as by a regular client, and their texts are searched for internals that no client
may learn: paths, segment names, memory addresses.
"""

from __future__ import annotations

import errno
import os
import re
import select
from collections import Counter
from time import perf_counter
from typing import Any

import numpy as np

from bench.hostile.packets import PacketGenerator
from bench.lib.child import Answer, Handler
from bench.lib.raw_client import ConnectionClosed, Link, RawLane, RawSegment, Zmq
from shmserve.protocol import messages
from shmserve.protocol.messages import Fail, FailHeld, Goodbye, Welcome

SECRETS = re.compile(r"/(?:tmp|run|dev|home|work|usr|proc|var|root)\b|0x[0-9a-f]{6,}|shmserve[-_][0-9a-f]{8}|Traceback")
TOGETHER = 50
"""Packets sent before the responses are read."""


class Attack:
    def __init__(self, link: str, path: str, seed: int, model: str) -> None:
        self._kind = link
        self._path = path
        self._packets = PacketGenerator(seed, model)
        self._link: Link | None = None
        self._segment: RawSegment | None = None
        self.counts: Counter[str] = Counter()
        self.leaks: list[str] = []

    def _connect(self) -> Link:
        link: Link
        if self._kind == "lane":
            link = RawLane(self._path)
            link.limit_sends(5.0)
        else:
            link = Zmq(self._path)
        self.counts["connections"] += 1
        if self._packets.random.random() < 0.9:
            answer = link.hello("memfd" if self._kind == "lane" else "frames")
            assert isinstance(answer, Welcome), answer
            self._packets.owner = link.owner
            if isinstance(link, RawLane):
                self._segment = RawSegment(link, 4096)
        return link

    def _disconnect(self) -> None:
        if isinstance(self._link, Zmq):
            self._link.close(bye=self._packets.random.random() < 0.5)
        elif self._link is not None:
            self._link.close()
        self._link = None
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _descriptors(self) -> tuple[int, ...]:
        """Descriptors for the packet: few packets have any, and these are wrong or missing where required."""
        roll = self._packets.random.random()
        if roll > 0.05:
            return ()
        if roll < 0.01:
            return tuple(os.open("/dev/null", os.O_RDWR) for _ in range(self._packets.random.choice((1, 8, 250))))
        descriptor = os.memfd_create("unsealed", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, 4096)
        return (descriptor,)

    def _send(self, link: Link) -> None:
        packet = self._packets.packet()
        if isinstance(link, RawLane):
            descriptors = self._descriptors()
            try:
                link.send_bytes(packet, descriptors)
            except OSError as error:
                if error.errno != errno.EMSGSIZE:
                    raise
                self.counts["refused by the kernel"] += 1
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        elif isinstance(link, Zmq):
            frames = [self._packets.random.randbytes(self._packets.random.choice((0, 64, 5000)))] * (
                self._packets.random.choice((0, 0, 0, 1, 2, 40))
            )
            link.send_bytes(packet, tuple(frames))

    def _check_answers(self, link: Link) -> None:
        for message in link.drain():
            self.counts[type(message).__name__] += 1
            if isinstance(message, (Fail, FailHeld, Goodbye)):
                self.counts[message.code] += 1
                if SECRETS.search(message.text) and len(self.leaks) < 5:
                    self.leaks.append(message.text)
                if isinstance(message, Goodbye):
                    raise ConnectionClosed(message.text)

    def run(self, count: int, seconds: float) -> Answer:
        end = perf_counter() + seconds
        sent = 0
        while sent < count and perf_counter() < end:
            try:
                link = self._link = self._link or self._connect()
                for _ in range(TOGETHER):
                    self._send(link)
                    sent += 1
                self._check_answers(link)
                if self._packets.random.random() < 0.01:
                    self._disconnect()
            except (TimeoutError, ConnectionError):
                self.counts["disconnected"] += 1
                self._disconnect()
        self._disconnect()
        return {"sent": sent, "counts": dict(self.counts), "leaks": self.leaks}


def attack(link: str, path: str, seed: int, model: str) -> Handler:
    return lambda count, seconds: Attack(link, path, seed, model).run(count, seconds)


def honest(url: str, model: str) -> Handler:
    """Infer for `seconds`; counts wrong responses."""
    from shmserve import Client, ServeError

    client = Client(url)

    def handle(seconds: float) -> Answer:
        results: dict[str, Any] = {"right": 0, "wrong": 0, "examples": []}
        rng = np.random.default_rng(5)
        end = perf_counter() + seconds
        while perf_counter() < end:
            x = rng.standard_normal((1, int(rng.choice((4, 900, 40_000))))).astype(np.float32)
            try:
                good = np.array_equal(client.infer(model, {"x": x}, timeout=20.0)["y"], x)
                text = "" if good else f"other bytes for {x.shape}"
            except ServeError as error:
                good, text = False, f"{type(error).__name__}: {error}"
            results["right" if good else "wrong"] += 1
            if not good and len(results["examples"]) < 3:
                results["examples"].append(text)
        return results

    return handle


def is_alive(link: Link, seconds: float) -> bool:
    """A Ping and its Pong: all earlier messages have then been processed."""
    link.send(messages.Ping(7))
    try:
        link.receive_kind(messages.Pong, seconds=seconds)
    except (TimeoutError, ConnectionClosed):
        return False
    return bool(select.select([], [link], [], seconds)[1])

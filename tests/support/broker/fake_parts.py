"""Streamed responses of the fake broker, never more than their window allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shmserve.protocol.messages import Fail, Infer, Part

if TYPE_CHECKING:
    from tests.support.broker.fake_broker import FakeBroker, Peer


class Parts:
    """A request that is answered with numbers: as many as it asks for, within its window."""

    def __init__(self, peer: Peer, infer: Infer, frames: list[bytes]) -> None:
        assert infer.options is not None
        (x,) = infer.inputs
        self.peer = peer
        self.request = infer.request
        self.count = int(np.frombuffer(peer.bytes_of(x, frames), np.float32)[0])
        self.wish = infer.options.parameters
        self.room = infer.options.window
        self.sent = 0

    def go_on(self) -> None:
        """Sends as many parts as the window allows. An end without outputs needs no window."""
        send, frames = self.peer.send, list[bytes]()
        while self.room and self.sent < self.count:
            data = np.full(int(self.wish.get("size", 1)), self.sent, np.float32).tobytes()
            frames = []
            y = self.peer.tensor("y", "FP32", (len(data) // 4,), data, frames)
            self.sent += 1
            self.room -= 1
            last = self.sent == self.count and bool(self.wish.get("full_end"))
            send(Part(self.request, 1, (y,), {"index": self.sent}, last), frames=tuple(frames))
            if last:
                self.peer.streams.pop(self.request)
                return
        if self.sent == self.count:
            del self.peer.streams[self.request]
            if self.wish.get("fail"):
                send(Fail(self.request, "MODEL_FAILED", "no more of this"))
            else:
                send(Part(self.request, 1, (), None, True))


def parts(broker: FakeBroker, peer: Peer, infer: Infer, frames: list[bytes]) -> None:
    peer.streams[infer.request] = Parts(peer, infer, frames)
    peer.streams[infer.request].go_on()

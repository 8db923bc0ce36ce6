"""Clients to be killed. A running process forks them, because starting an interpreter for each takes too long.

A client sends requests until it is killed, and ignores all errors.
"""

from __future__ import annotations

import os
import random
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from bench.lib.child import Answer, Handler
from bench.lib.raw_client import Zmq
from shmserve import Client, ServeError
from shmserve.protocol import codec
from shmserve.protocol.messages import Infer, Tensor
from tests.support.patience import PATIENCE_S

MODELS = ("identity", "slow")
LARGEST = 60_000
"""Number of values in one tensor, 4 bytes each."""
FLIGHT = 8
HELD = 4


def _ask(url: str, seed: int) -> None:
    """Sends inputs in its own memory, gets some outputs there too, and holds some answers."""
    roll = random.Random(seed)
    client = Client(url)
    client.live()  # memory created before the server knows its owner stays until the next start
    held: deque[Any] = deque(maxlen=HELD)
    while True:
        calls = []
        for _ in range(FLIGHT):
            x = client.empty((1, int(LARGEST ** roll.random())))
            x[:] = seed
            outputs = {"y": client.empty(x.shape)} if roll.random() < 0.2 else None
            calls.append(client.submit(roll.choice(MODELS), {"x": x}, outputs=outputs))
        for call in calls:
            with suppress(ServeError):
                held.append(call.result(PATIENCE_S)["y"])


def _ask_by_frames(path: str, seed: int) -> None:
    roll = random.Random(seed)
    with Zmq(path) as link:
        link.hello("frames")
        number = 0
        while True:
            for _ in range(FLIGHT):
                number += 1
                count = int(LARGEST ** roll.random())
                infer = Infer(number, roll.choice(MODELS), 0, (Tensor("x", "FP32", (1, count), 0),))
                link.send_bytes(codec.encode([infer]), (bytes(4 * count),))
            link.receive()


def nest(lane: str, zmq: str) -> Handler:
    kinds: dict[str, tuple[Callable[[str, int], None], str]] = {
        "lane": (_ask, f"unix://{lane}"),
        "posix": (_ask, f"ipc://{zmq}"),
        "frames": (_ask_by_frames, zmq),
    }

    def handle(kind: str, seed: int) -> Answer:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        pid = os.fork()
        if pid:
            return {"pid": pid}
        try:
            ask, address = kinds[kind]
            ask(address, seed)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    return handle

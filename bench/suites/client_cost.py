"""The cost of a request in the client itself: processor time of `submit` and `result` with a peer that only echoes.

The peer is another process, so its time is not counted. A request is a tensor of 1 KiB, its response one of 256 bytes.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import numpy as np
import zmq

import shmserve
from shmserve.protocol import codec as wire
from shmserve.protocol.messages import PACKET_BYTES, PROTOCOL, Bye, ClientMessage, Hello, Infer, Reply, Tensor, Welcome

OUT = np.arange(64, dtype=np.float32).tobytes()


def answers(codec: wire.Codec, packet: bytes) -> bytes:
    found: list[object] = []
    for message in codec.decode(packet):
        if isinstance(message, Infer):
            found.append(Reply(message.request, 1, (Tensor("y", "FP32", (1, 64), OUT),)))
        elif isinstance(message, Hello):
            found.append(Welcome(PROTOCOL, 1, "echo"))
        elif isinstance(message, Bye):
            return b""
    return wire.encode(found)


def echo_lane(listener: socket.socket) -> None:
    codec = wire.Codec(ClientMessage)
    sock, _ = listener.accept()
    while packet := sock.recv(PACKET_BYTES):
        said = answers(codec, packet)
        if not said:
            break
        sock.send(said)


def echo_zmq(path: str, ready: int) -> None:
    codec = wire.Codec(ClientMessage)
    router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(path)
    os.write(ready, b"1")
    while True:
        identity, packet = router.recv_multipart()
        said = answers(codec, packet)
        if not said:
            router.close(0)
            return
        router.send_multipart([identity, said])


def measure(client: shmserve.Client, in_flight: int, count: int) -> tuple[float, float]:
    """Microseconds per request: processor time of this process, and wall time."""
    x = np.ones((1, 256), np.float32)
    waiting: deque[shmserve.Future] = deque()
    submit, popleft, append = client.submit, waiting.popleft, waiting.append
    for _ in range(in_flight):
        append(submit("mlp", {"x": x}))
    started, busy = time.perf_counter(), time.process_time()
    for _ in range(count):
        popleft().result()["y"]
        append(submit("mlp", {"x": x}))
    busy, elapsed = time.process_time() - busy, time.perf_counter() - started
    while waiting:
        popleft().result()
    return busy / count * 1e6, elapsed / count * 1e6


def sequential(client: shmserve.Client, count: int) -> tuple[float, float]:
    x = np.ones((1, 256), np.float32)
    infer = client.infer
    started, busy = time.perf_counter(), time.process_time()
    for _ in range(count):
        infer("mlp", {"x": x})["y"]
    return (time.process_time() - busy) / count * 1e6, (time.perf_counter() - started) / count * 1e6


def table(client: shmserve.Client, what: str, count: int) -> None:
    sequential(client, 200)
    busy, elapsed = sequential(client, count // 4)
    print(f"{what:6} infer, one at a time   {busy:7.1f} us processor {elapsed:7.1f} us by the clock")
    for in_flight in (8, 64):
        best = min(measure(client, in_flight, count) for _ in range(3))
        print(f"{what:6} submit, {in_flight:3} in flight  {best[0]:7.1f} us processor {best[1]:7.1f} us by the clock")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    count = parser.parse_args().count
    with tempfile.TemporaryDirectory() as folder:
        lane, endpoint = Path(folder) / "lane.sock", Path(folder) / "broker.sock"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(lane))
        listener.listen()
        ready, tell = os.pipe()
        children = []
        for kind in ("lane", "zmq"):
            child = os.fork()
            if not child:
                if kind == "lane":
                    echo_lane(listener)
                else:
                    echo_zmq(f"ipc://{endpoint}", tell)
                os._exit(0)
            children.append(child)
        os.read(ready, 1)
        with shmserve.Client(f"unix://{lane}") as client:
            table(client, "lane", count)
        with shmserve.Client(f"ipc://{endpoint}") as client:
            table(client, "zmq", count)
        for child in children:
            os.waitpid(child, 0)
        listener.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

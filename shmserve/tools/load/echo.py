"""The server that measures the generator: `python -m shmserve.tools.load.echo KIND FOLDER READY_FD`.

It speaks just enough of a protocol to answer each inference request at once with the same small response. The model's
metadata and configuration, in JSON, come from standard input. It ends when standard input is closed.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import uvloop
import zmq

from shmserve.http2 import frames
from shmserve.paths import BROKER, LANE
from shmserve.protocol import codec
from shmserve.protocol.descriptors import DESCRIPTORS
from shmserve.protocol.messages import (
    PACKET_BYTES,
    PROTOCOL,
    Answer,
    Ask,
    ClientMessage,
    Hello,
    Infer,
    Ping,
    Pong,
    Reply,
    Tensor,
    Welcome,
)
from shmserve.tools.load.plan import GRPC, HTTP

UNIX, IPC = "unix", "ipc"
OUTPUT = Tensor("output", "FP32", (1,), b"\0\0\0\0")
SERVER = {"name": "echo", "version": "1", "extensions": []}


class _Native:
    """Answers packets of the native protocol. Shared memory is never mapped: the inputs are not read."""

    def __init__(self, documents: dict[str, Any]) -> None:
        self._documents = documents
        self._codec = codec.Codec(ClientMessage)
        self._owners = 0

    def answers(self, packet: bytes) -> list[bytes]:
        results: list[Any] = []
        for message in self._codec.decode(packet):
            if isinstance(message, Infer):
                results.append(Reply(message.request, 1, (OUTPUT,)))
            elif isinstance(message, Hello):
                self._owners += 1
                results.append(Welcome(PROTOCOL, self._owners, "echo 1"))
            elif isinstance(message, Ask):
                what = message.what if message.model or message.what != "metadata" else "server"
                results.append(Answer(message.request, json.dumps(self._documents[what]).encode()))
            elif isinstance(message, Ping):
                results.append(Pong(message.number))
        return [codec.encode(results[at : at + 64]) for at in range(0, len(results), 64)]


def _serve_unix(folder: Path, native: _Native, ready: int) -> None:
    poll = select.epoll()
    clients: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(folder / LANE))
        listener.listen()
        poll.register(listener, select.EPOLLIN)
        poll.register(sys.stdin, select.EPOLLIN)
        _tell(ready, f"unix://{folder / LANE}")
        while True:
            for fd, _ in poll.poll():
                if fd == listener.fileno():
                    client, _ = listener.accept()
                    clients[client.fileno()] = client
                    poll.register(client, select.EPOLLIN)
                elif fd == sys.stdin.fileno():
                    return
                elif not _answer_unix(clients[fd], native):
                    clients.pop(fd).close()


def _answer_unix(client: socket.socket, native: _Native) -> bool:
    try:
        packet, descriptors, _, _ = socket.recv_fds(client, PACKET_BYTES + 1, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        for descriptor in descriptors:
            os.close(descriptor)
        for answer in native.answers(packet) if packet else ():
            client.send(answer)
    except ConnectionError:
        return False
    return bool(packet)


def _serve_ipc(folder: Path, native: _Native, ready: int) -> None:
    context: zmq.Context[Any] = zmq.Context()
    with context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.bind(f"ipc://{folder / BROKER}")
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        _tell(ready, f"ipc://{folder / BROKER}")
        while True:
            events = dict(poller.poll())
            if sys.stdin.fileno() in events:
                return
            identity, packet, *_ = router.recv_multipart()
            for answer in native.answers(packet):
                router.send_multipart([identity, answer])


# ---------------------------------------------------------------------------------------- KServe


class _HttpEcho(asyncio.Protocol):
    """A connection. Requests must have a Content-Length, as the generator's do."""

    def __init__(self, documents: dict[str, Any]) -> None:
        self._documents = documents
        self._data = bytearray()
        text = json.dumps({"outputs": [{"name": "output", "datatype": "FP32", "shape": [1], "data": [0.0]}]})
        self._answer = _http_response(text.encode())
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n") + 4) >= 4:
            head = bytes(self._data[:end])
            length = int(head.partition(b"\r\nContent-Length: ")[2].partition(b"\r\n")[0] or b"0")
            if len(self._data) < end + length:
                return
            del self._data[: end + length]
            self._transport.write(self._answer if head.startswith(b"POST") else self._document(head))

    def _document(self, head: bytes) -> bytes:
        path = head.split(b" ", 2)[1]
        what = "server" if path == b"/v2" else "config" if path.endswith(b"/config") else "metadata"
        return _http_response(json.dumps({} if path.endswith(b"/stats") else self._documents[what]).encode())


def _http_response(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


async def _serve_http(documents: dict[str, Any], ready: int) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: _HttpEcho(documents), "127.0.0.1", 0)
    _tell(ready, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    await _end_of_input()
    server.close()


class _GrpcEcho(asyncio.Protocol):
    """A connection. `answers`: method -> its response with gRPC's prefix. The path of a call is searched in its header
    block, since the generator's blocks have only literals."""

    def __init__(self, answers: dict[str, bytes]) -> None:
        self._answers = answers
        self._data = bytearray()
        self._paths: dict[int, str] = {}
        self._received = 0
        self._skip = len(frames.PREFACE)
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        window = frames.window_update(0, frames.LARGEST_WINDOW - frames.DEFAULT_WINDOW)
        settings = {frames.INITIAL_WINDOW_SIZE: frames.LARGEST_WINDOW, frames.MAX_FRAME_SIZE: frames.LARGEST_FRAME}
        self._transport.write(frames.settings(settings) + window)

    def data_received(self, data: bytes) -> None:
        buffer = self._data
        buffer += data
        if self._skip:
            if len(buffer) < self._skip:
                return
            del buffer[: self._skip]
            self._skip = 0
        at = 0
        while len(buffer) - at >= frames.FRAME.size:
            high, low, kind, flags, stream = frames.FRAME.unpack_from(buffer, at)
            end = at + frames.FRAME.size + (high << 8 | low)
            if end > len(buffer):
                break
            self._frame(kind, flags, stream, bytes(buffer[at + frames.FRAME.size : end]))
            at = end
        del buffer[:at]

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == frames.HEADERS:
            at = payload.index(b":path") + len(b":path")
            self._paths[stream] = payload[at + 1 : at + 1 + payload[at]].decode()
        elif kind == frames.DATA:
            self._received += len(payload)
            if self._received > frames.LARGEST_WINDOW // 2:
                self._transport.write(frames.window_update(0, self._received))
                self._received = 0
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._transport.write(frames.frame(frames.SETTINGS, frames.ACK, 0))
        if kind in (frames.DATA, frames.HEADERS) and flags & frames.END_STREAM:
            answer = self._answers[self._paths.pop(stream).rpartition("/")[2]]
            self._transport.write(
                frames.frame(frames.HEADERS, frames.END_HEADERS, stream, _HEAD)
                + frames.frame(frames.DATA, 0, stream, answer)
                + frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream, _TRAILERS)
            )


_HEAD = b"\x88\0\x0ccontent-type\x10application/grpc"
"""HPACK: ":status: 200" of the static table, and a literal."""
_TRAILERS = b"\0\x0bgrpc-status\x010"


async def _serve_grpc(documents: dict[str, Any], ready: int) -> None:
    from shmserve.protocol.grpc.messages import filled, message_class
    from shmserve.tools.load.targets.grpc_connection import framed

    answers = {
        "ServerMetadata": filled(message_class("inference.ServerMetadataResponse"), documents["server"]),
        "ModelMetadata": filled(message_class("inference.ModelMetadataResponse"), documents["metadata"]),
        "ModelConfig": filled(message_class("inference.ModelConfigResponse"), {"config": documents["config"]}),
        "ModelStatistics": b"",
        "ModelInfer": filled(message_class("inference.ModelInferResponse"), {"modelName": "echo"}),
    }
    framed_answers = {method: framed(answer) for method, answer in answers.items()}
    server = await asyncio.get_running_loop().create_server(lambda: _GrpcEcho(framed_answers), "127.0.0.1", 0)
    _tell(ready, f"grpc://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    await _end_of_input()
    server.close()


async def _end_of_input() -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()
    loop.remove_reader(sys.stdin.fileno())


def _tell(ready: int, url: str) -> None:
    os.write(ready, f"{url}\n".encode())
    os.close(ready)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that closes standard input
    kind, folder, ready = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    documents = {"server": SERVER, "statistics": {"model_stats": []}, **json.loads(sys.stdin.readline())}
    if kind == HTTP:
        uvloop.run(_serve_http(documents, ready))
    elif kind == GRPC:
        uvloop.run(_serve_grpc(documents, ready))
    else:
        (_serve_unix if kind == UNIX else _serve_ipc)(folder, _Native(documents), ready)


if __name__ == "__main__":
    main()

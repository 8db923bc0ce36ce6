"""A floor for servers in Python with separate processes: HTTP or gRPC, a relay that forms batches, and the model.

It checks nothing: each process does only what a request cannot do without. The answer has KServe's form, so that the
load generator has the same work. Batches, like the replies of one turn, travel as one packet; large inputs lie in
memory that all processes map.

    python relay_app.py PORT [GRPC_PORT ANSWERS]

ANSWERS is a JSON file: path or method -> what the relay answers to other calls, in base64.
"""

import asyncio
import base64
import json
import mmap
import os
import socket
import struct
import sys
from collections import deque
from functools import partial
from pathlib import Path

import httptools
import numpy as np
import uvloop
from network import BATCH, SHAPES, WORKLOAD, make

PACKET = 1 << 18
ID = struct.Struct("<Q")
OUTPUT = {"identity": 16, "mlp": 64, "first": 1}[WORKLOAD]
TENSOR = 4 * int(os.environ.get("PEER_ELEMENTS", SHAPES[WORKLOAD][0]))
LARGE = TENSOR > 1 << 15
"""A request then has the number of its slot in place of its tensor."""
SLOTS = 64
INPUT = ID.size if LARGE else TENSOR
DIMS = [OUTPUT] if WORKLOAD == "first" else [1, OUTPUT]
JSON = '{"outputs":[{"name":"y","datatype":"FP32","shape":%s,"parameters":{"binary_data_size":%d}}]}'
HEAD = (JSON % (DIMS, 4 * OUTPUT)).encode()
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\n"
ANSWER += b"inference-header-content-length: %d\r\ncontent-length: %d\r\n\r\n" % (len(HEAD), len(HEAD) + 4 * OUTPUT)
ANSWER += HEAD
OTHER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


def pair():
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET)
    return ends


class Front:
    """Sends the requests that arrive in one turn of the loop as one packet."""

    def __init__(self, loop, relay, slots, answers):
        self.loop, self.relay, self.slots, self.answers = loop, relay, slots, answers
        self.requests, self.waiting, self.number = [], {}, 0
        self.free = list(range(SLOTS))
        loop.add_reader(relay, self.replies)

    def request(self, reply, message):
        """Calls `reply` with the output; the input is at the end of the message."""
        self.number += 1
        tensor, slot = message[-TENSOR:], None
        if LARGE:
            slot = self.free.pop()
            self.slots[slot * TENSOR : (slot + 1) * TENSOR] = tensor
            tensor = ID.pack(slot)
        self.waiting[self.number] = reply, slot
        if not self.requests:
            self.loop.call_soon(self.flush)
        self.requests += [ID.pack(self.number), tensor]

    def flush(self):
        self.relay.send(b"".join(self.requests))
        self.requests = []

    def replies(self):
        packet = self.relay.recv(PACKET)
        for at in range(0, len(packet), 8 + 4 * OUTPUT):
            (number,) = ID.unpack_from(packet, at)
            reply, slot = self.waiting.pop(number)
            if slot is not None:
                self.free.append(slot)
            reply(packet[at + 8 : at + 8 + 4 * OUTPUT])

    def other(self, path):
        if path.endswith("/stats"):
            count = {"success": {"count": self.number - len(self.waiting)}}
            return json.dumps({"model_stats": [{"inference_stats": count}]}).encode()
        return self.answers.get(path, b"")


class HttpConnection(asyncio.Protocol):
    def __init__(self, front):
        self.front = front
        self.parser = httptools.HttpRequestParser(self)
        self.body = []

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.parser.feed_data(data)

    def on_url(self, url):
        self.url = url

    def on_body(self, body):
        self.body.append(body)

    def on_message_complete(self):
        if self.body:
            body, self.body = self.body, []
            self.front.request(self.reply, body[0] if len(body) == 1 else b"".join(body))
        else:
            answer = self.front.other(self.url.decode())
            self.transport.write(OTHER % len(answer) + answer)

    def reply(self, output):
        if not self.transport.is_closing():
            self.transport.write(ANSWER + output)


def front(relay, slots, arguments):
    loop = uvloop.new_event_loop()
    answers = json.loads(Path(arguments[2]).read_bytes()) if len(arguments) > 1 else {}
    waiting = Front(loop, relay, slots, {path: base64.b64decode(text) for path, text in answers.items()})
    loop.run_until_complete(loop.create_server(partial(HttpConnection, waiting), "127.0.0.1", int(arguments[0])))
    if answers:
        from relay_grpc import GrpcConnection

        connect = partial(GrpcConnection, waiting, OUTPUT, DIMS)
        loop.run_until_complete(loop.create_server(connect, "127.0.0.1", int(arguments[1])))
    loop.run_forever()


class Relay:
    """Sends a batch of what has arrived as soon as the model is idle."""

    def __init__(self, front, model):
        self.front, self.model = front, model
        self.queue, self.busy = deque(), False

    def requests(self):
        packet = self.front.recv(PACKET)
        self.queue.extend(packet[at : at + 8 + INPUT] for at in range(0, len(packet), 8 + INPUT))
        if not self.busy:
            self.send()

    def send(self):
        batch = [self.queue.popleft() for _ in range(min(BATCH, len(self.queue)))]
        self.busy = bool(batch)
        if batch:
            self.model.send(b"".join(batch))

    def results(self):
        packet = self.model.recv(PACKET)
        self.send()
        self.front.send(packet)


def relay(front, model):
    loop = uvloop.new_event_loop()
    middle = Relay(front, model)
    loop.add_reader(front, middle.requests)
    loop.add_reader(model, middle.results)
    loop.run_forever()


def work(end, slots):
    run = make()
    tensors = np.frombuffer(slots, np.float32)
    while packet := end.recv(PACKET):
        rows = np.frombuffer(packet, np.uint8).reshape(-1, 8 + INPUT)
        if LARGE:
            (slot,) = rows[0, 8:].view(np.uint64) * (TENSOR // 4)
            inputs = tensors[None, slot : slot + TENSOR // 4]
        else:
            inputs = np.ascontiguousarray(rows[:, 8:]).view(np.float32)
        end.send(np.hstack([rows[:, :8], np.ascontiguousarray(run(inputs)).view(np.uint8)]).tobytes())


def child(body, *arguments):
    """Killed with this process by the benchmark."""
    if not os.fork():
        body(*arguments)
        os._exit(0)


if __name__ == "__main__":
    near, far = pair()
    model, engine = pair()
    memory = mmap.mmap(-1, SLOTS * TENSOR if LARGE else mmap.PAGESIZE)
    child(work, engine, memory)
    child(relay, far, model)
    front(near, memory, sys.argv[1:])

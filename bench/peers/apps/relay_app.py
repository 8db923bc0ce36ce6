"""A floor for servers in Python with separate processes: HTTP, a relay that forms batches, and the model.

It checks nothing: each process does only what a request cannot do without. The answer has KServe's form, so that the
load generator has the same work. Batches, like the replies of one turn, travel as one packet.
"""

import asyncio
import os
import socket
import struct
import sys
from collections import deque

import httptools
import numpy as np
import uvloop
from network import BATCH, SHAPES, WORKLOAD, make

PACKET = 1 << 18
ID = struct.Struct("<Q")
OUTPUT = {"identity": 16, "mlp": 64}[WORKLOAD]
INPUT = 4 * SHAPES[WORKLOAD][0]
JSON = b'{"outputs":[{"name":"y","datatype":"FP32","shape":[1,%d],"parameters":{"binary_data_size":%d}}]}'
HEAD = JSON % (OUTPUT, 4 * OUTPUT)
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\n"
ANSWER += b"inference-header-content-length: %d\r\ncontent-length: %d\r\n\r\n" % (len(HEAD), len(HEAD) + 4 * OUTPUT)
ANSWER += HEAD


def pair():
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET)
    return ends


class Connection(asyncio.Protocol):
    def __init__(self, front):
        self.front = front
        self.parser = httptools.HttpRequestParser(self)
        self.body = b""

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.parser.feed_data(data)

    def on_body(self, body):
        self.body += body

    def on_message_complete(self):
        self.front.request(self, self.body[-INPUT:])
        self.body = b""


class Front:
    """Sends the requests that arrive in one turn of the loop as one packet."""

    def __init__(self, loop, relay):
        self.loop, self.relay = loop, relay
        self.requests, self.waiting, self.number = [], {}, 0
        loop.add_reader(relay, self.replies)

    def request(self, connection, tensor):
        self.number += 1
        self.waiting[self.number] = connection
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
            self.waiting.pop(number).transport.write(ANSWER + packet[at + 8 : at + 8 + 4 * OUTPUT])


def front(relay, port):
    loop = uvloop.new_event_loop()
    waiting = Front(loop, relay)
    loop.run_until_complete(loop.create_server(lambda: Connection(waiting), "127.0.0.1", port))
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


def work(end):
    run = make()
    while packet := end.recv(PACKET):
        rows = np.frombuffer(packet, np.uint8).reshape(-1, 8 + INPUT)
        outputs = run(np.ascontiguousarray(rows[:, 8:]).view(np.float32))
        end.send(np.hstack([rows[:, :8], np.ascontiguousarray(outputs).view(np.uint8)]).tobytes())


def child(body, *arguments):
    """Killed with this process by the benchmark."""
    if not os.fork():
        body(*arguments)
        os._exit(0)


if __name__ == "__main__":
    near, far = pair()
    model, engine = pair()
    child(work, engine)
    child(relay, far, model)
    front(near, int(sys.argv[1]))

"""The gRPC front of the relay: frames of HTTP/2 without checks, and without a limit on what it sends."""

import asyncio
import struct
from functools import partial

from hpack import Decoder

from shmserve.gateway.http2.heads import ANSWER, TRAILERS_OK
from shmserve.http2.frames import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    LARGEST_FRAME,
    LARGEST_WINDOW,
    MAX_FRAME_SIZE,
    PING,
    PREFACE,
    SETTINGS,
    frame,
    settings,
    window_update,
)

ROOM = LARGEST_WINDOW - 65_535
BUFFER, LEAST = 32 << 20, 4 << 20
"""Bytes that a connection reads, and for how many there is always room."""
METHOD = "/inference.GRPCInferenceService/ModelInfer"


def field(number, data):
    """A field of a message that is shorter than 128 bytes, or of 256."""
    size = bytes([len(data)]) if len(data) < 128 else bytes([len(data) & 0x7F | 0x80, len(data) >> 7])
    return bytes([number << 3 | 2]) + size + data


class GrpcConnection(asyncio.BufferedProtocol):
    def __init__(self, front, output, dims):
        self.front = front
        self.buffer = memoryview(bytearray(BUFFER))
        self.begin, self.end = len(PREFACE), 0
        """What was read and not handled; begins after the preface."""
        self.decoder, self.paths = Decoder(), {}
        self.calls = {}
        self.read = 0
        tensor = field(1, b"y") + field(2, b"FP32") + field(3, bytes(dims))
        self.answer = field(1, b"m") + field(2, b"1") + field(5, tensor)

    def connection_made(self, transport):
        self.transport = transport
        limits = {INITIAL_WINDOW_SIZE: LARGEST_WINDOW, MAX_FRAME_SIZE: LARGEST_FRAME}
        transport.write(settings(limits) + window_update(0, ROOM))

    def get_buffer(self, hint):
        if len(self.buffer) - self.end < LEAST:
            rest = bytes(self.buffer[self.begin : self.end])
            self.buffer[: len(rest)] = rest
            self.begin, self.end = 0, len(rest)
        return self.buffer[self.end :]

    def buffer_updated(self, count):
        self.end += count
        buffer, at = self.buffer, self.begin
        while self.end - at >= 9:
            upper, lower, kind, flags, stream = FRAME.unpack_from(buffer, at)
            end = at + 9 + (upper << 8 | lower)
            if end > self.end:
                break
            self.received(kind, flags, stream, buffer[at + 9 : end])
            at = end
        self.begin = at
        if at == self.end:
            self.begin = self.end = 0

    def received(self, kind, flags, stream, payload):
        if kind == HEADERS:
            self.calls[stream] = self.path(bytes(payload)), []
        elif kind == DATA:
            self.read += len(payload)
            if self.read > ROOM // 2:
                self.transport.write(window_update(0, self.read))
                self.read = 0
            path, parts = self.calls[stream]
            if flags & END_STREAM:
                del self.calls[stream]
                self.complete(stream, path, b"".join([*parts, payload]) if parts else payload)
            else:
                parts.append(bytes(payload))
        elif kind in (SETTINGS, PING) and not flags & ACK:
            self.transport.write(frame(kind, ACK, 0, bytes(payload) if kind == PING else b""))

    def path(self, block):
        """A block of indices alone means the same again, as long as the table is the same."""
        path = self.paths.get(block)
        if path is None:
            path = dict(self.decoder.decode(block))[":path"]
            if all(byte & 0x80 for byte in block):
                self.paths[block] = path
            else:
                self.paths.clear()
        return path

    def complete(self, stream, path, message):
        if path == METHOD:
            self.front.request(partial(self.reply, stream), message)
        else:
            self.send(stream, self.front.other(path))

    def reply(self, stream, output):
        if not self.transport.is_closing():
            self.send(stream, self.answer + field(6, output))

    def send(self, stream, message):
        body = b"\0" + struct.pack(">I", len(message)) + message
        end = frame(HEADERS, END_HEADERS | END_STREAM, stream, TRAILERS_OK)
        self.transport.write(frame(HEADERS, END_HEADERS, stream, ANSWER) + frame(DATA, 0, stream, body) + end)

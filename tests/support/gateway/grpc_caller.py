"""A caller with Google's library, in a process of its own, as that library never lets go of its threads. The rule of
the file: a line of JSON says what to do, and a line of JSON says what came of it; judging is for the test.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc

OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
]
WAIT_S = 60.0


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def failed(call: Any) -> list[Any]:
    try:
        call()
    except grpc.RpcError as error:
        return [error.code().name, error.details()]
    return ["OK", ""]


def unary(channel: Any, size: int, times: int, compression: str = "NoCompression") -> Any:
    ask = channel.unary_unary("/test/Unary", None, None)
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    found = {digest(ask(data, compression=grpc.Compression[compression], timeout=WAIT_S)) for _ in range(times)}
    return [sorted(found), digest(data)]


def unary_over(channel: Any, size: int) -> Any:
    ask = channel.unary_unary("/test/Unary", None, None)
    return failed(lambda: ask(bytes(size), timeout=WAIT_S))


def until(channel: Any, size: int, times: int) -> Any:
    """Call after call, each with time for the other side to look at its clock."""
    ask, data = channel.unary_unary("/test/Unary", None, None), b"u" * size
    wait = channel.unary_unary("/test/Wait", None, None)
    found = set()
    for number in range(times):
        found.add(digest(ask(data, timeout=WAIT_S)))
        if number % 20 == 0:
            failed(lambda: wait(b"", timeout=0.05))
    return [sorted(found), digest(data)]


def at_once(channel: Any, calls: int) -> Any:
    ask = channel.unary_unary("/test/Unary", None, None)
    sent = [str(number).encode() * 50 for number in range(calls)]
    futures = [ask.future(data, timeout=WAIT_S) for data in sent]
    return sum(future.result() == data for future, data in zip(futures, sent, strict=True))


def stream(channel: Any, sizes: list[int]) -> Any:
    ask = channel.stream_stream("/test/Stream", None, None)
    answers: Any
    turn = threading.Semaphore(1)

    def sent() -> Iterator[bytes]:
        for size in sizes:
            turn.acquire()
            yield b"s" * size

    found = []
    answers = ask(sent(), timeout=WAIT_S)
    for answer in answers:
        found.append(len(answer))
        turn.release()
    return [found, answers.code().name]


def many(channel: Any, count: int, size: int) -> Any:
    """Read one by one, so that the window is closed most of the time."""
    ask = channel.unary_stream("/test/Many", None, None)
    total, wrong = 0, 0
    for number, answer in enumerate(ask(f"{count} {size}".encode(), timeout=WAIT_S)):
        total += 1
        wrong += answer != random.Random(number).randbytes(size)
    return [total, wrong]


def deadline(channel: Any, seconds: float) -> Any:
    ask = channel.unary_unary("/test/Wait", None, None)
    return failed(lambda: ask(b"", timeout=seconds))


def cancel(channel: Any) -> Any:
    ask = channel.stream_stream("/test/Stream", None, None)
    more = threading.Event()

    def sent() -> Iterator[bytes]:
        yield b"first"
        more.wait(WAIT_S)

    answers = ask(sent())
    first = next(answers)
    answers.cancel()
    more.set()
    return [first.decode(), failed(lambda: next(answers))[0]]


def error(channel: Any, code: int, text: str) -> Any:
    ask = channel.unary_unary("/test/Fail", None, None)
    return failed(lambda: ask(json.dumps([code, text]).encode(), timeout=WAIT_S))


def path(channel: Any, name: str) -> Any:
    ask = channel.unary_unary(name, None, None)
    return failed(lambda: ask(b"", timeout=WAIT_S))


def metadata(channel: Any, pairs: list[list[str]]) -> Any:
    ask = channel.unary_unary("/test/Metadata", None, None)
    return json.loads(ask(b"", metadata=[(name, text) for name, text in pairs], timeout=WAIT_S))


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        target, root = f"127.0.0.1:{asked.pop('port')}", asked.pop("root", None)
        if root is None:
            channel = grpc.insecure_channel(target, OPTIONS)
        else:
            channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(root.encode()), OPTIONS)
        with channel:
            found = globals()[asked.pop("do")](channel, **asked)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

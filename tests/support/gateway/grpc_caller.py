"""Calls with grpcio in a separate process, because grpcio keeps its threads.

Each line of JSON names a function and its arguments; its result is printed as a line of JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
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


def unary(channel: Any, size: int, times: int, compression: str = "NoCompression") -> Any:
    """Returns the digests of the responses, and that of the request."""
    call = channel.unary_unary("/test/Unary", None, None)
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    answers = {digest(call(data, compression=grpc.Compression[compression], timeout=WAIT_S)) for _ in range(times)}
    return [sorted(answers), digest(data)]


def with_pauses(channel: Any, size: int, times: int) -> Any:
    """Like `unary`, with pauses in which the listener can look at its clock."""
    call, data = channel.unary_unary("/test/Unary", None, None), b"u" * size
    wait = channel.unary_unary("/test/Wait", None, None)
    answers = set()
    for number in range(times):
        answers.add(digest(call(data, timeout=WAIT_S)))
        if number % 20 == 0:
            with contextlib.suppress(grpc.RpcError):
                wait(b"", timeout=0.05)
    return [sorted(answers), digest(data)]


def at_once(channel: Any, calls: int) -> Any:
    """Returns the number of correct responses."""
    call = channel.unary_unary("/test/Unary", None, None)
    sent = [str(number).encode() * 50 for number in range(calls)]
    futures = [call.future(data, timeout=WAIT_S) for data in sent]
    return sum(future.result() == data for future, data in zip(futures, sent, strict=True))


def main() -> None:
    for line in sys.stdin:
        arguments = json.loads(line)
        with grpc.insecure_channel(f"127.0.0.1:{arguments.pop('port')}", OPTIONS) as channel:
            result = globals()[arguments.pop("do")](channel, **arguments)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

"""gRPC calls over TLS in a separate process, because grpcio never ends its threads.

It reads the calls as JSON from standard input, and prints the results as JSON; the test checks them.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

import grpc


def call(channel: Any, method: str, request: str, metadata: dict[str, str]) -> list[str]:
    ask = channel.unary_unary(f"/inference.GRPCInferenceService/{method}", None, None)
    try:
        answer = ask(base64.b64decode(request), timeout=20, metadata=list(metadata.items()))
    except grpc.RpcError as error:
        return [error.code().name, error.details(), ""]
    return ["OK", "", base64.b64encode(answer).decode()]


def main() -> None:
    told = json.load(sys.stdin)
    root, chain, key = (text.encode() if text else None for text in (told["root"], told["chain"], told["key"]))
    credentials = grpc.ssl_channel_credentials(root, key, chain)
    with grpc.secure_channel(f"localhost:{told['port']}", credentials) as channel:
        print(json.dumps([call(channel, *one) for one in told["calls"]]))


if __name__ == "__main__":
    main()

"""`python -m tests.tritonclient.calls HTTP GRPC`: runs every case against a server, and prints a line of JSON for each.

It runs in the environment that has `tritonclient`. A case that fails does not prevent the others from running.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import traceback
from collections.abc import Iterator

from tests.tritonclient import client_cases, object_cases
from tests.tritonclient.faces import Face

CASE_S = 40


def cases(kind: str) -> Iterator[tuple[str, object_cases.Case]]:
    """The cases of a face by name. Each public method of its client needs one; several methods may share it."""
    client = importlib.import_module(f"tritonclient.{kind}").InferenceServerClient
    methods = [name for name in dir(client) if not name.startswith("_") and callable(getattr(client, name))]
    functions = [getattr(client_cases, name) for name in methods]  # AttributeError: a method without a case
    for function in dict.fromkeys([*functions, *object_cases.CASES.get(kind, ())]):
        yield function.__name__, function


async def main(http: str, grpc: str, kind: str) -> int:
    for name, function in cases(kind):
        failed = await attempt(Face(kind, http, grpc), function)
        print(json.dumps({"case": name, "failed": failed}), flush=True)
    return 0


async def attempt(face: Face, function: object_cases.Case) -> str:
    try:
        async with face.open():
            await asyncio.wait_for(function(face), CASE_S)
    except Exception:
        return traceback.format_exc(limit=-4)
    return ""


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))

"""`python -m tests.tritonclient.calls HTTP GRPC`: runs every case against a server, and prints a line of JSON for each.

It runs in the environment that has `tritonclient`. A case that fails does not prevent the others from running.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Iterator

from tests.tritonclient import client_cases as client_cases
from tests.tritonclient import object_cases as object_cases
from tests.tritonclient.faces import Face, found_methods
from tests.tritonclient.methods import CLIENTS, METHODS

CASE_S = 40


def cases() -> Iterator[tuple[str, str, object_cases.Case]]:
    """Name, face and function of each case, grouped by face."""
    for face, methods in CLIENTS.items():
        for method in methods:
            yield f"{face}.{method}", face, getattr(client_cases, method)
        for name, function in object_cases.CASES.items():
            if (name.partition(".")[0] if not name.startswith("utils.") else "http") == face:
                yield name, face, function


def report(name: str, failed: str = "") -> None:
    print(json.dumps({"case": name, "failed": failed}), flush=True)


async def main(http: str, grpc: str) -> int:
    report("inspection", str(sorted(found_methods() ^ set(METHODS)) or ""))
    results: dict[tuple[str, object_cases.Case], str] = {}
    for name, kind, function in cases():
        if (kind, function) not in results:  # several methods may have one case
            results[kind, function] = await attempt(Face(kind, http, grpc), function)
        report(name, results[kind, function])
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

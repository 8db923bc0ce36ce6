"""`python -m tests.tritonclient.calls HTTP GRPC`: every case against a server, one line of JSON for each. It runs in
the environment that has `tritonclient`. The rule of the file: a case that fails does not keep the others from running.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Iterator

from tests.tritonclient import of_clients, of_things
from tests.tritonclient.faces import Face, found_methods
from tests.tritonclient.methods import CLIENTS, METHODS

CASE_S = 40


def cases() -> Iterator[tuple[str, str, of_things.Case]]:
    """Name, face, and what to do; those of one face follow each other."""
    for face, methods in CLIENTS.items():
        for method in methods:
            yield f"{face}.{method}", face, getattr(of_clients, method)
        for name, function in of_things.CASES.items():
            if (name.partition(".")[0] if not name.startswith("utils.") else "http") == face:
                yield name, face, function


def tell(name: str, failed: str = "") -> None:
    print(json.dumps({"case": name, "failed": failed}), flush=True)


async def main(http: str, grpc: str) -> int:
    tell("inspection", str(sorted(found_methods() ^ set(METHODS)) or ""))
    results: dict[tuple[str, of_things.Case], str] = {}
    for name, kind, function in cases():
        if (kind, function) not in results:  # several methods may have one case
            results[kind, function] = await attempt(Face(kind, http, grpc), function)
        tell(name, results[kind, function])
    return 0


async def attempt(face: Face, function: of_things.Case) -> str:
    try:
        async with face.open():
            await asyncio.wait_for(function(face), CASE_S)
    except Exception:
        return traceback.format_exc(limit=-4)
    return ""


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))

"""The script that starts a worker in a model's own interpreter.

`python -I bootstrap.py COUNT ours... MODULE:FUNCTION ARGUMENTS` locates the server's packages, checks that this
interpreter can run them, and calls the function with the arguments. It uses only the standard library, and no syntax
that an old interpreter cannot parse. Errors reach the broker as a LoadFailed packet encoded by hand, because the
package that encodes messages may be missing.
"""

from __future__ import annotations

import importlib
import socket
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from importlib.util import find_spec
from typing import Any, NoReturn

MIN_PYTHON = (3, 10)
LOAD_FAILED = 66
TAG = 97
LINK = "--link"
"""The option with the descriptor of the link to the broker. Only a worker has it."""


class PackageFinder:
    """Finds the given top-level packages, and nothing else, each in its directory."""

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        place = self._places.get(name)
        return None if place is None or path is not None else PathFinder.find_spec(name, [place])


def main(words: list[str]) -> NoReturn:
    count = int(words[0])
    sources, suffix = words[1:3]
    needed = [word.split("=", 2) for word in words[3 : count + 1]]
    arguments = words[count + 1 :]
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < MIN_PYTHON:
        fail(arguments, f"it has Python {version}, and 3.10 or later is needed")
    sys.meta_path.insert(0, PackageFinder({"shmserve": sources}))
    if EXTENSION_SUFFIXES[0] == suffix:  # packages compiled for the server's interpreter also work in this one
        sys.meta_path.append(PackageFinder({name: place for name, _, place in needed}))
    wrong = list(filter(None, (lack(name, minimum) for name, minimum, _ in needed)))
    if wrong:
        fail(arguments, f"it has Python {version} and lacks {', '.join(wrong)}: install that in it")
    module, _, function = arguments[0].partition(":")
    getattr(importlib.import_module(module), function)(arguments[1:])
    sys.exit(0)


def lack(name: str, minimum: str) -> str:
    """Returns the requirement that is not met, or "". Imports nothing, because CPUs and threads are set before
    imports."""
    from importlib.metadata import PackageNotFoundError, version

    if find_spec(name) is None:
        return f"{name}>={minimum}"
    try:
        installed = version(name)
    except PackageNotFoundError:  # the server's own package, or one copied in by hand
        return ""
    return "" if numbers(installed) >= numbers(minimum) else f"{name}>={minimum} (it has {installed})"


def numbers(text: str) -> list[int]:
    """Parses the leading numeric parts of a version: "2.1rc1" is [2]."""
    leading = []
    for part in text.split("."):
        if not part.isdigit():
            break
        leading.append(int(part))
    return leading


def fail(arguments: list[str], text: str) -> NoReturn:
    """Reports the error to the broker and to stderr, and exits."""
    text = f"EXECUTION_ENV_PATH: {text}"
    if LINK not in arguments:
        sys.stderr.write(f"shmserve run: {text}\n")
        sys.exit(1)
    sys.stderr.write(f"error: {text}\n")
    with socket.socket(fileno=int(arguments[arguments.index(LINK) + 1])) as link:
        link.recv(1)  # the Load order: closing a socket with unread data discards what was sent on it
        link.send(b"\x91\x93" + bytes([TAG]) + packed("UNAVAILABLE") + packed(text))
    sys.exit(LOAD_FAILED)


def packed(text: str) -> bytes:
    """Encodes a str 16 of MessagePack."""
    data = text.encode()[:4000]
    return b"\xda" + len(data).to_bytes(2, "big") + data


if __name__ == "__main__":
    main(sys.argv[1:])

"""The process that mirrors a remote repository, controlled by a test."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from shmserve.repo.remote.address import parse_address
from shmserve.repo.remote.cache import CacheSlot, RemoteCache
from shmserve.repo.remote.main import MirrorSettings
from shmserve.repo.remote.mirror import MirrorOutcome
from tests.support.patience import PATIENCE_S

PIECE = 1000
ROOM = 1 << 20


def data_of(size: int) -> bytes:
    return os.urandom(size)


class Mirrored:
    """The process that mirrors a repository, in a cache in this directory, with short pauses between attempts."""

    def __init__(self, url: str, place: Path, limit: int) -> None:
        address = parse_address(url)
        self.key = address.key
        self.slot = CacheSlot.acquire(place, [self.key])
        self.cache = RemoteCache(self.slot.folder, limit)
        self.ours, theirs = socket.socketpair()
        self.lines = self.ours.makefile("rb")
        command = [sys.executable, "-m", "shmserve.repo.remote.main", str(theirs.fileno())]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()
        settings = MirrorSettings(str(self.slot.folder), limit, [str(address)], piece_bytes=PIECE, pause_s=0.001)
        self.ours.settimeout(PATIENCE_S)
        self.ours.sendall(msgspec.json.encode(settings) + b"\n")

    def ask(self, request: dict[str, Any], last: str) -> dict[str, Any]:
        """Returns the event that answers the request: the last one of that kind before `done`."""
        self.ours.sendall(json.dumps(request | {"id": 1}).encode() + b"\n")
        found: dict[str, Any] = {}
        for line in self.lines:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == last:
                found = event
            if event["event"] == "done" or event["event"] == last != "outcome":
                return found
        raise AssertionError("the process has ended")

    def sync(self, model: str = "m") -> MirrorOutcome:
        event = self.ask({"do": "fetch", "model": model}, "outcome")
        return MirrorOutcome(*(event[name] for name in MirrorOutcome._fields))

    def folder(self, model: str = "m") -> Path:
        return self.slot.view(self.key) / model

    def files(self, model: str = "m") -> dict[str, bytes]:
        folder = self.folder(model)
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def blobs(self) -> set[str]:
        return {path.name for path in self.cache.blob("").iterdir()}

    def close(self) -> None:
        self.lines.close()
        self.ours.close()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.slot.close()


@contextmanager
def mirrored(url: str, place: Path, limit: int = ROOM) -> Iterator[Mirrored]:
    found = Mirrored(url, place, limit)
    try:
        yield found
    finally:
        found.close()

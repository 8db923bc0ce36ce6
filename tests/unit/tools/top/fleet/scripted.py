"""A fake server for tests of live views: it answers when the test releases it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from shmserve.errors import ConnectionLost

Document = dict[str, Any]


class ScriptedSource:
    """`answer(number)` makes the document of a read, or raises. With `held`, reads wait for `release` or `close`."""

    operations: tuple[str, ...] = ()

    def __init__(self, where: str, answer: Callable[[int], Document], held: bool = False) -> None:
        self.where = where
        self.answer = answer
        self.reads = 0
        self.closed = False
        self.reading = threading.Event()
        self.gate = threading.Event()
        if not held:
            self.gate.set()

    def read(self) -> Document:
        self.reading.set()
        self.gate.wait()
        if self.closed:
            raise ConnectionLost("closed")
        self.reads += 1
        return self.answer(self.reads)

    def operate(self, what: str, model: str, version: int | None, instance: str) -> list[str]:
        raise AssertionError("not from a view of several servers")

    def log(self, model: str) -> list[Document]:
        raise AssertionError("not from a view of several servers")

    def history(self, model: str, version: int | None) -> dict[str, list[float | None]]:
        return {}

    def recent(self) -> list[Document]:
        return []

    def steps(self, model: str, version: int | None) -> list[Document]:
        return []

    def release(self) -> None:
        self.gate.set()

    def close(self) -> None:
        self.closed = True
        self.gate.set()

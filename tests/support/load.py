"""Threads that send requests to a model "twice" until a block ends. Responses are checked and counted."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar

L = TypeVar("L", bound="Load")

Send = Callable[..., tuple[float, int]]
"""Sends a value to a model. Returns the first value of the response, and the server that sent it."""


class Failed(Exception):
    """A request failed; the text is that of the error."""


class Load:
    """`works`: name of a thread -> its function. Nothing is sent again."""

    def __init__(self, works: Mapping[str, Callable[[], None]], patience_s: float, pause_s: float = 0.0) -> None:
        self.served: Counter[tuple[str, int]] = Counter()
        """Way and server -> number of responses of the model "twice"."""
        self.failed: list[str] = []
        self._patience_s = patience_s
        self._pause_s = pause_s
        self._news = threading.Condition()
        self._over = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=name) for name, work in works.items()
        ]

    def __enter__(self: L) -> L:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        if error is None and self._errors:
            raise self._errors[0]

    @property
    def total(self) -> int:
        return sum(self.served.values())

    def until(self, holds: Callable[[], object]) -> None:
        """Waits for responses until `holds` returns something true."""
        with self._news:
            reached = self._news.wait_for(lambda: holds() or self._errors, self._patience_s)
            assert reached, self.summary()

    def until_more(self, count: int) -> None:
        wanted = self.total + count
        self.until(lambda: self.total >= wanted)

    def summary(self) -> tuple[Any, ...]:
        return self.served, self.failed[:5]

    def send_all(self, way: str, send: Send) -> None:
        """Sends requests until the block ends."""
        for value in itertools.cycle(map(float, range(1, 100))):
            if self._over.is_set():
                return
            try:
                first, server = send("twice", value)
            except Failed as error:
                with self._news:
                    self.failed.append(str(error))
                    self._news.notify_all()
                continue
            self.check(way, value, first)
            with self._news:
                self.served[way, server] += 1
                self.count(value, first, server)
                self._news.notify_all()
            if self._pause_s:
                self._over.wait(self._pause_s)

    def check(self, way: str, value: float, first: float) -> None:
        assert first == 2 * value, f"{way}: {value} became {first}"

    def count(self, value: float, first: float, server: int) -> None:
        """A hook for subclasses that record more about a response."""

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._errors.append(error)
            with self._news:
                self._news.notify_all()

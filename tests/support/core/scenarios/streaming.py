"""Commands of scenario files for streamed requests."""

from __future__ import annotations

from typing import Any

from shmserve.protocol.messages import More
from shmserve.protocol.worker_messages import Unread
from tests.support.core.scenarios.transcript import Transcript

Event = tuple[int, Any]


class Streaming(Transcript):
    def do_part(
        self, name: str, label: str, *flags: str, count: str = "1", error: str = "", **says: str
    ) -> list[Event]:
        """part m_0 a1 count=3: the worker sends this many responses; `last`, and `empty`: only the end; y=none and so
        on as for `done`."""
        worker = self.worker(name)
        if worker.peer not in self.slow_to:
            worker.read()
        code, _, text = error.partition(":")
        worker.says = says
        request = next(number for number in worker.streams if self._label(number) == label)
        for index in range(int(count)):
            final = "last" in flags and index == int(count) - 1
            worker.part(request, final, "empty" in flags, (code, text) if error else None)
        return [] if worker.peer in self.slow_from else self.heard(worker)

    def do_unread(self, name: str, label: str) -> list[Event]:
        """The model waits until the caller accepts more responses: those that are queued take too much memory."""
        worker = self.worker(name)
        assert worker.running is not None
        return [
            (worker.peer, Unread(next(w.request for w in worker.running.work_items if self._label(w.request) == label)))
        ]

    def do_more(self, client: str, number: str, count: str) -> list[Event]:
        """The client allows this many more responses."""
        who = self.named[client]
        if int(number) in who.windows:
            who.windows[int(number)] += int(count)
        return [(who.peer, More(int(number), int(count)))]

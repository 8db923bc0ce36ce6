"""What a backend wants of the server: calls of other models, questions about models, and metrics.

Invariant: a call that was accepted is answered and given back once, whatever becomes of it.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from shmserve.errors import Cancelled, ServeError, Unavailable
from shmserve.shm.counters import COUNTER, GAUGE, HISTOGRAM, Subject
from shmserve.workers.backends.native.records import FINAL, WordReader, reply_words
from shmserve.workers.model_calls import queries
from shmserve.workers.model_calls.answer import triton_number
from shmserve.workers.model_calls.coroutines import Coroutines
from shmserve.workers.model_calls.pending import CallResponse, Pending
from shmserve.workers.process.log import log_message

if TYPE_CHECKING:
    from shmserve.protocol.worker_messages import Work
    from shmserve.workers.model_calls.calls import OutgoingCalls

_KINDS = (COUNTER, GAUGE, HISTOGRAM)


class Question(IntEnum):
    """What a backend can ask (`calls.c`)."""

    READY = 0
    DECOUPLED = 1
    LOAD = 2
    UNLOAD = 3
    UNLOAD_ALL = 4


class ServerCalls:
    """`work_items` returns the requests that the backend is running: its calls are made for them."""

    def __init__(
        self, host: ctypes.CDLL, calls: OutgoingCalls | None, work_items: Callable[[], Sequence[Work]]
    ) -> None:
        self._host = host
        self._calls = calls
        self._work_items = work_items
        self._coroutines: Coroutines | None = None
        self._starting = threading.Lock()
        """Held while `_coroutines` is made, which the first call does."""
        self._pending: dict[int, Pending] = {}
        """By address: the calls that have not ended."""
        self._numbers: dict[Subject, Any] = {}
        """The memory of the metrics."""

    @property
    def callbacks(self) -> dict[str, Callable[..., object]]:
        return {"metric": self._metric, "infer": self._infer, "cancel": self._cancel, "ask": self._ask}

    def close(self) -> None:
        if self._coroutines is not None:
            self._coroutines.close()

    # ------------------------------------------------------------------------------------ calls, in any thread

    def _infer(self, call: int, words: int, count: int) -> int:
        try:
            calls, work_items = self._server(), self._work_items()
            outgoing = WordReader(words, count).call()
            with self._starting:
                self._coroutines = self._coroutines or Coroutines()
            pending = calls.call(
                outgoing.model,
                outgoing.version,
                outgoing.inputs,
                outgoing.outputs,
                outgoing.options,
                bool(work_items),
                work_items,
            )
        except ServeError as error:
            return self._refuse(error)
        except RuntimeError as error:  # at the limit of threads
            return self._refuse(Unavailable(str(error)))
        self._pending[call] = pending
        self._coroutines.submit(self._deliver(calls, call, pending))
        return 0

    async def _deliver(self, calls: OutgoingCalls, call: int, pending: Pending) -> None:
        """Delivers the responses to a call as they arrive, then gives the request back."""
        response: CallResponse | None
        last = False
        while not last:
            try:
                await calls.wait_soon(pending, lambda: pending.ready, False)
                response = calls.take(pending)
                last = response is None or (pending.over and not pending.answers)
            except ServeError as error:
                response, last = CallResponse(code=error.code, text=str(error)), True
            except RuntimeError as error:  # at the limit of threads
                response, last = CallResponse(code=Unavailable.code, text=str(error)), True
            except asyncio.CancelledError:
                response, last = CallResponse(code=Cancelled.code, text="the model is being unloaded"), True
            kept: list[Any] = []
            words = None if response is None else reply_words(response, kept)
            self._host.host_reply(call, None if words is None else words.buffer_info()[0], FINAL if last else 0)
        del self._pending[call]
        self._host.host_end_call(call)

    def _cancel(self, call: int) -> None:
        pending = self._pending.get(call)
        if pending is not None:
            self._server().cancel(pending)

    def _ask(self, question: int, name: bytes, version: int, count: int, words: int, word_count: int) -> int:
        try:
            calls, model = self._server(), name.decode(errors="backslashreplace")
            if question == Question.READY:
                return queries.is_ready(calls, model, max(version, 0))
            if question == Question.DECOUPLED:
                return queries.is_decoupled(calls, model, max(version, 0))
            if question == Question.LOAD:
                reader = WordReader(words, word_count)
                parameters = dict([reader.parameter() for _ in range(count)])
                files = {key: str(value).encode() for key, value in parameters.items() if key.startswith("file:")}
                queries.load(calls, model, str(parameters.get("config", "")), files)
            else:
                queries.unload(calls, model, question == Question.UNLOAD_ALL)
        except ServeError as error:
            return self._refuse(error)
        return 0

    def _server(self) -> OutgoingCalls:
        if self._calls is None:
            raise Unavailable("there is no server that the backend could call")
        return self._calls

    def _refuse(self, error: ServeError) -> int:
        self._host.host_refuse(triton_number(error.code), str(error).encode())
        return -1

    # ------------------------------------------------------------------------------------ metrics, in any thread

    def _metric(self, kind: int, name: bytes, text: bytes, count: int, labels: Any, edge_count: int, edges: Any) -> int:
        """Returns the address of a metric's numbers. Those with the same name and labels have the same."""
        try:
            texts = [label.decode() for label in labels[: 2 * count]]
            pairs = tuple(sorted(zip(texts[::2], texts[1::2], strict=True)))
            subject = Subject(name.decode(), text.decode(), _KINDS[kind], pairs, tuple(edges[:edge_count]))
            subject.check()
            numbers = self._numbers.get(subject)
            if numbers is None:
                numbers = self._numbers[subject] = self._server().count(subject)
                numbers[0] = 1.0
        except (ValueError, ServeError) as error:
            log_message(f"a metric of the backend is not exported: {error}", "warning")
            return 0
        return ctypes.addressof(ctypes.c_double.from_buffer(numbers))

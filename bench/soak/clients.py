"""The public clients of the soak, `Client` and `AsyncClient`.

Invariant: every request is counted, with one of four outcomes: correct, cancelled on request, timed out because it had
a timeout, or one of the three kinds of faults.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import CancelledError
from time import perf_counter
from typing import Any

from bench.lib.child import Answer, Handler
from bench.lib.random_tensors import DTYPES, Maker, same
from bench.soak.run import batch_of
from shmserve import errors

FLIGHT = 16
HELD = 40
PATIENCE = 30.0
"""Seconds after which a request counts as lost."""

Allowed = dict[str, str]


def permitted(allowed: Allowed, code: str, text: str) -> bool:
    return code in allowed and re.search(allowed[code], text, re.DOTALL) is not None


class Tally:
    """Counts, and responses that are held for a while and compared again when dropped.

    `allowed`: error code -> pattern of texts (after the model's name) that are not faults, for runs with injected
    faults. Each request is counted once in `counts`, or in `lost`.
    """

    def __init__(self, allowed: Allowed | None = None) -> None:
        self._allowed = allowed or {}
        self.sent = self.lost = self.wrong = 0
        self.counts: Counter[str] = Counter()
        self.examples: list[str] = []
        self._held: deque[tuple[str, Any, Any]] = deque()

    def fault(self, text: str) -> None:
        self.wrong += 1
        if len(self.examples) < 5:
            self.examples.append(text)

    def right(self, name: str, got: Any, expected: Any) -> None:
        self.counts["right"] += 1
        if not same(got, expected):
            self.fault(f"{name}: sent {expected.dtype} {expected.shape}, got other bytes or {got.dtype} {got.shape}")
            return
        self._held.append((name, got, expected))
        if len(self._held) > HELD:
            self.drop()

    def drop(self) -> None:
        name, got, expected = self._held.popleft()
        if not same(got, expected):
            self.fault(f"{name}: an answer changed while it was held")

    def failed(self, call: SoakCall, error: BaseException) -> None:
        if isinstance(error, (errors.Cancelled, CancelledError, asyncio.CancelledError)) and call.cancelled:
            self.counts["cancelled"] += 1
        elif isinstance(error, (errors.DeadlineExceeded, errors.QueueTimeout)) and call.timeout is not None:
            self.counts["timed out"] += 1
        elif permitted(self._allowed, getattr(error, "code", ""), f"{call.model}: {error}"):
            self.counts[getattr(error, "code", "")] += 1
        else:
            self.counts["faulty"] += 1
            self.fault(f"{call.model}: {type(error).__name__}: {error}")

    def answer(self) -> Answer:
        while self._held:
            self.drop()
        return {
            "sent": self.sent,
            "lost": self.lost,
            "wrong": self.wrong,
            "counts": dict(self.counts),
            "examples": self.examples,
        }


class SoakCall:
    """One planned request."""

    __slots__ = ("cancelled", "expected", "future", "model", "timeout", "x")

    def __init__(self, model: str, x: Any, expected: Any, timeout: float | None) -> None:
        self.model = model
        self.x = x
        self.expected = expected
        self.timeout = timeout
        self.cancelled = False
        self.future: Any = None


class SoakCaller:
    """Generates requests."""

    def __init__(self, seed: int, largest: int, empty: Any, dtypes: Sequence[str]) -> None:
        self.random = random.Random(seed)
        self._dtypes = dtypes
        self._maker = Maker(seed)
        self._largest = largest
        self._empty = empty

    def next(self) -> SoakCall:
        roll = self.random
        dtype = roll.choice(self._dtypes)
        model = f"identity_{dtype}"
        if roll.random() < 0.2:
            dtype, model = "FP32", "slow"
        largest = min(self._largest, 20_000) if dtype == "BYTES" else self._largest
        shape = self._maker.shape(dtype, self._maker.size(largest), batch_of(model))
        expected = self._maker.tensor(dtype, shape)
        x = expected
        if dtype != "BYTES" and roll.random() < 0.3:
            x = self._empty(shape, expected.dtype)
            x[...] = expected
        timeout = roll.choice([0.0005, 0.002, 0.01, 0.05]) if roll.random() < 0.08 else None
        return SoakCall(model, x, expected, timeout)


def waiting(
    url: str,
    seed: int,
    largest: int,
    dtypes: Sequence[str] = DTYPES,
    allowed: Allowed | None = None,
    reconnect_timeout: float = 10.0,
) -> Handler:
    from shmserve import Client

    client = Client(url, reconnect_timeout=reconnect_timeout)
    caller = SoakCaller(seed, largest, client.empty, dtypes)

    def collect(tally: Tally, call: SoakCall) -> None:
        try:
            result = call.future.result(PATIENCE)
        except (errors.ServeError, CancelledError) as error:
            tally.failed(call, error)
        except TimeoutError:
            tally.lost += 1
        else:
            tally.right(call.model, result["y"], call.expected)

    def handle(seconds: float) -> Answer:
        tally = Tally(allowed)
        out: deque[SoakCall] = deque()
        roll, end = caller.random, perf_counter() + seconds
        while perf_counter() < end:
            while len(out) < FLIGHT:
                call = caller.next()
                tally.sent += 1
                try:
                    call.future = client.submit(call.model, {"x": call.x}, timeout=call.timeout)
                except errors.ServeError as error:
                    tally.failed(call, error)
                else:
                    out.append(call)
            if roll.random() < 0.1:
                chosen = roll.choice(out)
                chosen.cancelled = True
                chosen.future.cancel()
            if roll.random() < 0.2:
                out.rotate(1)
            collect(tally, out.popleft())
        while out:
            collect(tally, out.popleft())
        value = tally.answer()
        client.close()
        return value

    return handle


def awaiting(
    url: str,
    seed: int,
    largest: int,
    dtypes: Sequence[str] = DTYPES,
    allowed: Allowed | None = None,
    reconnect_timeout: float = 10.0,
) -> Handler:
    async def ask(client: Any, tally: Tally, call: SoakCall, roll: random.Random) -> None:
        task = asyncio.ensure_future(client.infer(call.model, {"x": call.x}, timeout=call.timeout))
        if roll.random() < 0.1:
            call.cancelled = True
            asyncio.get_running_loop().call_later(roll.random() * 0.01, task.cancel)
        done, _ = await asyncio.wait([task], timeout=PATIENCE)
        if not done:
            tally.lost += 1
            task.cancel()
            return
        try:
            result = task.result()
        except (errors.ServeError, asyncio.CancelledError) as error:
            tally.failed(call, error)
        else:
            tally.right(call.model, result["y"], call.expected)

    async def talk(seconds: float) -> Answer:
        from shmserve import AsyncClient

        tally = Tally(allowed)
        async with AsyncClient(url, reconnect_timeout=reconnect_timeout) as client:
            caller = SoakCaller(seed, largest, client.empty, dtypes)
            end = perf_counter() + seconds

            async def one_after_another() -> None:
                while perf_counter() < end:
                    tally.sent += 1
                    await ask(client, tally, caller.next(), caller.random)

            await asyncio.gather(*(one_after_another() for _ in range(FLIGHT)))
            return tally.answer()

    return lambda seconds: asyncio.run(talk(seconds))

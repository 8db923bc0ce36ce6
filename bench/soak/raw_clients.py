"""The clients of the soak that use the raw protocol, so that they can detect duplicate responses.

Invariant: each request number is sent once; every Reply, Fail and FailHeld is counted against it.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from bench.lib.child import Answer, Handler
from bench.lib.random_tensors import DTYPES, Maker, to_bytes
from bench.lib.raw_client import Link, RawLane, RawSegment, Zmq
from bench.soak.clients import Allowed, permitted
from bench.soak.run import batch_of
from shmserve.protocol import codec, messages
from shmserve.protocol.messages import Cancel, Fail, FailHeld, Infer, Released, Reply, Tensor

FLIGHT = 32
SLOT = 64 * 1024
PATIENCE = 30.0
LAST = 2**40
"""Number of the last Ping."""
FREE = 0xEE
"""A slot is overwritten with this as soon as its request has ended, to expose later reads."""


class RawClient(ABC):
    """One connection, its requests in flight, and its counts."""

    def __init__(self, link: Link, seed: int, dtypes: Sequence[str] = DTYPES, allowed: Allowed | None = None) -> None:
        self.link = link
        self._dtypes = dtypes
        self._allowed = allowed or {}
        self.random = random.Random(seed)
        self.maker = Maker(seed)
        self.out: dict[int, tuple[tuple[int, ...], bytes, bool, str]] = {}
        self.answered: Counter[int] = Counter()
        self.counts: Counter[str] = Counter()
        self.examples: list[str] = []
        self.number = self.twice = self.wrong = 0
        self.held: set[int] = set()

    def fault(self, text: str) -> None:
        self.wrong += 1
        if len(self.examples) < 5:
            self.examples.append(text)

    @abstractmethod
    def place(self, number: int, content: bytes) -> tuple[Any, tuple[bytes, ...]]:
        """The value of Tensor.data, and the frames after the packet."""

    @abstractmethod
    def content(self, tensor: Tensor) -> bytes: ...

    @abstractmethod
    def free(self, number: int) -> None:
        """Releases the inputs of this request, which may now be overwritten."""

    def ask(self) -> None:
        self.number += 1
        dtype = self.random.choice(self._dtypes)
        model = f"identity_{dtype}" if self.random.random() < 0.8 else "slow"
        dtype = dtype if model != "slow" else "FP32"
        shape = self.maker.shape(dtype, self.maker.size(SLOT // 4), batch_of(model))
        content = to_bytes(self.maker.tensor(dtype, shape))
        assert len(content) <= SLOT
        data, frames = self.place(self.number, content)
        timeout = self.random.choice([500, 5000, 50_000]) if self.random.random() < 0.08 else 0
        cancel = self.random.random() < 0.1
        self.out[self.number] = (shape, content, bool(timeout), model)
        infer = Infer(self.number, model, 0, (Tensor("x", dtype, shape, data),), None, timeout)
        self.post([infer], frames)
        if cancel:
            self.post([Cancel(self.random.choice(list(self.out)) if self.random.random() < 0.5 else self.number)], ())

    def post(self, batch: list[Any], frames: tuple[bytes, ...]) -> None:
        self.link.send(*batch)

    def take(self, message: Any) -> None:
        if isinstance(message, Released):
            if message.request not in self.held:
                self.fault(f"Released({message.request}) without FailHeld before it")
            self.held.discard(message.request)
            self.free(message.request)
            return
        if not isinstance(message, (Reply, Fail, FailHeld)):
            return
        number = message.request
        self.answered[number] += 1
        if number not in self.out:
            self.twice += self.answered[number] > 1
            if self.answered[number] == 1:
                self.fault(f"an answer to request {number}, which was never sent: {message}")
            return
        shape, content, timed, model = self.out.pop(number)
        if isinstance(message, Reply):
            self.counts["right"] += 1
            output = message.outputs[0]
            got = self.content(output)
            if output.shape != shape or got != content:
                self.fault(f"request {number}: {_difference(output, got, shape, content)}")
        elif message.code == "CANCELLED":
            self.counts["cancelled"] += 1  # a Cancel may name any request in flight
        elif message.code in ("DEADLINE_EXCEEDED", "QUEUE_TIMEOUT") and timed:
            self.counts["timed out"] += 1
        elif permitted(self._allowed, message.code, f"{model}: {message.text}"):
            self.counts[message.code] += 1
        else:
            self.counts["faulty"] += 1
            self.fault(f"request {number}, {model}: {message.code}: {message.text}")
        if isinstance(message, FailHeld):
            self.held.add(number)
        else:
            self.free(number)

    def talk(self, seconds: float) -> Answer:
        end = perf_counter() + seconds
        while perf_counter() < end:
            while len(self.out) < FLIGHT and self.can_ask():
                self.ask()
            self.take(self.receive())
        last = perf_counter() + PATIENCE
        while (self.out or self.held) and perf_counter() < last:
            try:
                self.take(self.receive())
            except TimeoutError:
                break
        # A duplicate response would arrive before this Pong.
        self.link.send(messages.Ping(LAST))
        while (message := self.receive()) != messages.Pong(LAST):
            self.take(message)
        if self.held:
            self.fault(f"Released never came for {len(self.held)} requests")
        return self.answer()

    def receive(self) -> Any:
        return self.link.receive(PATIENCE)

    def answer(self) -> Answer:
        return {
            "sent": self.number,
            "lost": len(self.out),
            "twice": self.twice,
            "wrong": self.wrong,
            "counts": dict(self.counts),
            "examples": self.examples,
        }

    def can_ask(self) -> bool:
        return True


class RawLaneClient(RawClient):
    """Places large inputs in slots of one memfd. A slot is free again after the response, or after Released."""

    link: RawLane

    def __init__(
        self, link: RawLane, seed: int, dtypes: Sequence[str] = DTYPES, allowed: Allowed | None = None
    ) -> None:
        super().__init__(link, seed, dtypes, allowed)
        link.hello("memfd")
        self._segment = RawSegment(link, 2 * FLIGHT * SLOT)
        self._free = list(range(2 * FLIGHT))
        self._used: dict[int, int] = {}

    def can_ask(self) -> bool:
        return bool(self._free)

    def place(self, number: int, content: bytes) -> tuple[Any, tuple[bytes, ...]]:
        if len(content) <= messages.INLINE_BYTES and self.random.random() < 0.8:
            return content, ()
        slot = self._used[number] = self._free.pop()
        return self._segment.put(slot * SLOT, content), ()

    def free(self, number: int) -> None:
        slot = self._used.pop(number, None)
        if slot is not None:
            self._segment.put(slot * SLOT, bytes([FREE]) * SLOT)
            self._free.append(slot)

    def content(self, tensor: Tensor) -> bytes:
        return self.link.read(tensor)


class RawZmqClient(RawClient):
    """Sends and receives large tensors as frames."""

    link: Zmq

    def __init__(self, link: Zmq, seed: int, dtypes: Sequence[str] = DTYPES, allowed: Allowed | None = None) -> None:
        super().__init__(link, seed, dtypes, allowed)
        link.hello("frames")

    def place(self, number: int, content: bytes) -> tuple[Any, tuple[bytes, ...]]:
        if len(content) <= messages.INLINE_BYTES and self.random.random() < 0.8:
            return content, ()
        return 0, (content,)

    def free(self, number: int) -> None:
        """The frames of a request are not used again."""

    def post(self, batch: list[Any], frames: tuple[bytes, ...]) -> None:
        self.link.send_bytes(codec.encode(batch), frames)

    def content(self, tensor: Tensor) -> bytes:
        assert isinstance(tensor.data, bytes), "a large output came as neither bytes nor frame"
        return tensor.data


def _difference(output: Tensor, got: bytes, shape: tuple[int, ...], content: bytes) -> str:
    """Describes a wrong response: different bytes, the bytes that mark a free slot, or a truncated output."""
    where = "inline" if isinstance(output.data, bytes) else f"in {len(output.data)} part(s)"  # type: ignore[arg-type]
    wrong = [at for at, (one, other) in enumerate(zip(got, content, strict=False)) if one != other]
    span = f"{len(wrong)} bytes differ, {wrong[0]} to {wrong[-1]}" if wrong else "no byte differs"
    marks = sum(got[at] == FREE for at in wrong)
    return (
        f"{output.dtype} {shape} came as {output.shape}, {len(content)} bytes as {len(got)} {where}; "
        f"{span}, {marks} of them the mark of a free slot"
    )


def raw(link: str, path: str, seed: int) -> Handler:
    client: RawClient = RawLaneClient(RawLane(path), seed) if link == "lane" else RawZmqClient(Zmq(path), seed)

    def handle(seconds: float) -> Answer:
        result = client.talk(seconds)
        client.link.close()
        return result

    return handle

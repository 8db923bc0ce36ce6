"""Packets of a hostile client, generated from a seed: mostly close to valid ones, with all kinds of errors.

Invariant: the same seed gives the same packets, so that a failure can be reproduced.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import msgpack

from shmserve.protocol import messages

INVALID_NUMBERS = (
    0,
    1,
    -1,
    2,
    5,
    4096,
    2**31,
    2**32 - 1,
    2**32,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**63),
    1.5,
    True,
)
INVALID_NAMES = (
    "",
    "x",
    "y",
    "model",
    "nobody",
    "n" * 128,
    "n" * 129,
    "n" * 300,
    "../../etc",
    "a\nb",
    "\x00",
    "é" * 90,
)
INVALID_TYPES = ("FP32", "INT64", "BYTES", "BOOL", "fp32", "", "FLOAT999", None, 7)


class PacketGenerator:
    """The generator. `owner` is the owner number from Welcome. `model` is a model with an FP32 input "x" of shape
    [-1]."""

    def __init__(self, seed: int, model: str) -> None:
        self.random = random.Random(seed)
        self.owner = 0
        self._model = model
        self._request = 0
        self._kinds: list[tuple[int, Callable[[], Any]]] = [
            (30, self._infer),
            (10, self._infer_batch),
            (5, self._return),
            (4, self._cancel),
            (4, self._map),
            (3, self._unmap),
            (4, self._ask),
            (4, self._ping),
            (3, self._stray),
            (1, self._hello),
            (4, lambda: self._tree(3)),
        ]
        self._weights = [weight for weight, _ in self._kinds]

    def packet(self) -> bytes:
        roll = self.random.random()
        if roll < 0.03:
            return self.random.randbytes(self.random.randint(0, 200))
        if roll < 0.032:
            return self.random.randbytes(messages.PACKET_BYTES)
        count = self.random.choice((1, 1, 1, 2, 3, 8))
        packet = bytes(msgpack.packb([self._message() for _ in range(count)], default=str))
        return self._mutate(packet) if self.random.random() < 0.4 else packet

    def _message(self) -> Any:
        return self.random.choices(self._kinds, self._weights)[0][1]()

    def _mutate(self, packet: bytes) -> bytes:
        changed = bytearray(packet)
        for _ in range(self.random.randint(1, 3)):
            at = self.random.randrange(len(changed) + 1)
            roll = self.random.random()
            if roll < 0.4 and at < len(changed):
                changed[at] = self.random.randrange(256)
            elif roll < 0.6:
                del changed[at : at + self.random.randint(1, 10)]
            elif roll < 0.8:
                changed[at:at] = self.random.randbytes(self.random.randint(1, 6))
            else:
                del changed[at:]
        return bytes(changed)

    # ------------------------------------------------------------------------------------ messages

    def _maybe_invalid(self, good: Any, invalid: tuple[Any, ...], share: float = 0.15) -> Any:
        return self.random.choice(invalid) if self.random.random() < share else good

    def _number(self) -> Any:
        return self._maybe_invalid(self.random.getrandbits(self.random.choice((3, 12, 31, 63))), INVALID_NUMBERS)

    def _handle(self) -> Any:
        segment = self._maybe_invalid(
            self.owner << messages.OWNER_SHIFT | 1, (0, 1, 1 << 32 | 1, 2 << 32 | 1, self._number()), 0.4
        )
        return [
            segment,
            self._maybe_invalid(0, (*INVALID_NUMBERS, 64, 100), 0.4),
            self._maybe_invalid(64, INVALID_NUMBERS, 0.4),
        ]

    def _tensor_of(self) -> Any:
        width = self._maybe_invalid(4, (0, 1, 16, 1024), 0.3)
        shape: Any = self._maybe_invalid(
            [1, width], ([], [width], [-1, width], [9, 4], [1] * 33, [2**62, 4], [1, 2**63 - 1], "x")
        )
        data: Any = bytes(4 * width)
        roll = self.random.random()
        if roll < 0.3:
            data = [self._handle() for _ in range(self.random.choice((1, 1, 2, 40)))]
        elif roll < 0.4:
            data = self._maybe_invalid(0, (*INVALID_NUMBERS, b"short", b"b" * 5000, None, {}), 0.7)
        return [
            self._maybe_invalid("x", INVALID_NAMES),
            self._maybe_invalid("FP32", INVALID_TYPES),
            shape,
            data,
        ]

    def _infer(self) -> Any:
        self._request += 1
        inputs: Any = [self._tensor_of() for _ in range(self._maybe_invalid(1, (0, 2, 3, 40, 300), 0.1))]
        wanted: Any = self._maybe_invalid(
            None, ([["y"]], [["y", self._handle()]], [["nothing"]], [["y"]] * 300, 5), 0.2
        )
        options: Any = self._maybe_invalid(
            None, ({"priority": self._number()}, {"sequence": 5}, {"unknown": 1}, {"parameters": {"a": []}}, []), 0.2
        )
        fields = [
            self._maybe_invalid(self._request, INVALID_NUMBERS, 0.05),
            self._maybe_invalid(self._model, INVALID_NAMES, 0.08),
            self._maybe_invalid(0, INVALID_NUMBERS, 0.05),
            self._maybe_invalid(inputs, (5, None, [[]], {}), 0.05),
            wanted,
            self._maybe_invalid(0, (1, 100, *INVALID_NUMBERS)),
            options,
        ]
        return [7, *fields[: self.random.choice((7, 7, 7, 4, 2))]]

    def _infer_batch(self) -> Any:
        count = self._maybe_invalid(self.random.choice((1, 2, 5, 64)), (0, 65, 1024, 1025), 0.1)
        width = self._maybe_invalid(4, (0, 1, 16), 0.2)
        forms: Any = [[self._maybe_invalid("x", INVALID_NAMES), self._maybe_invalid("FP32", INVALID_TYPES), [width]]]
        forms *= self._maybe_invalid(1, (0, 2, 40, 300), 0.05)
        numbers: list[Any] = []
        for _ in range(count):
            self._request += 1
            numbers.append(self._maybe_invalid(self._request, INVALID_NUMBERS, 0.02))
        rows: list[Any] = [self._maybe_invalid(1, (0, 2, 9, *INVALID_NUMBERS), 0.02) for _ in range(count)]
        data: list[Any] = [[bytes(4 * width)] * len(forms) for _ in range(count)]
        if data and self.random.random() < 0.3:
            data[self.random.randrange(count)] = self.random.choice(
                ([], [b"short"], [b"", b""], [b"b" * 5000], [[self._handle()]], b"bytes", None, 5)
            )
        columns: list[Any] = [self._maybe_invalid(forms, (5, None, [[]], {}), 0.05), numbers, rows, data]
        if self.random.random() < 0.1:
            columns[self.random.randrange(4)] = self.random.choice((numbers, rows, data))[1:]
        fields = [
            self._maybe_invalid(self._model, INVALID_NAMES, 0.08),
            self._maybe_invalid(0, INVALID_NUMBERS, 0.05),
            self._maybe_invalid(columns, (columns[:3], [], None, "x"), 0.05),
            self._maybe_invalid(0, (1, 100, *INVALID_NUMBERS)),
        ]
        return [12, *fields[: self.random.choice((4, 4, 3, 2))]]

    def _return(self) -> Any:
        return [3, [self._handle() for _ in range(self.random.choice((1, 1, 5, 300)))]]

    def _cancel(self) -> Any:
        return [8, self._maybe_invalid(self._request, INVALID_NUMBERS)]

    def _map(self) -> Any:
        segment = self._maybe_invalid(
            self.owner << messages.OWNER_SHIFT | self.random.randint(1, 40), (self._number(), 1), 0.2
        )
        name = self._maybe_invalid(None, (*INVALID_NAMES, "/shmserve-00", "/dev/null"), 0.3)
        return [1, segment, self._maybe_invalid(4096, INVALID_NUMBERS, 0.3), name, ""]

    def _unmap(self) -> Any:
        return [
            2,
            self._maybe_invalid(self.owner << messages.OWNER_SHIFT | self.random.randint(1, 40), INVALID_NUMBERS),
        ]

    def _ask(self) -> Any:
        what = self._maybe_invalid(
            "statistics", ("live", "ready", "models", "metadata", "config", "nothing", 5, "q" * 300), 0.7
        )
        return [
            9,
            self._number(),
            what,
            self._maybe_invalid(self._model, INVALID_NAMES, 0.3),
            self._maybe_invalid(0, INVALID_NUMBERS),
            b"",
        ]

    def _ping(self) -> Any:
        return [self.random.choice((4, 5)), self._number()]

    def _hello(self) -> Any:
        return [
            6,
            self._maybe_invalid(1, INVALID_NUMBERS),
            os.getpid(),
            self._maybe_invalid("again", INVALID_NAMES),
            self._maybe_invalid("memfd", ("", "x")),
        ]

    def _stray(self) -> Any:
        """A message of the opposite direction, of the broker's links to workers, or of an unknown type."""
        return [self.random.choice((*range(32, 47), *range(64, 74), *range(96, 110), 11, 127, -1, "7")), self._number()]

    def _tree(self, depth: int) -> Any:
        roll = self.random.random()
        if depth and roll < 0.5:
            return [self._tree(depth - 1) for _ in range(self.random.randint(0, 5))]
        if depth and roll < 0.6:
            return {str(number): self._tree(depth - 1) for number in range(3)}
        return self.random.choice((*INVALID_NUMBERS, *INVALID_NAMES, None, b"bytes"))

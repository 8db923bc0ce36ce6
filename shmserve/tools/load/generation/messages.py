"""Messages between `measure` and a generator process: MessagePack over a socket pair, each preceded by its length."""

from __future__ import annotations

import asyncio

import msgspec
from msgspec import Struct

from shmserve.tools.load.plan import Load, LoadPlan

LENGTH_BYTES = 4


class Prepare(Struct, frozen=True, tag=True):
    """Connect and build the requests; the reply is Prepared or Broken."""

    plan: LoadPlan
    index: int


class Begin(Struct, frozen=True, tag=True):
    """Send this load, starting at `start_ns` (CLOCK_MONOTONIC), as process `index` of `processes`."""

    load: Load
    start_ns: int
    index: int
    processes: int


class End(Struct, frozen=True, tag=True):
    """Stop sending, wait for the responses up to `patience_s`, then cancel the requests; the reply is Ended."""

    patience_s: float


Order = Prepare | Begin | End


class Prepared(Struct, frozen=True, tag=True):
    rows: float
    """Mean number of rows per request; 1 for a model without batches."""


class Samples(Struct, frozen=True, tag=True):
    """Responses since the last message. The byte strings are int64 arrays (codes: int16), one item per response."""

    until_ns: int
    """All responses up to this time have been reported."""
    cpu_ns: int
    """Processor time of the process so far."""
    errors: list[str]
    """All error texts so far."""
    done: bytes
    """When the response arrived."""
    latency: bytes
    delay: bytes
    """From the intended to the actual time of sending."""
    code: bytes
    """0: success; else an index into `errors`, from 1."""
    first: bytes
    """Streams: time to the first answer."""
    gap_at: bytes
    gap: bytes
    """Streams: the time between two answers, and when the later one arrived."""
    prompt: bytes = b""
    output: bytes = b""
    """Streams: numbers of tokens of a language model."""


COLUMNS = tuple(name for name in Samples.__struct_fields__ if name not in ("until_ns", "cpu_ns", "errors"))


class Ended(Struct, frozen=True, tag=True):
    unanswered: int
    """Number of requests without a response when the time for them was over."""


class Broken(Struct, frozen=True, tag=True):
    """The process cannot continue. `code`: that of the ServeError; empty: a usage error."""

    code: str
    text: str


Report = Prepared | Samples | Ended | Broken

_encoder = msgspec.msgpack.Encoder()
_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def write(writer: asyncio.StreamWriter, message: Order | Report) -> None:
    data = _encoder.encode(message)
    writer.write(len(data).to_bytes(LENGTH_BYTES, "little"))
    writer.write(data)


async def _read(reader: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
    return await reader.readexactly(length)


async def read_order(reader: asyncio.StreamReader) -> Order:
    """Raises asyncio.IncompleteReadError at the end."""
    return _orders.decode(await _read(reader))


async def read_report(reader: asyncio.StreamReader) -> Report:
    """Raises asyncio.IncompleteReadError at the end."""
    return _reports.decode(await _read(reader))

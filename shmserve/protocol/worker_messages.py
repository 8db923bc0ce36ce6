"""The messages between broker and workers, as typed structs. `messages` has the rules for all messages, and those that
workers share with clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from shmserve.protocol.messages import (
    TENSORS,
    Answer,
    Ask,
    Cancel,
    Columns,
    Fail,
    FailHeld,
    Failure,
    Id,
    Map,
    More,
    Name,
    Options,
    Part,
    Ping,
    Pong,
    Released,
    Reply,
    Return,
    TensorForm,
    Tensors,
    Text,
    Unmap,
    Value,
    WantedOutputs,
)

# ------------------------------------------------------------------------------------------- broker -> worker


BUFFER_BYTES = 1 << 20
"""Maximum size of the responses to a request that a worker queues while its caller accepts no more, besides the first
one. When they are larger, the model waits."""


class Load(Struct, array_like=True, tag=64, gc=False):
    """Load the model. A descriptor is attached: a memfd with the configuration as JSON (`repo.config.schema`)."""

    owner: Id
    model: Name
    version: Id
    instance: Name
    model_dir: Text
    settings: dict[str, str] = {}


class LabelFile(Struct, array_like=True, frozen=True, gc=False):
    """Labels for an output that is requested as classes, if an ensemble has its own: a file in a directory of the
    server."""

    output: Name
    folder: str
    file: str


class StepOptions(Struct, omit_defaults=True, frozen=True, gc=False):
    """Less common properties of a request that is a step of an ensemble. A map, so that only what is set is sent.

    `near`: outputs whose readers are all on this worker's GPU and can read them there."""

    near: tuple[Name, ...] = ()
    labels: tuple[LabelFile, ...] = ()


class Work(Struct, array_like=True, gc=False):
    """One request of a batch. `request` is the broker's number. `rows` is its size along axis 0; 0: not batched.

    `aliases`: only workers read the outputs, so an input in any memory may be passed on as an output. `slot`: the
    position of its sequence in the batch; -1: any. `inline` false: small outputs are also placed in shared memory,
    except those of one byte."""

    request: Id
    rows: Id
    inputs: Tensors
    outputs: WantedOutputs | None
    audience: Name
    options: Options | None = None
    slot: int = -1
    inline: bool = True
    aliases: bool = False
    step: StepOptions | None = None


class Execute(Struct, array_like=True, tag=65, gc=False):
    """Run these requests as a batch. Numbers (`batch`) increase; a batch has the number of its first Execute.

    `join` 0 starts a new batch; otherwise the work items extend the batch that waits at the worker. If that has already
    started, they form a new waiting batch with this Execute's number. `columns`, with an audience for each of its
    requests, replaces `work_items` if all of them are plain: all outputs, no options, inputs inside the message and of
    the same form. `more`: do not start before the next Execute, which extends this batch. `open`: the broker assumes
    that the worker is busy, so the batch may be extended, and the worker must report its start (Done.next or
    Started)."""

    batch: Id
    join: Id
    work_items: tuple[Work, ...]
    more: bool = False
    open: bool = False
    columns: Columns | None = None
    audiences: tuple[Name, ...] = ()


class Expect(Struct, array_like=True, tag=72, gc=False):
    """Sent before the Execute with this request: compare its outputs with these, and report the result in place of
    them, as the parameters `equal` (bool) and, if they differ, `output` (the first one that does) and `difference`
    (how, as text). It holds until the request has run or was withdrawn."""

    request: Id
    outputs: Tensors


class Withdraw(Struct, array_like=True, tag=66, gc=False):
    """Remove these requests from waiting batches. Answered with Withdrawn, which lists those that were removed. Those
    that have started are cancelled, unless they are `recalled` only to be queued again."""

    requests: tuple[Id, ...]
    recalled: bool = False


class EndSequences(Struct, array_like=True, tag=68, gc=False):
    """These sequences ended without an END: release their state."""

    sequences: tuple[int | Name, ...]


class Stop(Struct, array_like=True, tag=67, gc=False):
    """Finish running requests, finalize the model, exit with 0."""


class Probe(Struct, array_like=True, tag=69, gc=False):
    """Asks the model whether it is ready. Answered with a Probed of the same number by workers that support it."""

    number: Id


class Lend(Struct, array_like=True, tag=70, gc=False):
    """Answer the requests of a client directly. Two descriptors are attached: the socket to the client, and the lease's
    log (`shm.lease_log`).

    Only requests for this model and version (`default`: also as version 0) may be run. Their inputs must have these
    forms, in which a dim of -1 is any size, and up to `rows` as axis 0 (0: the model has no batch dimension, and `dims`
    are whole shapes). Inputs are inside the message, or each is one handle to memory of the client, whose segments the
    worker has received by Map; `owner` is the client's number. The inputs of a packet have up to `input_bytes`. A
    packet has one request or, with `batch` above 0, up to BATCH_REQUESTS with inputs of the same names, types and
    shapes, and up to `batch` rows in all. Any other packet ends the lease."""

    lease: Id
    model: Name
    version: Id
    default: bool
    inputs: Annotated[tuple[TensorForm, ...], Meta(max_length=TENSORS)]
    rows: Id
    owner: Id
    input_bytes: Id = 2**63 - 1
    batch: Id = 0


class Revoke(Struct, array_like=True, tag=71, gc=False):
    """End the lease: answer a request that has already arrived, and close the socket. Answered with LeaseOver."""

    lease: Id


class Trim(Struct, array_like=True, tag=73, gc=False):
    """Free the memory for outputs that has not been used since the last Trim."""


WorkerOrder = (
    Load
    | Execute
    | Expect
    | Withdraw
    | EndSequences
    | Stop
    | Map
    | Unmap
    | Return
    | Ping
    | More
    | Probe
    | Lend
    | Revoke
    | Trim
    | Reply
    | Part
    | Fail
    | FailHeld
    | Released
    | Answer
)
"""The last six are answers to the worker's own calls, with the same meaning as for a client."""

# ------------------------------------------------------------------------------------------- worker -> broker


class Loaded(Struct, array_like=True, tag=96, gc=False):
    """The model is loaded. A descriptor is attached: a memfd with the completed configuration as JSON. `streams`: how
    many requests its engine answers at once; 0: it does not form batches itself."""

    streams: Id = 0


class LoadFailed(Struct, array_like=True, tag=97, gc=False):
    code: Name
    text: Text
    trace: Text = ""
    """The model's traceback, for the log only."""


class Row(Struct, array_like=True, gc=False):
    """The result of one request of a batch. In Streamed only: `more`: further responses follow; `times`: ns that the
    model took for this response, and ns that the worker took to place its outputs."""

    request: Id
    outputs: Tensors
    error: Failure | None = None
    parameters: dict[str, Value] | None = None
    more: bool = False
    times: tuple[Id, Id] | None = None


class Rows(Struct, array_like=True, tag=98, gc=False):
    """Some results of a batch that are too large for one message; Done has the rest."""

    batch: Id
    rows: tuple[Row, ...]


class Done(Struct, array_like=True, tag=99, gc=False):
    """The batch has run. `times` are CLOCK_MONOTONIC ns: taken up, inputs ready, outputs computed, outputs placed.

    `next` is the batch that the worker has started after this one, 0 for none; `through` is the last Execute number
    that is part of it. Later Executes that should have joined it form a new waiting batch together.

    `columns` replaces `rows` if all outputs have the same form and are inside the message.

    `again`: requests of an iterative model that are to be run once more. For decoupled models, Done omits requests
    whose last response has not been sent."""

    batch: Id
    rows: tuple[Row, ...]
    times: tuple[Id, Id, Id, Id]
    next: Id = 0
    through: Id = 0
    again: tuple[Id, ...] = ()
    columns: Columns | None = None


def rows_of(results: Sequence[Row] | Columns) -> Sequence[Row]:
    """Results of a batch one by one."""
    if isinstance(results, Columns):
        return [Row(request, results.tensors(index)) for index, request in enumerate(results.requests)]
    return results


class Streamed(Struct, array_like=True, tag=102, gc=False):
    """Responses of a decoupled model, during its batch or later, each for a single request."""

    rows: tuple[Row, ...]


class Unread(Struct, array_like=True, tag=108, gc=False):
    """The model waits in `send`: its caller accepts no more responses to this request for now, and those that are
    queued have reached BUFFER_BYTES. Sent again if more are accepted and that is not enough."""

    request: Id


class Prefilled(Struct, array_like=True, tag=109, gc=False):
    """The engine of a language model has computed the prompt of this request, which has this many tokens."""

    request: Id
    tokens: Id


class Started(Struct, array_like=True, tag=100, gc=False):
    """An `open` batch has started without being reported by Done.next. Fields as `next` and `through` of Done.

    Not sent for other batches, as the broker expects them to start at once."""

    batch: Id
    through: Id


class Withdrawn(Struct, array_like=True, tag=101, gc=False):
    requests: tuple[Id, ...]


class Call(Struct, array_like=True, tag=103, gc=False):
    """A model calls another model, like a client with Infer. `call` is the worker's own number, repeated in the answer.
    Handles may refer to the worker's own segments, to earlier answers, or to the inputs of `parent`.

    `parent` is the broker's number of the request that the model is running, 0 for none (a warm-up, or a thread that
    the model started); it is used to detect deadlocks. `held`: the model's instance waits for the answer."""

    call: Id
    parent: Id
    model: Name
    version: Id
    inputs: Tensors
    outputs: WantedOutputs | None = None
    timeout_us: Id = 0
    options: Options | None = None
    held: bool = True


class Counted(Struct, array_like=True, tag=104, gc=False):
    """A page of the model's metrics (`shm.counters`), read when metrics are requested. Its memfd is attached."""

    size: Id


class Probed(Struct, array_like=True, tag=105, gc=False):
    """The model's own readiness. Number 0, sent before Loaded: the worker supports Probe."""

    number: Id
    ready: bool


LeasedBatch = tuple[int, int, int, int, int, int, int, int]
"""The requests of a packet in the log of a lease: when they arrived, were taken, had their inputs ready, had their
outputs computed, and had them placed, in ns of the monotonic clock; then the rows of each, how many of them failed, and
how many there were."""


class LeaseLogged(Struct, array_like=True, tag=106, gc=False):
    """The log of this lease is half full."""

    lease: Id


class LeaseOver(Struct, array_like=True, tag=107, gc=False):
    """The worker has closed the socket of this lease. `unfit`: the model cannot be lent."""

    lease: Id
    unfit: bool = False


WorkerReport = (
    Loaded
    | LoadFailed
    | Rows
    | Done
    | Streamed
    | Unread
    | Prefilled
    | Started
    | Withdrawn
    | Map
    | Unmap
    | Return
    | Pong
    | Counted
    | Probed
    | LeaseLogged
    | LeaseOver
    | Call
    | Cancel
    | More
    | Ask
)
"""The last four are sent by the worker as a client of the broker; their numbers are those of its calls."""

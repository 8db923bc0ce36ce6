"""The messages between clients and broker, as typed structs. docs/wire.md describes them. `worker_messages` adds those
between broker and workers.

On the wire a message is a MessagePack array [tag, field, field, ...] in the order written here; a packet is an array of
messages. Tags 1-31 are sent from clients to the broker, 32-63 back; 64-95 from the broker to workers, 96-127 back.
Messages for several directions (Map, Unmap, Return) have one tag.

Invariant: fields are only added, at the end and with a default. Both modules import msgspec only.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

PROTOCOL = 1
"""Sent in Hello and Welcome. On a mismatch the connection ends with an error that says so."""

INLINE_BYTES = 4096
"""A tensor up to this size is sent inside its message, so there is no memory to map or return."""
PACKET_BYTES = 192 * 1024
"""Maximum size of a packet. The kernel refuses SEQPACKET packets above the send buffer, about 200 KB by default."""
PACKET_MESSAGES = 1024
"""Maximum number of messages in a client's packet: a packet is decoded in one go, even if the client's share of a turn
is smaller."""
FIELD_BYTES = 64 * 1024
"""Maximum size of a field. Larger data is sent as a handle or, for answers, in several messages."""
FRAME_BYTES = 1024 * 1024
"""Maximum total size of the frames in one ZeroMQ message, besides its packet."""
CHUNK_BYTES = 96 * 1024
"""Batched messages (InferBatch, Execute, Rows) are split when they reach this many inline bytes."""
BATCH_REQUESTS = 64
"""Maximum number of requests in an InferBatch: they are admitted in one go."""
NAME_LENGTH = 128
TENSORS = 256
DIMS = 32
PARAMETERS = 64
OWNER_SHIFT = 32
"""segment id >> OWNER_SHIFT is the number of the peer that owns the segment; 0 is the broker itself."""

DEVICE = "cuda:"
"""Prefix of the names of segments on a GPU."""

Name = Annotated[str, Meta(max_length=NAME_LENGTH)]
Text = Annotated[str, Meta(max_length=FIELD_BYTES)]
Id = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Level = Annotated[int, Meta(ge=0)]
"""A priority level, limited only by MessagePack's 64 bits."""
Field = Annotated[bytes, Meta(max_length=FIELD_BYTES)]
Inline = Annotated[bytes, Meta(max_length=INLINE_BYTES)]
Value = str | int | float | bool


class Handle(Struct, array_like=True, frozen=True, gc=False):
    """A range of a segment. Its holder must return it with Return, once and unchanged."""

    segment: Id
    offset: Id
    size: Id


Parts = Annotated[tuple[Handle, ...], Meta(max_length=4096)]


class Tensor(Struct, array_like=True, gc=False):
    """A named tensor and the location of its bytes.

    `data` is the bytes themselves (up to INLINE_BYTES), or handles of its parts along axis 0 in shared memory (nearly
    always one), or, over ZeroMQ only, the index of the frame behind the packet that contains them.
    """

    name: Name
    dtype: Annotated[str, Meta(max_length=8)]
    shape: Annotated[tuple[int, ...], Meta(max_length=DIMS)]
    data: Inline | Parts | int


Tensors = Annotated[tuple[Tensor, ...], Meta(max_length=TENSORS)]


class Wanted(Struct, array_like=True, gc=False):
    """A requested output. `place`: the location in the client's own memory to write it to.

    `classes` above 0: instead of the tensor, that many of the largest values per batch item, as BYTES
    "value:index:label" (without ":label" if the model has no labels)."""

    name: Name
    place: Handle | None = None
    classes: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0


WantedOutputs = Annotated[tuple[Wanted, ...], Meta(max_length=TENSORS)]


class TensorForm(Struct, array_like=True, frozen=True, gc=False):
    """The properties that the tensors of a column share. `dims`: the shape without axis 0."""

    name: Name
    dtype: Annotated[str, Meta(max_length=8)]
    dims: Annotated[tuple[int, ...], Meta(max_length=DIMS - 1)]


class Columns(Struct, array_like=True, gc=False):
    """Requests, or their results, whose tensors have the same form and are inside the message.

    The n-th request has the number `requests[n]`; its tensors have `rows[n]` as axis 0 and the bytes `data[n]`, one for
    each form."""

    forms: Annotated[tuple[TensorForm, ...], Meta(max_length=TENSORS)]
    requests: Annotated[tuple[Id, ...], Meta(max_length=PACKET_MESSAGES)]
    rows: Annotated[tuple[Id, ...], Meta(max_length=PACKET_MESSAGES)]
    data: Annotated[tuple[tuple[Inline, ...], ...], Meta(max_length=PACKET_MESSAGES)]

    @property
    def regular(self) -> bool:
        """Whether the columns are equally long and not empty. Check it before use."""
        count, width = len(self.requests), len(self.forms)
        return 0 < count == len(self.rows) == len(self.data) and list(map(len, self.data)).count(width) == count

    def tensors(self, index: int) -> tuple[Tensor, ...]:
        """The tensors of one request."""
        return tensors_of(self.forms, self.rows[index], self.data[index])


def tensors_of(forms: tuple[TensorForm, ...], rows: int, data: tuple[bytes, ...]) -> tuple[Tensor, ...]:
    return tuple(
        [Tensor(form.name, form.dtype, (rows, *form.dims), blob) for form, blob in zip(forms, data, strict=True)]
    )


class Options(Struct, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """Less common options of a request. A map on the wire, so that only fields that are set are sent.

    `window` above 0: the request is answered with Parts, at most this many until the client sends More. `caller`: the
    caller of the client that the sequence belongs to; each caller has its own sequence ids."""

    id: Name = ""
    priority: Level = 0
    queue_timeout_us: Id = 0
    sequence: int | Name = 0
    sequence_start: bool = False
    sequence_end: bool = False
    parameters: Annotated[dict[Name, Value], Meta(max_length=PARAMETERS)] = {}
    window: Id = 0
    caller: Name = ""


# ---------------------------------------------------------------------------------------------- several directions


class Map(Struct, array_like=True, tag=1, gc=False):
    """Announces a segment, before the first handle into it.

    Without a name its descriptor is attached to the packet: the n-th nameless Map of a packet has the n-th descriptor.
    With a name it is a POSIX shared memory object or, between workers, GPU memory; then the name is "cuda:" followed by
    the exported handle in base64. Workers set `audience`, the peers that may get handles into the segment.
    """

    segment: Id
    size: Id
    name: Name | None = None
    audience: Name = ""


class Unmap(Struct, array_like=True, tag=2, gc=False):
    """No more handles into this segment will follow; mappings may remain while views use them."""

    segment: Id


class Return(Struct, array_like=True, tag=3, gc=False):
    """Returns handles that the sender holds."""

    handles: Parts


class Ping(Struct, array_like=True, tag=4, gc=False):
    """Heartbeat. Answered with a Pong of the same number."""

    number: Id


class Pong(Struct, array_like=True, tag=5, gc=False):
    number: Id


class More(Struct, array_like=True, tag=11, gc=False):
    """Allows `count` more Parts of this request: sent by its client, and passed on to the worker that computes them."""

    request: Id
    count: Id


# ------------------------------------------------------------------------------------------- client -> broker


class Hello(Struct, array_like=True, tag=6, gc=False):
    """First message of a connection. `outputs`: how large outputs are returned: memfd (lane), posix, or frames.
    `leases`: on a lane, the client accepts Lease. `keeps`: it accepts ReplyHeld, and does not change inputs in its
    nameless segments before Released. `offers`: it accepts a Lease that is an offer, and several requests in flight
    over a lease."""

    protocol: int
    pid: Id
    name: Name
    outputs: Annotated[str, Meta(max_length=16)]
    leases: bool = False
    keeps: bool = False
    offers: bool = False


class Infer(Struct, array_like=True, tag=7, gc=False):
    """One request. `request` is the client's own number, unique among its requests in flight.

    `version` 0: the default version. `outputs` None: all. `timeout_us` counts from arrival; 0: none. `payer`: who pays
    for it, if the client serves several callers.
    """

    request: Id
    model: Name
    version: Id
    inputs: Tensors
    outputs: WantedOutputs | None = None
    timeout_us: Id = 0
    options: Options | None = None
    payer: Name = ""


class InferBatch(Struct, array_like=True, tag=12, gc=False):
    """Up to BATCH_REQUESTS requests like Infer, without wanted outputs or options, whose inputs have the same form.
    Each is independent of the others; `timeout_us` and `payer` apply to each."""

    model: Name
    version: Id
    columns: Columns
    timeout_us: Id = 0
    payer: Name = ""


class Cancel(Struct, array_like=True, tag=8, gc=False):
    request: Id


class Ask(Struct, array_like=True, tag=9, gc=False):
    """A query or an operation: `what` is in `roles.QUERIES`. Answered with Answer; operations when they have completed.

    `body`: arguments besides the model, see docs/wire.md. `more`: another Ask of the same request continues the body;
    the other fields are taken from the first one."""

    request: Id
    what: Name
    model: Name = ""
    version: Id = 0
    body: Field = b""
    more: bool = False


class Bye(Struct, array_like=True, tag=10, gc=False):
    """The client disconnects; its requests in flight are cancelled."""


ClientMessage = Hello | Infer | InferBatch | Cancel | Ask | Bye | Map | Unmap | Return | Ping | Pong | More

# ------------------------------------------------------------------------------------------- broker -> client


class Welcome(Struct, array_like=True, tag=32, gc=False):
    """Reply to Hello. `owner`: the number above OWNER_SHIFT in the ids of segments that this client creates."""

    protocol: int
    owner: Id
    server: Name
    limits: dict[str, int] = {}


class Reply(Struct, array_like=True, tag=33, gc=False):
    """Result of Infer. The client holds the handles in it until it returns them."""

    request: Id
    version: Id
    outputs: Tensors
    parameters: dict[str, Value] | None = None


class ReplyHeld(Reply, array_like=True, tag=44, gc=False):
    """Like Reply, but a worker may still read the inputs; Released(request) follows when it has finished. Only for
    clients that accept it (Hello)."""


class Fail(Struct, array_like=True, tag=34, gc=False):
    """The request failed. Request 0: a packet that could not be decoded."""

    request: Id
    code: Name
    text: Text


class Released(Struct, array_like=True, tag=35, gc=False):
    """After FailHeld or ReplyHeld: the inputs of the request are no longer in use and the client may reuse them."""

    request: Id


class FailHeld(Struct, array_like=True, tag=36, gc=False):
    """Like Fail, but a worker may still read the inputs; Released(request) follows when it has finished."""

    request: Id
    code: Name
    text: Text


class Answer(Struct, array_like=True, tag=37, gc=False):
    """Answer to Ask: a JSON document in one or several messages; `more`: another one follows."""

    request: Id
    body: Field
    more: bool = False


class Reclaim(Struct, array_like=True, tag=38, gc=False):
    """Asks the client to return unused handles at once instead of with its next message."""


class Changed(Struct, array_like=True, tag=46, gc=False):
    """Other versions may serve this model from now on: a configuration of it that the client has kept, from a query
    with `follow`, is no longer valid. The name includes the namespace."""

    model: Name


class Goodbye(Struct, array_like=True, tag=39, gc=False):
    """The broker disconnects, for this reason."""

    code: Name
    text: Text


class Part(Struct, array_like=True, tag=40, gc=False):
    """One of the responses to an Infer with a window. The last one is a Fail, or a Part with `last`, which may have no
    outputs."""

    request: Id
    version: Id
    outputs: Tensors
    parameters: dict[str, Value] | None = None
    last: bool = False


class ReplyBatch(Struct, array_like=True, tag=41, gc=False):
    """Results of requests that were sent by InferBatch, in any order. The other requests are answered by Reply, Fail or
    FailBatch."""

    version: Id
    columns: Columns


class FailBatch(Struct, array_like=True, tag=45, gc=False):
    """Like a Fail for each of these requests, which were sent by InferBatch."""

    requests: Annotated[tuple[Id, ...], Meta(max_length=PACKET_MESSAGES)]
    code: Name
    text: Text


class Failure(Struct, array_like=True, gc=False):
    code: Name
    text: Text


class Lease(Struct, array_like=True, tag=42, gc=False):
    """Lends the client an idle instance of a model until LeaseEnd. A SEQPACKET socket to its worker is attached.

    While the client has no other request in flight, it may send a request for `model` and `version` (`default`: or for
    version 0) as the only Infer of a packet over this socket: with this `payer`, with a number above 0, without wanted
    outputs and options, with up to `rows` as axis 0 of its inputs (0: the model has no batch dimension), and with
    inputs inside the message, or each as one handle to a segment without a name that the client announced before it
    got the lease. The worker answers there with Reply or Fail.

    `batch` above 0: other requests may be in flight, but over this lease only those of one packet, which may have up to
    BATCH_REQUESTS of them with inputs of the same names, types and shapes, and up to `batch` rows in all. The worker
    runs them as a batch and answers them with one packet, which may also contain ReplyBatch.

    `offer`: no socket is attached. The client sends no more requests that it could send over this lease, until it gets
    a Lease or LeaseEnd of the same number. The lease begins once the model has no requests."""

    lease: Id
    model: Name
    version: Id
    rows: Id
    default: bool
    payer: Name = ""
    batch: Id = 0
    offer: bool = False

    def allows(self, request: Infer) -> bool:
        """Whether this request may be sent over the lease. The caller checks the model, version and segments."""
        if request.outputs is not None or request.options is not None or request.payer != self.payer:
            return False
        rows = self.rows
        for tensor in request.inputs:
            if rows and (not tensor.shape or not 0 < tensor.shape[0] <= rows):
                return False
            if type(tensor.data) is not bytes and (type(tensor.data) is not tuple or len(tensor.data) != 1):
                return False
        return True


class LeaseEnd(Struct, array_like=True, tag=43, gc=False):
    """The worker has closed the socket of this lease, or its offer is withdrawn. Requests that it left unanswered
    failed with `error`. Without an error, they were not run or may be run again: send them to the broker."""

    lease: Id
    error: Failure | None = None


BrokerMessage = (
    Welcome
    | Reply
    | ReplyBatch
    | ReplyHeld
    | Fail
    | FailBatch
    | FailHeld
    | Released
    | Answer
    | Reclaim
    | Changed
    | Goodbye
    | Part
    | Lease
    | LeaseEnd
    | Map
    | Unmap
    | Ping
    | Pong
)

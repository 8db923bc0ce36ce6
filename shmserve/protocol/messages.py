"""The messages: everything that travels between client, broker and worker, as typed structs.

On the wire a message is a MessagePack array [tag, field, field, ...] in the order written here; a packet is an array
of messages. docs/wire.md is the prose of this file. The rule of the file: it imports msgspec and nothing of ours, and
a field is only ever added at the end, with a default.

Tags 1-31 go from a client to the broker, 32-63 back; 64-95 from the broker to a worker, 96-127 back. A message that
goes several ways (Map, Unmap, Return) has one tag.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

PROTOCOL = 1
"""Hello and Welcome carry it. Another number on the other side ends the connection with a clear text."""

INLINE_BYTES = 4096
"""A tensor up to this size travels inside its message: no memory to map, nothing to give back."""
PACKET_BYTES = 192 * 1024
"""The largest packet. The kernel refuses a SEQPACKET packet above its send buffer, about 200 KB by default."""
PACKET_MESSAGES = 1024
"""The most messages of a client in one packet: what is decoded at once, though clients have small turns."""
FIELD_BYTES = 64 * 1024
"""The largest single field. What is bigger travels as a handle or, for answers, in several messages."""
FRAME_BYTES = 1024 * 1024
"""The most bytes of frames that one ZeroMQ message may carry beside its packet."""
CHUNK_BYTES = 96 * 1024
"""Makers of batched messages (Execute, Rows) start the next message when this many inline bytes are in one."""
NAME_LENGTH = 128
TENSORS = 256
DIMS = 32
PARAMETERS = 64
OWNER_SHIFT = 32
"""segment id >> OWNER_SHIFT is the number of the peer that owns the segment; 0 is the broker itself."""

DEVICE = "cuda:"
"""How the name of a segment on a GPU begins."""

Name = Annotated[str, Meta(max_length=NAME_LENGTH)]
Text = Annotated[str, Meta(max_length=FIELD_BYTES)]
Id = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Level = Annotated[int, Meta(ge=0)]
"""A priority level: all that MessagePack can carry, which is 64 bits."""
Field = Annotated[bytes, Meta(max_length=FIELD_BYTES)]
Inline = Annotated[bytes, Meta(max_length=INLINE_BYTES)]
Value = str | int | float | bool


class Handle(Struct, array_like=True, frozen=True, gc=False):
    """A place in a segment. The one who is given a handle must give it back with Return, once, as it was given."""

    segment: Id
    offset: Id
    size: Id


Parts = Annotated[tuple[Handle, ...], Meta(max_length=4096)]


class Tensor(Struct, array_like=True, gc=False):
    """A named tensor and where its bytes are.

    `data` is the bytes themselves (up to INLINE_BYTES), or its parts along axis 0 in shared memory (nearly always
    one), or, over ZeroMQ only, the index of the frame behind the packet that holds them.
    """

    name: Name
    dtype: Annotated[str, Meta(max_length=8)]
    shape: Annotated[tuple[int, ...], Meta(max_length=DIMS)]
    data: Inline | Parts | int


Tensors = Annotated[tuple[Tensor, ...], Meta(max_length=TENSORS)]


class Wanted(Struct, array_like=True, gc=False):
    """An output that the caller asks for, and optionally where in its own memory it wants it written.

    `classes` above 0: not the tensor, but its so many largest values of each batch item, as BYTES "value:index:label"
    (without ":label" where the model has none). `optional`: no error if the model does not make it."""

    name: Name
    place: Handle | None = None
    classes: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    optional: bool = False


WantedOutputs = Annotated[tuple[Wanted, ...], Meta(max_length=TENSORS)]


class Options(Struct, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """What few requests need. A map on the wire, so that only what is set travels.

    `window` above 0: the request is answered with Parts, of which so many may come before the caller says More.
    `caller`: whose the sequence is, of those for whom the client asks. Each of them has ids of its own."""

    id: Name = ""
    priority: Level = 0
    queue_timeout_us: Id = 0
    sequence: int | Name = 0
    sequence_start: bool = False
    sequence_end: bool = False
    parameters: Annotated[dict[Name, Value], Meta(max_length=PARAMETERS)] = {}
    window: Id = 0
    caller: Name = ""


# ---------------------------------------------------------------------------------------------- several ways


class Map(Struct, array_like=True, tag=1, gc=False):
    """A segment exists; comes before the first handle into it.

    Without a name its descriptor is attached to the packet: the n-th nameless Map of a packet has the n-th descriptor.
    With a name it is a POSIX shared memory object; or, between workers, memory on a GPU, where the name begins with
    "cuda:" and goes on with what its owner exported, in base64. `audience` is filled by workers: who may be given
    handles into it.
    """

    segment: Id
    size: Id
    name: Name | None = None
    audience: Name = ""


class Unmap(Struct, array_like=True, tag=2, gc=False):
    """No handle into this segment will come any more; mappings that views still use may stay until they are dropped."""

    segment: Id


class Return(Struct, array_like=True, tag=3, gc=False):
    """Handles given back by their holder."""

    handles: Parts


class Ping(Struct, array_like=True, tag=4, gc=False):
    """Are you there? Answered with Pong and the same number."""

    number: Id


class Pong(Struct, array_like=True, tag=5, gc=False):
    number: Id


class More(Struct, array_like=True, tag=11, gc=False):
    """So many more parts of this request may come: from its client, and on to the worker that makes them."""

    request: Id
    count: Id


# ------------------------------------------------------------------------------------------- client -> broker


class Hello(Struct, array_like=True, tag=6, gc=False):
    """The first message of a connection. `outputs`: how large outputs come back: memfd (lane), posix, or frames."""

    protocol: int
    pid: Id
    name: Name
    outputs: Annotated[str, Meta(max_length=16)]


class Infer(Struct, array_like=True, tag=7, gc=False):
    """One request. `request` is the client's own number, unique among its requests in flight.

    `version` 0 is the model's default version. `outputs` None is all. `timeout_us` 0 is none; it counts from arrival.
    """

    request: Id
    model: Name
    version: Id
    inputs: Tensors
    outputs: WantedOutputs | None = None
    timeout_us: Id = 0
    options: Options | None = None


class Cancel(Struct, array_like=True, tag=8, gc=False):
    request: Id


class Ask(Struct, array_like=True, tag=9, gc=False):
    """What is not inference. Questions: live, ready, models, metadata, config, origins, statistics, metrics, log and
    trace. Operations: load, unload, restart, set_log, set_trace. Answered with Answer, an operation when it is over.

    `body`: what they need beyond the model, as docs/wire.md says. `more`: another Ask of the same request follows, and
    the body goes on there; the other fields count in the first one."""

    request: Id
    what: Name
    model: Name = ""
    version: Id = 0
    body: Field = b""
    more: bool = False


class Bye(Struct, array_like=True, tag=10, gc=False):
    """The client ends the connection; what it still has in flight is cancelled."""


ClientMessage = Hello | Infer | Cancel | Ask | Bye | Map | Unmap | Return | Ping | Pong | More

# ------------------------------------------------------------------------------------------- broker -> client


class Welcome(Struct, array_like=True, tag=32, gc=False):
    """The answer to Hello. `owner` is the number above OWNER_SHIFT in the ids of segments that this client creates."""

    protocol: int
    owner: Id
    server: Name
    limits: dict[str, int] = {}


class Reply(Struct, array_like=True, tag=33, gc=False):
    """The answer to Infer. Handles in it are the client's to hold, until it returns them."""

    request: Id
    version: Id
    outputs: Tensors
    parameters: dict[str, Value] | None = None


class Fail(Struct, array_like=True, tag=34, gc=False):
    """The request failed. Request 0: a packet that could not be read at all."""

    request: Id
    code: Name
    text: Text


class Released(Struct, array_like=True, tag=35, gc=False):
    """A request that ended with FailHeld is done with its inputs: the client may reuse them."""

    request: Id


class FailHeld(Struct, array_like=True, tag=36, gc=False):
    """Like Fail, but a worker may still read the inputs: Released(request) follows when it no longer does."""

    request: Id
    code: Name
    text: Text


class Answer(Struct, array_like=True, tag=37, gc=False):
    """The answer to Ask: a JSON document, in as many messages as it needs; `more` says that another follows."""

    request: Id
    body: Field
    more: bool = False


class Reclaim(Struct, array_like=True, tag=38, gc=False):
    """Please return what you no longer hold now, instead of with the next message."""


class Goodbye(Struct, array_like=True, tag=39, gc=False):
    """The broker ends the connection, and says why."""

    code: Name
    text: Text


class Part(Struct, array_like=True, tag=40, gc=False):
    """One of the answers to an Infer with a window. Fail ends them as well as the `last`, which may have no outputs."""

    request: Id
    version: Id
    outputs: Tensors
    parameters: dict[str, Value] | None = None
    last: bool = False


BrokerMessage = (
    Welcome | Reply | Fail | FailHeld | Released | Answer | Reclaim | Goodbye | Part | Map | Unmap | Ping | Pong
)

# ------------------------------------------------------------------------------------------- broker -> worker


class Load(Struct, array_like=True, tag=64, gc=False):
    """Load the model. A descriptor is attached: a memfd with the configuration as JSON (`repo.schema`)."""

    owner: Id
    model: Name
    version: Id
    instance: Name
    model_dir: Text
    settings: dict[str, str] = {}


class LabelFile(Struct, array_like=True, frozen=True, gc=False):
    """The labels of an output that is wanted as classes, where an ensemble has its own: a file in a directory of the
    server."""

    output: Name
    folder: str
    file: str


class Work(Struct, array_like=True, gc=False):
    """One request of a batch. `request` is the broker's number. `rows` is its share of axis 0; 0: not batched.

    `near`: outputs whose readers are all on this worker's GPU and can read them there.
    `aliases`: only workers read the outputs, so that an input, wherever it is, may be an output as it is.
    `slot`: where in the batch its sequence stands; -1: anywhere. `inline` false: small outputs are put into
    shared memory, too, but for those of one byte."""

    request: Id
    rows: Id
    inputs: Tensors
    outputs: WantedOutputs | None
    audience: Name
    options: Options | None = None
    slot: int = -1
    inline: bool = True
    near: tuple[Name, ...] = ()
    aliases: bool = False
    labels: tuple[LabelFile, ...] = ()


class Execute(Struct, array_like=True, tag=65, gc=False):
    """Run these together. Numbers (`batch`) rise; a batch is known by the number of its first Execute.

    `join` 0 starts a new batch; else the works extend the batch that waits at the worker. If none waits any more, as
    it has just started, they are a waiting batch of their own, known by this Execute's number.
    `more`: do not start before the next Execute, which joins. `open`: the broker thinks that the worker is busy, so
    this batch may be extended, and its start must be told (Done.next or Started)."""

    batch: Id
    join: Id
    works: tuple[Work, ...]
    more: bool = False
    open: bool = False


class Withdraw(Struct, array_like=True, tag=66, gc=False):
    """Take these requests out of what waits. Answered with Withdrawn, which names those that were still there."""

    requests: tuple[Id, ...]


class EndSequences(Struct, array_like=True, tag=68, gc=False):
    """These sequences are over without an END: what is kept for them can go."""

    sequences: tuple[int | Name, ...]


class Stop(Struct, array_like=True, tag=67, gc=False):
    """Finish what you have, finalize the model, exit with 0."""


class Probe(Struct, array_like=True, tag=69, gc=False):
    """Does the model say that it is ready? Answered with Probed, with the same number, by who has offered it."""

    number: Id


WorkerOrder = (
    Load | Execute | Withdraw | EndSequences | Stop | Map | Unmap | Return | Ping | More | Probe
    | Reply | Part | Fail | FailHeld | Released | Answer
)  # fmt: skip
"""The last six answer the worker's own calls, and say what they say to a client."""

# ------------------------------------------------------------------------------------------- worker -> broker


class Loaded(Struct, array_like=True, tag=96, gc=False):
    """The model is ready. A descriptor is attached: a memfd with the completed configuration as JSON."""


class LoadFailed(Struct, array_like=True, tag=97, gc=False):
    code: Name
    text: Text
    trace: Text = ""
    """The model's traceback, for the log only."""


class Failure(Struct, array_like=True, gc=False):
    code: Name
    text: Text


class Row(Struct, array_like=True, gc=False):
    """What became of one request of a batch. Streamed only: `more`, it will be answered again; `times`, how many ns the
    model took for this answer, and the worker to place its outputs."""

    request: Id
    outputs: Tensors
    error: Failure | None = None
    parameters: dict[str, Value] | None = None
    more: bool = False
    times: tuple[Id, Id] | None = None


class Rows(Struct, array_like=True, tag=98, gc=False):
    """Some results of a batch that has too many bytes for one message; Done brings the rest."""

    batch: Id
    rows: tuple[Row, ...]


class Done(Struct, array_like=True, tag=99, gc=False):
    """The batch has run. Times are CLOCK_MONOTONIC ns: taken up, inputs ready, outputs computed, outputs placed.

    `next` is the batch that the worker has started after this one, 0 for none; `through` the last Execute number that
    is part of it. Executes after `through` that wanted to join it are a waiting batch of their own, together.

    `again`: requests of an iterative model that want to be run once more. Where a model answers as often as it likes,
    Done says nothing of those whose last answer has not come."""

    batch: Id
    rows: tuple[Row, ...]
    times: tuple[Id, Id, Id, Id]
    next: Id = 0
    through: Id = 0
    again: tuple[Id, ...] = ()


class Streamed(Struct, array_like=True, tag=102, gc=False):
    """Answers of a model that gives as many as it likes, while its batch runs or later, each request by itself."""

    rows: tuple[Row, ...]


class Started(Struct, array_like=True, tag=100, gc=False):
    """An `open` batch has started that no Done announced; the fields mean what `next` and `through` mean there.

    Not sent for a batch that is not open: the broker knows that such a batch starts at once."""

    batch: Id
    through: Id


class Withdrawn(Struct, array_like=True, tag=101, gc=False):
    requests: tuple[Id, ...]


class Call(Struct, array_like=True, tag=103, gc=False):
    """A model asks another one, as a client would with Infer: `call` is the worker's own number, and the answer carries
    it. Handles may lie in the worker's own segments, in what an earlier answer gave it, or in the inputs of `parent`.

    `parent` is the broker's number of the request that the model runs meanwhile, 0 for none (a warm-up, a thread of its
    own): whoever is waited for by it is known from that. `held`: the model's instance waits for the answer."""

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
    """A page of what the model counts (`shm.tally`), read when metrics are asked for. Its memfd is attached."""

    size: Id


class Probed(Struct, array_like=True, tag=105, gc=False):
    """What the model says. Number 0, before Loaded: it has something to say."""

    number: Id
    ready: bool


WorkerReport = (
    Loaded | LoadFailed | Rows | Done | Streamed | Started | Withdrawn | Map | Unmap | Return | Pong | Counted | Probed
    | Call | Cancel | More | Ask
)  # fmt: skip
"""The last four are what a worker says as a client of the broker; numbers in them are its calls'."""

"""The records of the core that refer to each other: request, requesters, instance, sequence and model version.

A record keeps its own fields consistent; the other packages of the core find records in `State` and decide what happens
to them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, ClassVar, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from shmserve.core.effects import Send
from shmserve.core.ledger import INTERNAL, Ledger
from shmserve.core.limits import Limits
from shmserve.core.policy import InstanceSpec, MemoryEstimate, ModelPolicy, QueuePolicy, SequencePolicy
from shmserve.core.service.form import BatchRules, Reason
from shmserve.core.service.graph import EnsembleGraph, handles_of
from shmserve.core.service.lending import ALONE, MAX_ALONE, terms_of
from shmserve.core.service.prompts import Prompt, PromptBacklog
from shmserve.core.service.queue import RequestQueue
from shmserve.core.service.scaler import Scaler
from shmserve.core.service.validation import Checked, CheckedForm, Checker
from shmserve.core.states import BatchState, InstanceState, RequestState, SequenceState, VersionState, move
from shmserve.core.stats.callers import Caller, Callers
from shmserve.core.stats.latencies import FirstResponses
from shmserve.core.stats.statistics import Statistics
from shmserve.protocol.messages import (
    CHUNK_BYTES,
    OWNER_SHIFT,
    PACKET_BYTES,
    Fail,
    FailHeld,
    Failure,
    Handle,
    Hello,
    Infer,
    Options,
    Part,
    Released,
    Reply,
    ReplyHeld,
    Tensor,
    TensorForm,
    WantedOutputs,
    tensors_of,
)
from shmserve.protocol.roles import NO_ROLES
from shmserve.protocol.worker_messages import Call, StepOptions

_AT_WORK = (RequestState.SENT, RequestState.LINGERING)
_OVER = (InstanceState.STOPPING, InstanceState.STOPPED, InstanceState.FAILED)

Key = tuple[str, int, int | str, str]
"""Model, requested version (0: the default), sequence id, and owner: a user, or one caller of a client."""

STEP = "step"
"""The kind of requester of an ensemble's steps."""

ORDER = 256
"""With preserve_ordering: minimum length of `Service.order` before it is swept."""
WORK_ITEM_BYTES = 80 * 1024
"""An Execute is split when its works reach this size, not counting CHUNK_BYTES of tensors and options."""
assert CHUNK_BYTES + WORK_ITEM_BYTES < PACKET_BYTES

UNKNOWN = ModelPolicy("", 0, 0, (), ())
"""The policy of a version of which no worker has loaded the model yet."""


class Miss(Struct, gc=False):
    """A request that missed the response cache."""

    key: tuple[Any, ...]
    """The response is cached under this key."""
    lookup_ns: int


Response = Reply | ReplyHeld | Part | Fail | FailHeld


class Requester(Protocol):
    """Who asked for a request and gets its responses: a client, a model that calls another one, the run of an ensemble,
    or a shadow."""

    kind: ClassVar[str]

    def hold(self, handles: Iterable[Handle]) -> None:
        """Outputs were produced for it."""

    def drop(self, handles: Iterable[Handle]) -> None:
        """It will not get these outputs, or does not need them any more."""

    def deliver(self, request: Request, message: Response) -> None:
        """Hands over a response, whose outputs it holds."""

    def fail_early(self, request: Request, code: str, text: str) -> None:
        """Hands over the error of a request whose inputs a worker may still read."""

    def detached(self, request: Request) -> None:
        """It no longer waits for the request."""

    def released(self, request: Request) -> None:
        """No worker reads the inputs any more of a request that was answered early."""

    def ended(self, request: Request) -> None:
        """No worker has the request any more. Called before it leaves the tables."""


class Request(Struct, eq=False, gc=False):
    """`number` is the broker's, `client_number` the requester's. `client` has sent it: the requester itself, or the
    client of the ensemble. `payer` is the caller whose share it uses: the client, or one of the callers for whom the
    client speaks. `cost` is max(1, rows): the batch capacity it takes."""

    number: int
    requester: Requester
    client: ClientState
    payer: Payer
    client_number: int
    version: Version
    inputs: tuple[Tensor, ...]
    outputs: WantedOutputs | None
    options: Options | None
    rows: int
    cost: int
    inline: int
    signature: object
    segments: tuple[int, ...]
    pins: tuple[Handle, ...]
    arrived: int
    level: int = 0
    deadline: int = 0
    audience: str = ""
    """Who may map its outputs."""
    special: bool = False
    """Its response cannot take the fast path: it used shared memory, is a step or of a sequence, has several responses,
    is to be cached, or is traced."""
    length: int = 0
    """Length of its padded inputs."""
    parent: int = 0
    """The number of the request for which it was made: of the ensemble for a step; for a call, of the request that the
    model was running, if the call names it."""
    in_shared_memory: bool = False
    """All its outputs must be in shared memory."""
    forwarded: set[Handle] | None = None
    """For a step whose outputs may alias its inputs, because only other steps read them: those of its run's forwarded
    handles that are in memory of the client itself."""
    step: StepOptions | None = None
    """For a step of an ensemble: which outputs stay on the GPU, and label files that override the model's own."""
    tag: int = 0
    queue_expires: int = 0
    delayed: bool = False
    suspect: Instance | None = None
    """The instance whose worker died while it ran this request. The request is retried once, alone."""
    parts: int = 0
    """Responses sent so far."""
    responded: int = 0
    """For decoupled models: when its last response with outputs was sent; 0: none yet."""
    state: RequestState = RequestState.QUEUED
    instance: Instance | None = None
    batch: Batch | None = None
    reply: Reply | Fail | None = None
    miss: Miss | None = None
    """Set if the response cache had no entry and is to store the computed response."""
    sequence: Sequence | None = None
    slot: int = -1
    """Its sequence slot in the batch; -1: any."""
    passed: int = 0
    """Rows of later requests that the batcher has taken before this one, to reduce padding."""
    form: CheckedForm | None = None
    """Set for a request that came in an InferBatch: `inputs` is empty, and `data` contains the bytes of each input."""
    data: tuple[bytes, ...] = ()
    unchecked: Infer | Call | None = None
    """Its message, while it waits for its model to load. It is checked when the model has loaded."""
    input_bytes: int = 0
    """What it adds to the `input_bytes` of its client."""
    prompt: Prompt | None = None
    """For language models: its prompt, until the engine has computed it."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Its inputs, from either kind of message."""
        return self.inputs if self.form is None else tensors_of(self.form.forms, self.rows, self.data)

    @property
    def is_step(self) -> bool:
        """True if it is a step of the ensemble request `parent`."""
        return self.requester.kind == STEP

    @property
    def on_loan(self) -> bool:
        """True if it uses memory that its client must not touch until it is answered. Frames are in the broker's own
        arena."""
        return any(segment >> OWNER_SHIFT for segment in self.segments)

    def move(self, finish: RequestState) -> None:
        move(self, finish)

    def taken_over(self, by: Version) -> None:
        """Another generation runs it, or another version for which it waits."""
        self.version = by
        self.miss = None  # its key contains the generation

    def drop_prompt(self) -> None:
        """Its prompt does not wait any more."""
        if self.prompt is not None:
            self.prompt.backlog.remove(self.prompt)
            self.prompt = None

    def take_back(self) -> None:
        """Its worker does not have it any more, and it is about to be queued again."""
        self.move(RequestState.QUEUED)
        self.instance = self.batch = None

    @property
    def title(self) -> str:
        return f"request {self.number}"

    def details(self) -> str:
        at = f" at {self.instance.spec.name}" if self.instance else ""
        return (
            f"request {self.number} ({self.client_number} of client {self.client.number}) for {self.version.label}, "
            f"{self.rows} rows, arrived {self.arrived}, deadline {self.deadline}, {self.state.name.lower()}{at}"
        )


class Batch(Struct, eq=False):
    """The requests that were sent to a worker together, until it has reported the last of them.

    `pieces`: the number of each Execute and the requests it contained, in the order of sending."""

    pieces: list[tuple[int, list[Request]]]
    rows: int
    reason: Reason
    signature: object
    began: int
    """When it was sent or, if it waited at the worker, when its start was reported."""
    state: BatchState = BatchState.OPEN
    remaining: int = 0
    """Requests that the worker has not reported yet."""
    waited: int = 0
    """ns that its instance spent waiting for other models."""
    unread: dict[Request, int] = {}
    """Requests for whose callers the model waits, because they accept no more responses; since when."""
    stalled: int = 0
    """ns that the model has waited for callers, until `stalled_since`."""
    stalled_since: int = 0
    """While `unread` is not empty: since when."""
    tolerated: int = 0
    """`waited_for_callers` when no other request waited for the instance."""
    recalled: bool = False
    """Its requests were recalled, because the instance waits for another model or a caller, or was restarted."""
    answered: int = 0
    """Requests answered by its Done."""
    early: list[int] = []
    """Arrival times of requests answered by Rows, before Done reported when the batch was taken."""
    number: int = 0
    times: tuple[int, ...] = ()
    """The times of its Done, for traces and ensemble statistics."""
    slots: int = 0
    """With sequence slots: highest occupied slot + 1, which counts as the batch size, as in Triton."""

    def stall(self, request: Request, now: int) -> None:
        """The model waits until the caller of this request accepts more responses."""
        if not self.unread:
            self.stalled_since = now
        self.unread[request] = now

    def resume(self, request: Request, now: int) -> int:
        """The model does not wait for the caller of this request any more. Returns for how long it has."""
        since = self.unread[request]
        self.stalled = self.waited_for_callers(now)
        self.stalled_since = now
        del self.unread[request]
        return now - since

    def waited_for_callers(self, now: int) -> int:
        return self.stalled + (now - self.stalled_since if self.unread else 0)

    def worked(self, now: int) -> int:
        """ns since it began in which its instance has waited neither for other models nor for callers."""
        return now - self.began - self.waited - self.waited_for_callers(now)

    @property
    def count(self) -> int:
        """All requests that were ever in it."""
        return sum(len(piece) for _, piece in self.pieces)

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.pieces]

    def requests(self) -> list[Request]:
        """Requests that the worker has not reported yet."""
        return [
            request
            for _, piece in self.pieces
            for request in piece
            if request.batch is self and request.state in _AT_WORK
        ]

    def lengths(self) -> tuple[int, int]:
        """The greatest length of its requests, and their total elements (rows x length)."""
        longest = useful = 0
        for _, piece in self.pieces:
            for request in piece:
                if request.batch is self:
                    longest = max(longest, request.length)
                    useful += request.cost * request.length
        return longest, useful

    @property
    def title(self) -> str:
        return f"batch {self.numbers}"

    def details(self) -> str:
        return f"{self.rows} rows"

    def leave(self, request: Request) -> None:
        """The request goes on without the batch."""
        self.remaining -= 1
        request.batch = None

    def end(self) -> None:
        """Breaks the reference cycle between requests and batch; the GC does not track requests."""
        move(self, BatchState.ENDED)
        self.pieces = []
        self.unread.clear()

    def known_as(self, number: int) -> bool:
        """True if the number identifies the batch. The worker sends the number of the first Execute or, after a late
        extension, of the first Execute that is left."""
        pieces = self.pieces
        return pieces[0][0] == number or (len(pieces) > 1 and number in self.numbers)

    def split(self, through: int) -> Batch | None:
        """Moves the Executes after `through` into a separate batch."""
        late = [(number, piece) for number, piece in self.pieces if number > through]
        if not late:
            return None
        self.pieces = [(number, piece) for number, piece in self.pieces if number <= through]
        rest = Batch(late, 0, self.reason, self.signature, self.began, recalled=self.recalled)
        for _, piece in late:
            for request in piece:
                if request.batch is self:
                    request.batch = rest
                    rest.rows += request.cost
                    rest.remaining += 1
        self.rows -= rest.rows
        self.remaining -= rest.remaining
        return rest if rest.remaining else None


class ClientState(Struct, eq=False):
    """`outputs` is how it receives large outputs: memfd, posix or frames; empty until it has sent Hello.

    Outputs are placed for its `audience`: the users who may map them. `roles` are bits of shmserve.protocol.roles, set
    from Hello until it is disconnected (`disconnecting`). Its connection counts for its `user`.
    """

    kind: ClassVar[str] = "client"
    number: int
    audience: str
    plane: str
    ledger: Ledger
    outputs: str = ""
    name: str = ""
    requests: dict[int, Request] = {}
    """Client-side number -> request in flight."""
    steps: int = 0
    """Requests of steps of its ensembles."""
    bytes: int = 0
    """Bytes inside the messages of its requests in flight, including steps."""
    input_bytes: int = 0
    """Bytes of shared memory that its requests refer to as inputs, until no worker reads them any more."""
    segments: set[int] = set()
    holds: set[tuple[int, int]] = set()
    held_bytes: int = 0
    gone: bool = False
    reclaiming: bool = False
    user: str = ""
    granted: int = 0
    roles: int = 0
    disconnecting: bool = False
    denied: bool = False
    leases: bool = False
    """It accepts leases."""
    offers: bool = False
    """It accepts offers of leases, and leases with several requests in flight."""
    keeps: bool = False
    """It accepts ReplyHeld."""
    error_level: int = 0
    """Level of its token bucket of protocol errors, as a time: each error advances it by 1 s / client_errors."""
    callers: Callers = field(default_factory=lambda: Callers("", False, count(-1, -1)))
    """Those for whom the clients of its user speak."""

    def said_hello(self, message: Hello) -> None:
        """It has said what it is and what it can do, and gets its roles."""
        self.outputs, self.name, self.roles = message.outputs, message.name, self.granted
        self.leases = message.leases and self.plane == "lane"
        self.offers = message.offers and self.leases
        self.keeps = message.keeps and self.plane == "lane"
        if self.outputs == "frames":
            self.audience = INTERNAL
        elif self.outputs == "posix":
            self.audience = f"posix:{self.audience}"

    def sent(self, request: Request) -> None:
        """It has sent the request, which is in flight now."""
        self.requests[request.client_number] = request
        self.bytes += request.inline
        self.input_bytes += request.input_bytes

    def shut_out(self) -> None:
        """It is about to be disconnected, and may do nothing more."""
        self.disconnecting, self.roles = True, NO_ROLES

    def payer(self, name: str) -> Payer:
        """Who pays for a request that names this caller; "": the client itself."""
        return self.callers[name] if name else self

    @property
    def in_flight(self) -> int:
        return len(self.requests) + self.steps

    def enter(self, count: int = 1) -> None:
        """Its requests are in `requests`."""

    def leave(self, count: int, ns: int) -> None:
        """See `enter`."""

    def has_placed(self, handle: Handle) -> bool:
        """True if this output was placed in the client's own memory, as it requested. Such outputs are not holds."""
        return handle.segment >> OWNER_SHIFT == self.number

    def of_others(self, handles: Iterable[Handle]) -> list[Handle]:
        """The handles without those to its own memory, which the ledger does not track."""
        return [handle for handle in handles if not self.has_placed(handle)]

    def hold(self, handles: Iterable[Handle]) -> None:
        ledger, shows = self.ledger, self.outputs != "frames"
        if self.gone:
            return
        for handle in handles:
            if shows:
                ledger.show(handle.segment, self.number)
            ledger.give(self, handle)

    def drop(self, handles: Iterable[Handle]) -> None:
        if not self.gone:
            for handle in self.of_others(handles):
                self.ledger.take_back(self, handle)

    def deliver(self, request: Request, message: Response) -> None:
        if self.gone:
            return
        if type(message) is Reply:
            options = request.options
            if request.version.service.decoupled and options is not None and options.window:
                message = Part(message.request, message.version, message.outputs, message.parameters, True)
        self.ledger.effects.append(Send(self.number, message))
        if self.outputs == "frames" and not isinstance(message, Fail | FailHeld):  # it has received copies
            self.drop(handles_of(message.outputs))

    def fail_early(self, request: Request, code: str, text: str) -> None:
        kind = FailHeld if request.on_loan else Fail
        self.deliver(request, kind(request.client_number, code, text))

    def detached(self, request: Request) -> None:
        self.requests.pop(request.client_number, None)
        self.bytes -= request.inline

    def released(self, request: Request) -> None:
        if request.on_loan and not self.gone:
            self.ledger.effects.append(Send(self.number, Released(request.client_number)))

    def ended(self, request: Request) -> None:
        if request.state is not RequestState.LINGERING:  # otherwise its number may be in use again
            self.detached(request)


Payer = ClientState | Caller
CopyRequest = Callable[
    [Requester, Request, "Version", tuple[Tensor, ...], Checked, tuple[int, ...], tuple[Handle, ...]], None
]
"""The way into the core for a copy of a request at another version. Gets the requester of the copy, the original, the
version, the inputs, the result of their check, and the segments and pins, which are already in use."""


class CallingWorker(ClientState, eq=False):
    """A worker that calls other models, with the peer number of its process. It cannot choose where outputs are placed,
    so it holds all of them, even those that its own process has written."""

    kind: ClassVar[str] = "call"
    answered: list[CallingWorker] = []
    """The work list of callers whose blocking calls were answered, one entry for each call."""
    blocking: set[int] = set()
    """Numbers of the calls that block the instance."""
    waits_for: int = 0
    """How many they were when the instance was last resumed, or blocked."""
    since: int = 0
    """Since when it has been blocked."""

    def has_placed(self, handle: Handle) -> bool:
        return False

    def detached(self, request: Request) -> None:
        super().detached(request)
        if request.number in self.blocking:
            self.blocking.remove(request.number)
            self.answered.append(self)


class Instance(Struct, eq=False):
    """A slot for a worker process. `peer` is its current process, 0 for none."""

    spec: InstanceSpec
    state: InstanceState = InstanceState.WAITING
    peer: int = 0
    running: Batch | None = None
    waiting: Batch | None = None
    deaths: int = 0
    """Consecutive crashes and failed restarts, without a completed batch or a long uptime between them."""
    crashes: int = 0
    """How many of these were crashes."""
    ready_since: int = 0
    """When its process finished loading; 0: not yet."""
    batches_at_first_crash: int = 0
    """Batches that its version had completed at the first of these crashes. A higher count now means that other
    instances have completed batches since."""
    unexplained: bool = False
    """Its worker died, and it is not known yet which request caused this."""
    lost: bool = False
    """Its last restart failed: it could not load, or reached the crash limit. Or it is held."""
    held: bool = False
    """Its GPU is unhealthy: it is not started until the GPU is healthy again."""
    quarantined: bool = False
    """It crashes while other instances of its version succeed. It gets one request at a time until it completes a
    batch."""
    retry_at: int = 0
    reason: str = ""
    spawned: int = 0
    """When its process was started."""
    watched: bool = False
    """The timer for the execution limit is set."""
    responded: int = 0
    """When it last sent a response to a request of an earlier batch."""
    hung: bool = False
    """Its process was killed because it exceeded the execution limit."""
    load_error: str = ""
    """The error that its worker reported for the current load."""
    last_words: str = ""
    """The last output of its most recent process. For operators only."""
    loaded: bool = False
    """It has been READY. A version that serves does not count an instance as missing that never was READY."""
    sleeping: bool = False
    """Its process was stopped to free memory, and has not been READY since. If `reason` is set, it could not be woken
    and must not be tried again before `retry_at`."""
    memory: tuple[int, int] = (0, 0)
    """Memory of its process as last measured, on the host and on its GPU."""
    streams: dict[int, Request] = {}
    """Open streams: requests whose batch has run, with responses still to come."""
    streaming_since: int = 0
    """While there are any: since when."""
    replaces: Instance | None = None
    """The instance that this one replaces once it is READY."""
    joining: bool = False
    """It was added outside an operation to a version that serves, and has not been READY yet."""
    retiring: bool = False
    """It accepts no new sequences or other requests, and stops when its sequences and streams have ended."""
    closing: bool = False
    """It is leaving: it gets no new work and only finishes its batches and streams."""
    due: int = 0
    """For a replaced instance: the time by which its running batch must finish. 0: not replaced."""
    revoked: set[int] = set()
    """Requests that were taken back without the worker's confirmation: it must not start them any more."""
    caller: CallingWorker | None = None
    """The client record of its process, once it has called other models."""
    lease: int = 0
    """The lease by which a client uses it; 0: none."""
    leased_since: int = 0
    """When it began to run a leased request, or last resumed it after calls to other models, as of the last query; 0:
    it was not running one."""

    def move(self, finish: InstanceState, reason: str | None = None) -> None:
        """`reason`: the new reason; None: it stays the same."""
        move(self, finish)
        if reason is not None:
            self.explain(reason)

    def explain(self, reason: str) -> None:
        """The only writer of `reason`."""
        self.reason = reason

    def forgive(self) -> None:
        """It works again, or its GPU does: earlier crashes and failed restarts do not count any more."""
        self.deaths = self.crashes = 0

    @property
    def title(self) -> str:
        return f"instance {self.spec.name}"

    def details(self) -> str:
        return f"peer {self.peer}, {self.deaths} deaths in a row, last reason {self.reason or 'none'}"

    @property
    def usable(self) -> bool:
        """True if it may get work. A leaving instance may, for its remaining sequences."""
        return self.state is InstanceState.READY and not self.spec.passive and not self.closing

    @property
    def alive(self) -> bool:
        """True if it serves, or is expected to serve again because its last restart has not failed."""
        return self.loaded and not (self.lost or self.over or self.spec.passive)

    @property
    def is_tentative(self) -> bool:
        """True if it was added for more throughput and has not begun to load. A memory budget may prevent its load."""
        return self.joining and self.state is InstanceState.WAITING

    @property
    def degraded(self) -> bool:
        """It has served before, or would serve on a healthy GPU, but currently does not, or not fully."""
        if not (self.loaded or self.held) or self.over or self.spec.passive:
            return False
        if self.sleeping:
            return bool(self.reason)
        return self.quarantined or self.state is not InstanceState.READY

    @property
    def waits(self) -> bool:
        """True if it blocks until another model has answered."""
        return self.caller is not None and self.caller.waits_for > 0

    @property
    def idle(self) -> bool:
        return self.running is None and self.waiting is None and not self.lease

    @property
    def asleep_soon(self) -> bool:
        """It is asleep, or will be when its process has ended."""
        if self.state is InstanceState.KILLED:  # if it was READY, it did not exit in time; otherwise it failed to wake
            return self.sleeping and self.ready_since > 0
        return self.state in (InstanceState.GOING_TO_SLEEP, InstanceState.ASLEEP)

    @property
    def over(self) -> bool:
        """It has stopped or is about to, and will not restart."""
        return self.retiring or self.state in _OVER

    def batches(self) -> list[Batch]:
        return [batch for batch in (self.running, self.waiting) if batch is not None]


class Sequence(Struct, eq=False):
    """`slot` is its slot at its instance."""

    key: Key
    worker_id: int | str
    """The id by which worker and model identify it: `id`, or another one if a sequence of another user has the same
    id."""
    version: Version
    active: int
    """When one of its requests last started or ended."""
    state: SequenceState = SequenceState.WAITING
    requests: deque[Request] = field(default_factory=deque)
    running: Request | None = None
    instance: Instance | None = None
    slot: int = -1
    over: bool = False
    """No further request can join it."""
    cut: bool = False
    """It ends without an END."""
    own: bool = False
    """Implicit: created for a single request without an id."""
    before: Sequence | None = None
    """An older sequence with the same id, which must end first: workers keep state by id."""
    after: Sequence | None = None
    """The sequence that waits for this one."""
    broken: tuple[str, str] | None = None
    """Error code and text for its remaining requests."""

    @property
    def id(self) -> int | str:
        return self.key[2]

    @property
    def user(self) -> str:
        return self.key[3]

    @property
    def idle(self) -> bool:
        return self.running is None and not self.requests

    def move(self, finish: SequenceState) -> None:
        move(self, finish)

    @property
    def title(self) -> str:
        return f"sequence {self.id!r}"

    def details(self) -> str:
        at = f" slot {self.slot} of {self.instance.spec.name}" if self.instance is not None else ""
        return f"of {self.version.label}{at}, {len(self.requests)} requests wait, broken: {self.broken}"

    def fail(self, code: str, text: str) -> None:
        if self.broken is None:
            self.broken = code, text

    def drop(self, request: Request) -> None:
        """Removes a queued request, which leaves a gap and so fails the sequence."""
        self.requests.remove(request)
        self.sequence_slots.gone(request)
        self.end_cancelled()

    def end_cancelled(self) -> None:
        """One of its requests was cancelled, so its later ones fail."""
        self.fail("CANCELLED", f"an earlier request of sequence {self.id!r} was cancelled, which ended the sequence")
        self.mark_changed()

    def run_again(self, request: Request) -> None:
        """An iterative model reschedules the request, which returns to the head of the sequence."""
        request.take_back()
        if request.options is not None and request.options.sequence_start:
            request.options = replace(request.options, sequence_start=False)
        self.requests.appendleft(request)
        self.sequence_slots.waiting(request)
        self.on_left(request)

    @property
    def sequence_slots(self) -> SequenceSlots:
        slots = self.version.service.sequence_slots
        assert slots is not None
        return slots

    def mark_changed(self) -> None:
        self.sequence_slots.changed[self] = None

    def on_left(self, request: Request) -> None:
        """The request has ended at its worker, or will run again."""
        if self.running is request:
            self.running = None
        self.mark_changed()


class SequenceSlots:
    """The slots of one version's sequences: `bound` to instances, or waiting in the `backlog`."""

    def __init__(self, policy: SequencePolicy) -> None:
        self.policy = policy
        self.bound: dict[Instance, list[Sequence | None]] = {}
        self.backlog: dict[Sequence, None] = {}
        self._next: dict[str, OrderedDict[Sequence, None]] = {}
        """Sequences of the backlog that may get a slot, by user, next user first. Invariant: no user's entry is
        empty."""
        self.latest: dict[int | str, Sequence] = {}
        """Worker id -> the newest sequence that has not ended."""
        self.changed: dict[Sequence, None] = {}
        """Sequences that have changed since they were last processed."""
        self.waits = self.bytes = 0
        """Queued requests, and the bytes inside their messages."""

    @property
    def count(self) -> int:
        """Live sequences."""
        return len(self.backlog) + sum(slot is not None for slots in self.bound.values() for slot in slots)

    def all(self) -> list[Sequence]:
        return [*self.backlog, *(one for slots in self.bound.values() for one in slots if one is not None)]

    def at(self, instance: Instance) -> list[Sequence]:
        return [sequence for sequence in self.bound.get(instance, ()) if sequence is not None]

    def waiting(self, request: Request) -> None:
        self.waits += 1
        self.bytes += request.inline

    def gone(self, request: Request) -> None:
        self.waits -= 1
        self.bytes -= request.inline

    # ------------------------------------------------------------------------------------ enter, bind, end

    def enter(self, sequence: Sequence) -> None:
        before = sequence.before = self.latest.get(sequence.worker_id)
        self.latest[sequence.worker_id] = sequence
        self.backlog[sequence] = None
        if before is None:
            self._queue(sequence)
        else:
            before.after = sequence

    def _queue(self, sequence: Sequence) -> None:
        self._next.setdefault(sequence.user, OrderedDict())[sequence] = None

    def bind_waiting(self, instances: list[Instance]) -> None:
        """Binds sequences of the backlog to free slots: round robin between users, in order of arrival within each
        user."""
        while self._next:
            instance = self._free(instances)
            if instance is None:
                return
            user = next(iter(self._next))
            own_slots = self._next.pop(user)
            first, _ = own_slots.popitem(last=False)
            if own_slots:
                self._next[user] = own_slots  # behind the other users
            del self.backlog[first]
            slots = self.bound.setdefault(instance, [None] * self.policy.slots)
            first.slot = slots.index(None)
            first.instance = instance
            slots[first.slot] = first
            first.move(SequenceState.BOUND)

    def _free(self, instances: list[Instance]) -> Instance | None:
        """Of the instances that can take another sequence, the one with the fewest."""
        best, fewest = None, self.policy.slots
        for instance in instances:
            if instance.usable and not instance.retiring and not instance.waits:
                slots = self.bound.get(instance)
                count = self.policy.slots - slots.count(None) if slots is not None else 0
                if count < (min(fewest, 1) if instance.quarantined else fewest):
                    best, fewest = instance, count
        return best

    def lose(self, instance: Instance | None, text: str) -> None:
        """Fails the sequences of the instance (None: of all instances), which can no longer run them. The caller
        dispatches the version."""
        for sequence in self.all() if instance is None else self.at(instance):
            sequence.fail("UNAVAILABLE", f"sequence {sequence.id!r} has ended: {text}; send START again")
            sequence.mark_changed()

    def end(self, sequence: Sequence) -> None:
        before, after = sequence.before, sequence.after
        if sequence.instance is None:
            del self.backlog[sequence]
            if before is None:
                own_slots = self._next[sequence.user]
                del own_slots[sequence]
                if not own_slots:
                    del self._next[sequence.user]
        else:
            slots = self.bound[sequence.instance]
            slots[sequence.slot] = None
            if not any(slots):
                del self.bound[sequence.instance]
            sequence.instance = None
        sequence.move(SequenceState.ENDED)
        if before is not None:
            before.after = after
        if after is not None:
            after.before = before
            if before is None:
                self._queue(after)
        elif before is not None:
            self.latest[sequence.worker_id] = before
        else:
            del self.latest[sequence.worker_id]
        sequence.before = sequence.after = None


COUNTED_USERS = 64
"""Users of a version whose batches are counted apart."""


class SleepState(Struct):
    """Sleep state of a version: when it goes to sleep, and whether it is waking."""

    idle_ns: int = 0
    """It goes to sleep after this time without requests; 0: never."""
    watched: bool = False
    """The idle timer is set."""
    stays_loaded: bool = False
    """It never goes to sleep."""
    woken: int = 0
    """While it is waking: when it was woken. 0: it is asleep or serves."""
    logged: bool = False
    """The current wake has been logged."""
    memory: MemoryEstimate = MemoryEstimate()
    """Estimate for an instance, used until it has been measured."""
    host: int = 0
    """The largest host memory of a READY instance; 0: not measured yet."""
    host_peak: int = 0
    """The same for an instance that is loading."""
    gpu: int = 0
    gpu_peak: int = 0
    load_ns: int = 0
    """Mean time of a load (exponential); 0: never loaded."""
    uses: float = 0.0
    """Batches counted while it was in memory. Earlier ones count less (`models.value`)."""
    counted: int = 0
    """`Statistics.execution_count` when they were last counted."""
    waker: str = ""
    """While it is waking: the user for whom it wakes."""
    users: dict[str, float] = {}
    """Batches since it woke, by user. Earlier ones count less (`models.shares`)."""

    def follow(self, policy: ModelPolicy, limits: Limits) -> None:
        self.stays_loaded = policy.stays_loaded
        idle_ns = limits.idle_unload_ns if policy.idle_unload_ns is None else policy.idle_unload_ns
        self.idle_ns = 0 if policy.stays_loaded else idle_ns

    def measured(self, host: int, gpu: int, host_peak: int, ready: bool) -> None:
        """The memory of an instance was measured."""
        self.host_peak, self.gpu_peak = max(self.host_peak, host_peak), max(self.gpu_peak, gpu)
        if ready:
            self.host, self.gpu = max(self.host, host), max(self.gpu, gpu)

    def loaded(self, took_ns: int) -> None:
        """An instance has loaded, which took so long."""
        self.load_ns = (3 * self.load_ns + took_ns) // 4 if self.load_ns else took_ns

    def inherit(self, before: SleepState) -> None:
        """A new generation is as popular as the one whose statistics it continues."""
        self.uses, self.counted, self.load_ns = before.uses, before.counted, before.load_ns

    def count_uses(self, executed: int) -> None:
        """`executed`: the batches that its instances have ever run."""
        self.uses += executed - self.counted
        self.counted = executed

    def used_by(self, user: str, count: int) -> None:
        """Counts batches for a user."""
        users = self.users
        if user not in users and len(users) >= COUNTED_USERS:
            del users[min(users, key=users.__getitem__)]
        users[user] = users.get(user, 0.0) + count

    def age(self) -> None:
        """Halves the counts of uses, so that popularity may change."""
        self.uses /= 2
        self.users = {user: count / 2 for user, count in self.users.items() if count >= 1}


class Lending(Struct, eq=False):
    """To which client the instances of a version may be lent. `inputs` and `rows`: which requests a worker may run
    without the core; `batch`: how many rows of several requests in one batch, 0: only one request."""

    inputs: tuple[TensorForm, ...]
    rows: int
    batch: int
    client: ClientState | None = None
    """The client of the last batch, if it could have been sent over a lease."""
    payer: Payer | None = None
    """Who paid for its requests."""
    alone: int = 0
    """The consecutive requests of both that were alone."""
    together: int = 0
    """The consecutive batches of both."""
    needed: int = ALONE
    offered: int = 0
    """The lease that was offered to this client, 0: none."""

    def count(self, client: ClientState, payer: Payer, alone: bool) -> None:
        """Counts a batch of requests that could have been sent over a lease. `alone`: it is one request, the client's
        only one."""
        if client is not self.client or payer is not self.payer:
            self.client, self.payer, self.alone, self.together = client, payer, 0, 0
            return
        self.alone = self.alone + 1 if alone else 0
        self.together += 1

    def start_again(self) -> None:
        """Counts from the beginning, after requests that could not have been sent over a lease."""
        self.client, self.alone, self.together = None, 0, 0

    def take_turn(self) -> ClientState | None:
        """The client that may get a lease. If it does not get one, it has to send as many requests again."""
        self.alone = self.together = 0
        return self.client

    def offer(self, lease: int) -> None:
        """Its client is offered this lease. 0: the offer is over."""
        self.offered, self.alone, self.together = lease, 0, 0

    def count_draining(self) -> int:
        """Counts a batch that runs after the offer. Returns how many have."""
        self.together += 1
        return self.together

    def ended(self, served: int) -> None:
        """A lease over which this many requests were served has ended."""
        if served >= MAX_ALONE:
            self.needed = ALONE

    def ended_by_others(self) -> None:
        self.alone = self.together = 0
        self.needed = min(2 * self.needed, MAX_ALONE)


class Service:
    """How the requests of a version are checked, queued, batched and answered in order. Built from its policy."""

    def __init__(self, policy: ModelPolicy = UNKNOWN, caches: bool = False, decoupled: bool = False) -> None:
        """`caches`: the server has a response cache. `decoupled`: a step of this ensemble is."""
        batching, sequence = policy.batching, policy.sequence
        ordered = batching is not None and batching.preserve_ordering
        forming = batching if sequence is None else sequence.batching
        self.checker = Checker(policy)
        self.queue: RequestQueue[Request] = RequestQueue(batching)
        self.sequence_slots: SequenceSlots | None = None if sequence is None else SequenceSlots(sequence)
        self.graph = None if policy.steps is None else EnsembleGraph(policy)
        self.decoupled = policy.decoupled or decoupled
        """A request may have any number of responses."""
        self.prompts: PromptBacklog | None = None
        """For language models whose engines report the tokens of prompts."""
        if policy.prompt_inputs:
            self.prompts = PromptBacklog(policy.prompt_inputs, policy.queue_tokens)
        self.streams = policy.streams
        self.batch_rules: BatchRules | None = None
        if policy.max_batch > 0 and forming is not None:
            self.batch_rules = BatchRules.of(policy.max_batch, forming, self.checker.varies)
        self.padding = policy.padding if policy.max_batch > 0 and batching is not None else None
        self.max_work_items = max(1, WORK_ITEM_BYTES // _work_bytes(policy))
        """Maximum number of requests in one message to a worker, given their size without tensors and options."""
        self.prefetch = sequence is None and (
            batching is None or (batching.levels == 0 and batching.default_policy == QueuePolicy())
        )
        """Batches may wait at busy instances: the order of queued requests does not change any more."""
        self.order: deque[Request] | None = deque() if ordered and not policy.decoupled else None
        """With preserve_ordering: requests in order of arrival, until all earlier ones have been answered."""
        self.order_swept = ORDER
        """Length at which requests that left early are removed."""
        # With preserve_ordering, a cached response must not overtake running requests.
        self.cached = caches and policy.cached and self.order is None and not (self.decoupled or sequence)
        self.plain = self.prefetch and self.graph is None and not (ordered or self.cached or self.prompts is not None)
        """No priorities, queue policy, preserved order, cache or prompts: requests are queued on the fast path."""
        batches = self.batch_rules is not None and not (self.batch_rules.delay_ns or self.batch_rules.prefers)
        terms = terms_of(policy, batches) if self.plain else None
        self.lending = Lending(*terms) if terms is not None else None
        """None: its instances cannot be lent to clients."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts that its engine has not computed."""
        return 0 if self.prompts is None else self.prompts.total

    def stop_lending(self) -> None:
        self.lending = None

    def take_over(self, old: Service) -> list[Request]:
        """Takes the queued requests of an earlier generation with the same policy, and returns them."""
        later = self.queue.take(self.queue.count)  # requests of this turn, which queue behind the moved ones
        old.queue, self.queue = self.queue, old.queue
        self.prompts = old.prompts
        moved = list(self.queue.in_order())  # which may be the list to which the others are added
        for request in later:
            self.queue.add(request)
        return moved

    def split_order(self, old: Service, moved: Version) -> None:
        """With preserve_ordering, each generation answers its own requests in order of arrival."""
        if old.order is not None and self.order is not None:
            self.order.extendleft([request for request in reversed(old.order) if request.version is moved])
            old.order = deque(request for request in old.order if request.version is not moved)

    def move_in_order(self, request: Request, old: Service) -> None:
        """Moves a request of an earlier generation to its place in the order of arrival."""
        if old.order is not None and self.order is not None:
            old.order.remove(request)
            self.order = deque(sorted([*self.order, request], key=lambda other: other.number))

    def sweep_order(self, remaining: list[Request]) -> None:
        """Keeps only these requests in the order: those that have not left early."""
        assert self.order is not None
        self.order.clear()
        self.order.extend(remaining)
        self.order_swept = max(ORDER, 2 * len(remaining))


def _work_bytes(policy: ModelPolicy) -> int:
    """An upper bound for the encoded size of a Work without handles: its own fields, the form of each input, and each
    requested output with its place and, for an ensemble, its labels."""
    size = 256
    for spec in policy.inputs:
        size += len(spec.name) + 24 + 9 * len(spec.dims)
    for spec in policy.outputs:
        size += 2 * len(spec.name) + 64
    return size


class Version:
    """One generation of a version: a reload creates a new one, which takes over when it is READY.

    `policy` and `service` are set when the first worker has reported the model's configuration.
    """

    def __init__(self, model: str, number: int, instances: list[Instance], source: int = 0, began: int = 0) -> None:
        self.model = model
        self.number = number
        self.source = source
        self.began = began
        """When it was deployed."""
        self.took_ns = 0
        """Time from deployment to READY; 0: not READY yet."""
        self.retries = 0
        self.traceback = ""
        """The model's traceback of the last failed load; "" once it has been logged."""
        self.logged_traceback = ""
        self.asleep = False
        """No instance serves or is about to. Queued requests wake it."""
        self.sleep_state = SleepState()
        self.yielding = False
        """Others wait for its memory: it starts nothing more, and sleeps once it has finished."""
        self.limit_ns = 0
        """Execution limit: a longer batch counts as hung; 0: no limit."""
        self.crash_limit = 0
        """Consecutive crashes after which an instance counts as broken; 0: never."""
        self.instances = instances
        self.state = VersionState.LOADING
        self.reason = ""
        self.policy: ModelPolicy | None = None
        self.service = Service()
        self.unchecked: RequestQueue[Request] = RequestQueue(None)
        """Requests that wait until the version has loaded."""
        self.suspects: deque[Request] = deque()
        """Requests to be run again, each alone and one at a time, because one of them may have killed a worker."""
        self.reserved: Instance | None = None
        """Runs the next suspect. Nothing is sent ahead to it, so that it becomes idle."""
        self.trial: Instance | None = None
        """The instance that is currently running a suspect."""
        self.members: tuple[Version, ...] = ()
        """The models of its steps, once all are READY."""
        self.member_recovering = False
        """For ensembles: a missing step model is loading or restarting its instances."""
        self.compose_number = 0
        """Number of the pending Compose."""
        self.calls_others = False
        """An instance has been blocked by a call to another model: batches sent ahead to it would also wait."""
        self.users = 0
        """Ensemble runs that may still send requests to it."""
        self.idle: list[Instance] = []
        """Idle instances. The most recently used is last and is taken first, because its caches are warm."""
        self.service_ns = 0
        """Mean batch time (exponential); 0 before the first batch."""
        self.spread_ns = 0
        """Mean deviation of the batch time as seen by the broker from `service_ns`."""
        self.successor: Version | None = None
        """The generation that a restart put in its place, which takes over its requests."""
        self.wake = 0
        """When to dispatch again if no event arrives; 0: never."""
        self.scaler: Scaler | None = None
        """None: its number of instances does not follow its load."""
        self.statistics = Statistics()
        self.deleted = False
        """It is no longer in the repository: forget it when it is unloaded."""

    @property
    def label(self) -> str:
        return f"model '{self.model}' version {self.number}"

    def explain(self, reason: str) -> None:
        """The only writer of `reason`."""
        self.reason = reason

    def move(self, finish: VersionState, reason: str = "") -> None:
        move(self, finish)
        self.explain(reason)

    @property
    def title(self) -> str:
        return self.label

    def details(self) -> str:
        return f"{len(self.instances)} instances, reason {self.reason or 'none'}"

    def apply_policy(self, policy: ModelPolicy, limits: Limits, decoupled: bool = False) -> None:
        """The policy is known when the first worker has loaded the model. `decoupled`: a step of this ensemble is."""
        self.policy = policy
        limit_ns, crashes = policy.execution_limit_ns, policy.crash_limit
        self.limit_ns = limits.execution_ns if limit_ns is None else limit_ns
        self.crash_limit = limits.crashes if crashes is None else crashes
        self.sleep_state.follow(policy, limits)
        self.service = Service(policy, limits.cache_bytes > 0, decoupled)
        first = FirstResponses.of(policy.first_response_ms) if limits.first_responses else None
        self.statistics.collect(limits.summaries, first, policy.decoupled)

    def take_traceback(self) -> str:
        """The traceback to log for a failed load; "" if the last logged attempt failed with the same one."""
        traceback, self.traceback = self.traceback, ""
        if traceback == self.logged_traceback:
            return ""
        self.logged_traceback = traceback
        return traceback

    @property
    def healthy(self) -> bool:
        """True if an instance can run a request now, after its current batches, or once woken."""
        if self.service.graph is not None:
            return self.state is VersionState.READY and all(member.healthy for member in self.members)
        return self.state is VersionState.READY and any(
            instance.usable or (instance.sleeping and not instance.reason and not instance.over)
            for instance in self.instances
        )

    def settle_sleep(self) -> None:
        """Updates `asleep` after a change of instances."""
        serving = [i for i in self.instances if (i.loaded or i.sleeping) and not (i.over or i.spec.passive)]
        self.asleep = bool(serving) and all(instance.asleep_soon for instance in serving)

    @property
    def alive(self) -> bool:
        """True if queued requests will be run."""
        return any(instance.alive for instance in self.instances)

    @property
    def recovering(self) -> bool:
        """It was READY, has lost all instances, and keeps restarting them. Or it could not load because its GPUs are
        unhealthy."""
        if self.state is not VersionState.UNAVAILABLE:
            return False
        return any(not instance.over and (self.took_ns or instance.lost) for instance in self.instances)

    @property
    def will_recover(self) -> bool:
        """It is not READY, but will become READY by itself once its instances, or those of its steps, have
        restarted."""
        return self.recovering or self.member_recovering

    @property
    def counts(self) -> tuple[int, int]:
        """The number of instances that serve fully, and of those that should."""
        wanted = [i for i in self.instances if not (i.over or i.spec.passive or i.replaces or i.joining)]
        return sum(i.state is InstanceState.READY and not i.quarantined for i in wanted), len(wanted)

    @property
    def degraded_reason(self) -> str:
        """Why some of its instances do not serve; "" if all do."""
        return "; ".join(
            f"instance '{instance.spec.name}'{' is quarantined' if instance.quarantined else ''}: {instance.reason}"
            for instance in self.instances
            if instance.degraded
        )

    @property
    def loaded(self) -> bool:
        """Every instance that should serve is READY, except for those whose GPU is unhealthy."""
        return all(
            instance.state is InstanceState.READY or instance.over or instance.held for instance in self.instances
        )

    @property
    def batches(self) -> bool:
        return self.policy is not None and self.policy.max_batch > 0

    @property
    def waits(self) -> int:
        """The number of requests that no worker has: queued ones, and those that wait until it has loaded."""
        return self.queued + self.unchecked.count

    @property
    def queued(self) -> int:
        """The number of checked requests that no worker has."""
        if self.service.sequence_slots is not None:
            return self.service.sequence_slots.waits
        return self.service.queue.count + len(self.suspects)

    def waiting_users(self) -> set[str]:
        """The users of the requests that no worker has."""
        waiting = self.unchecked.users()
        if self.service.sequence_slots is not None:
            return waiting.union(sequence.user for sequence in self.service.sequence_slots.all())
        return waiting.union(self.service.queue.users(), (request.payer.user for request in self.suspects))

    @property
    def waiting_bytes(self) -> int:
        """Bytes inside the messages of queued requests."""
        checked = self.service.queue.bytes if self.service.sequence_slots is None else self.service.sequence_slots.bytes
        return checked + self.unchecked.bytes

    def suspect(self, request: Request, instance: Instance) -> None:
        """The request may be why the instance's worker has died. It runs once more, alone."""
        request.suspect = instance
        instance.unexplained = True
        self.suspects.append(request)

    def drop(self, request: Request) -> None:
        """Removes a queued request."""
        if request.unchecked is not None:
            self.unchecked.remove(request)
        elif request.sequence is not None:
            request.sequence.drop(request)
        elif request.suspect:
            self.suspects.remove(request)
        else:
            self.service.queue.remove(request)

    @property
    def finished(self) -> bool:
        """No request is queued, running or still being read, and no ensemble run needs the version."""
        if self.waits or self.users or (self.service.sequence_slots is not None and self.service.sequence_slots.count):
            return False
        return all(instance.idle and not instance.streams for instance in self.instances)

    def needs(self, instance: Instance) -> bool:
        """True if the instance has work that no other instance could continue."""
        if self.service.sequence_slots is not None:
            return bool(self.service.sequence_slots.at(instance))
        return self.service.decoupled and not (instance.idle and not instance.streams)

    @property
    def gone(self) -> bool:
        """It has no process, and will not start one."""
        return not any(instance.peer or not instance.over for instance in self.instances)

    @property
    def requeue_target(self) -> Version:
        """The generation that queues a request returned by one of this version's instances."""
        newest = self
        while newest.successor is not None:
            newest = newest.successor
        return self if newest.gone else newest

    def served(self, service_ns: int, seen_ns: int, stalled_ns: int) -> None:
        """Updates the means with a batch that took `service_ns` at the worker, and `seen_ns` as seen by the broker, of
        which it may have spent `stalled_ns` waiting for callers."""
        if stalled_ns:
            service_ns, seen_ns = max(service_ns - stalled_ns, 0), max(seen_ns - stalled_ns, 0)
        self.spread_ns += (abs(seen_ns - (self.service_ns or service_ns)) - self.spread_ns) // 16
        self.service_ns = service_ns if not self.service_ns else (7 * self.service_ns + service_ns) // 8


class Lease(Struct, eq=False):
    """An idle instance, lent to a client that uses the version alone. The core sends nothing else to the instance
    until the worker has ended the lease."""

    number: int
    client: ClientState
    payer: Payer
    """Who pays for all requests over the lease, as their log does not say so."""
    version: Version
    instance: Instance
    default: bool
    """The lease also serves requests that name no version."""
    batch: int
    """How many rows of several requests in flight may be one batch; 0: one request at a time. The client may already
    hold requests when the lease begins, so this stays as it was offered."""
    revoked: bool = False
    served: int = 0
    slow: bool = False
    """Its batches take long: they would do better with the next one waiting at the instance."""
    recorded: int = 0
    """When the last request in its log arrived."""
    resumed: int = 0
    """When its worker last resumed after calls to other models. The execution limit excludes these calls, so it applies
    from then on."""
    error: Failure | None = None
    """The error of the request that its worker was running when it died; None: the client may send it again."""

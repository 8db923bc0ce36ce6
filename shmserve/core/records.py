"""The records of the core: a request, its batch, the instance that runs it, its sequence, and its model version.

They refer to each other, so they stand together. They keep their own fields consistent; what happens to them is decided
by the packages of the core, which find them in `State`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from shmserve.core.batching.form import Reason, Shape
from shmserve.core.batching.padding import rounded
from shmserve.core.batching.queue import RequestQueue
from shmserve.core.ensembles.graph import Graph
from shmserve.core.policy import BatchPolicy, InstanceSpec, ModelPolicy, PaddingPolicy, QueuePolicy, SequencePolicy
from shmserve.core.requests.client import Caller, Client
from shmserve.core.requests.validation import Checker
from shmserve.core.states import (
    BATCH_MOVES,
    INSTANCE_MOVES,
    REQUEST_MOVES,
    SEQUENCE_MOVES,
    VERSION_MOVES,
    BatchState,
    IllegalMove,
    InstanceState,
    RequestState,
    SequenceState,
    VersionState,
    legal,
)
from shmserve.core.stats.statistics import Statistics
from shmserve.protocol.messages import OWNER_SHIFT, Fail, Handle, LabelFile, Options, Reply, Tensor, WantedOutputs

_AT_WORK = (RequestState.SENT, RequestState.LINGERING)
_OVER = (InstanceState.STOPPING, InstanceState.STOPPED, InstanceState.FAILED)

Key = tuple[str, int, int | str, str]
"""Model, the version that callers name (0: the default one), the id, and whose it is: a user or a client's caller."""

ORDER = 256
"""With preserve_ordering: up to here `Version.order` is not swept."""


class Miss(Struct, gc=False):
    """A request that the response cache could not answer."""

    key: tuple[Any, ...]
    """The answer is to be kept under this."""
    lookup_ns: int


class Request(Struct, eq=False, gc=False):
    """`number` is the broker's, `client_number` the client's. `cost` is max(1, rows): what it takes of a batch."""

    number: int
    client: Client
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
    blocks: tuple[Handle, ...]
    arrived: int
    level: int = 0
    tag: int = 0
    deadline: int = 0
    queue_expires: int = 0
    delayed: bool = False
    suspect: Instance | None = None
    """The instance whose worker died while it ran this one. It is run once more, alone."""
    special: bool = False
    """Its answer is not just sent: it has used memory, is a step's, or comes in parts."""
    parts: int = 0
    """Answers that it has had."""
    state: RequestState = RequestState.QUEUED
    instance: Instance | None = None
    batch: Batch | None = None
    reply: Reply | Fail | None = None
    audience: str = ""
    """Who may be given what it is answered with."""
    step_of: int = 0
    """It is a step of an ensemble: the number of the request to that, which is told of the answer."""
    outside: bool = False
    """All its outputs are to be in shared memory."""
    near: tuple[str, ...] = ()
    """Outputs that may stay on the GPU of the instance: who reads them is there, too."""
    aliases: bool = False
    """Only other steps read what it is answered with: that may be what it was asked with."""
    labels: tuple[LabelFile, ...] = ()
    """Of outputs that are wanted as classes, where ensembles that it is a step of have their own."""
    miss: Miss | None = None
    """The response cache had no answer to it, and is to keep the one that is computed."""
    sequence: Sequence | None = None
    slot: int = -1
    """Where in the batch it must stand; -1: anywhere."""
    length: int = 0
    """Of its padded inputs."""
    passed: int = 0
    """Rows of requests behind it that the batcher has taken before it, to pad less."""
    held: bool = False
    """Its client is an instance that does nothing else before it is answered."""

    @property
    def on_loan(self) -> bool:
        """Does it use memory that its client may not touch meanwhile? What came in frames is the broker's own."""
        return any(segment >> OWNER_SHIFT for segment in self.segments)

    def move(self, finish: RequestState) -> None:
        if finish not in REQUEST_MOVES[self.state]:
            raise IllegalMove(f"request {self.number}", self.state, finish, self.story())
        self.state = finish

    def story(self) -> str:
        at = f" at {self.instance.spec.name}" if self.instance else ""
        return (
            f"request {self.number} ({self.client_number} of client {self.client.number}) for {self.version.label}, "
            f"{self.rows} rows, arrived {self.arrived}, deadline {self.deadline}, {self.state.name.lower()}{at}"
        )


class Batch(Struct, eq=False):
    """`pieces`: each Execute's number, and the requests that it brought, in the order of their sending."""

    pieces: list[tuple[int, list[Request]]]
    rows: int
    reason: Reason
    signature: object
    began: int
    """When it was sent or, if it waited, when its start was told."""
    state: BatchState = BatchState.OPEN
    left: int = 0
    """Requests that the worker has not reported on yet."""
    waited: int = 0
    """ns for which its instance waited for other models meanwhile."""
    recalled: bool = False
    """Its requests were asked back, as the instance waits for another model."""
    early: list[int] = []
    """When those arrived that were answered by Rows, before Done has told when the batch was taken up."""
    number: int = 0
    times: tuple[int, ...] = ()
    """Its Done's, while a request is traced."""
    slots: int = 0
    """Of sequences with slots: up to the last one that has a sequence. As in Triton, the batch counts as so large."""

    @property
    def count(self) -> int:
        """All requests that were ever in it."""
        return sum(len(piece) for _, piece in self.pieces)

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.pieces]

    def requests(self) -> list[Request]:
        """Those that the worker has not reported on yet."""
        return [
            request
            for _, piece in self.pieces
            for request in piece
            if request.batch is self and request.state in _AT_WORK
        ]

    def lengths(self) -> tuple[int, int]:
        """The greatest length of its requests, and how many elements (rows x length) they have."""
        longest = useful = 0
        for _, piece in self.pieces:
            for request in piece:
                if request.batch is self:
                    longest = max(longest, request.length)
                    useful += request.cost * request.length
        return longest, useful

    def move(self, finish: BatchState) -> None:
        if finish not in BATCH_MOVES[self.state]:
            raise IllegalMove(f"batch {self.numbers}", self.state, finish, f"{self.rows} rows")
        self.state = finish

    def end(self) -> None:
        """Over. Requests and batches refer to each other, and no collector looks at them: the circle is opened here."""
        self.move(BatchState.ENDED)
        self.pieces = []

    def known_as(self, number: int) -> bool:
        """By its first Execute; after a late extension, by the first of those that are left."""
        pieces = self.pieces
        return pieces[0][0] == number or (len(pieces) > 1 and number in self.numbers)

    def split(self, through: int) -> Batch | None:
        """What came after `through` has become a batch of its own."""
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
                    rest.left += 1
        self.rows -= rest.rows
        self.left -= rest.left
        return rest if rest.left else None


class Instance(Struct, eq=False):
    """A place for a worker process. `peer` is the process that it has now, 0 for none."""

    spec: InstanceSpec
    state: InstanceState = InstanceState.WAITING
    peer: int = 0
    running: Batch | None = None
    waiting: Batch | None = None
    deaths: int = 0
    """Crashes and failed restarts in a row: with no batch done between them, and no long uptime."""
    crashes: int = 0
    """Of these, the crashes."""
    ready_since: int = 0
    """When its process had loaded; 0: it has not."""
    row_began: int = 0
    """Batches that its version had done when it first crashed in that row. More by now: other instances did them."""
    unexplained: bool = False
    """Its worker died, and the request to blame is not known yet."""
    lost: bool = False
    """Its last restart has failed: it could not load, or crashed once too often in a row."""
    quarantined: bool = False
    """It crashes while others of its version answer. Until it has done a batch, it is given one request at a time."""
    restarts: int = 0
    """In all, after it had been READY."""
    retry_at: int = 0
    reason: str = ""
    spawned: int = 0
    """When its process was started."""
    watched: bool = False
    """A timer is set for the end of what it may take to run a batch."""
    hung: bool = False
    """Its process was killed because it exceeded the execution limit."""
    load_error: str = ""
    """Why it said that it could not load, this time."""
    last_words: str = ""
    """The last lines that its last process wrote before it ended unasked. For operators only."""
    loaded: bool = False
    """It has been READY. One that never was is not missed by a version that is served without it."""
    streams: dict[int, Request] = {}
    """Requests that it will still answer, though their batch has run."""
    replaces: Instance | None = None
    """Goes when this one is READY."""
    leaving: bool = False
    """It takes nothing new, and stops when the sequences and streams that it has are over."""
    closing: bool = False
    """It leaves, and needs nothing more for that: it is given nothing to run."""
    due: int = 0
    """It has been replaced: when what it runs must have finished. 0: it has not been."""
    revoked: set[int] = set()
    """Requests that were taken back without its answer: it may not start them any more."""
    caller: Caller | None = None
    """Its process as a client, once it has called other models."""

    def move(self, finish: InstanceState) -> None:
        self.state = legal(INSTANCE_MOVES, f"instance {self.spec.name}", self.state, finish, self.story())

    def story(self) -> str:
        return f"peer {self.peer}, {self.deaths} deaths in a row, last reason {self.reason or 'none'}"

    @property
    def usable(self) -> bool:
        """May it be given something to run? One that leaves may, for the sequences that it has."""
        return self.state is InstanceState.READY and not self.spec.passive and not self.closing

    @property
    def alive(self) -> bool:
        """It serves, or will without a failed restart in between."""
        return self.loaded and not (self.lost or self.over or self.spec.passive)

    @property
    def degraded(self) -> bool:
        """It is meant to serve, did so before, and does not now, or not fully."""
        if not self.loaded or self.over or self.spec.passive:
            return False
        return self.quarantined or self.state is not InstanceState.READY

    @property
    def waits(self) -> bool:
        """Does nothing before another model has answered it?"""
        return self.caller is not None and self.caller.waits_for > 0

    @property
    def idle(self) -> bool:
        return self.running is None and self.waiting is None

    @property
    def over(self) -> bool:
        """It has gone, or is about to, and will not come back."""
        return self.leaving or self.state in _OVER

    def batches(self) -> list[Batch]:
        return [batch for batch in (self.running, self.waiting) if batch is not None]


class Sequence(Struct, eq=False):
    """`slot` is its place at its instance."""

    key: Key
    worker_id: int | str
    """What the worker and the model know it by: the id, or another one where a sequence of another user has that."""
    version: Version
    active: int
    """When it last had a request that began or ended."""
    state: SequenceState = SequenceState.WAITING
    requests: deque[Request] = field(default_factory=deque)
    running: Request | None = None
    instance: Instance | None = None
    slot: int = -1
    over: bool = False
    """Nothing comes any more that would belong to it."""
    cut: bool = False
    """It is over without an END."""
    own: bool = False
    """Of one request, which came without an id."""
    before: Sequence | None = None
    """Another one of its id, which must have ended first: what a worker keeps is kept by the id."""
    after: Sequence | None = None
    """The one that must wait for this one."""
    broken: tuple[str, str] | None = None
    """Code and text for what still belongs to it."""

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
        self.state = legal(SEQUENCE_MOVES, f"sequence {self.id!r}", self.state, finish, self.story())

    def story(self) -> str:
        at = f" slot {self.slot} of {self.instance.spec.name}" if self.instance is not None else ""
        return f"of {self.version.label}{at}, {len(self.requests)} requests wait, broken: {self.broken}"

    def fail(self, code: str, text: str) -> None:
        if self.broken is None:
            self.broken = code, text

    def drop(self, request: Request) -> None:
        """It waits no more, and the sequence has a hole where it was."""
        self.requests.remove(request)
        self.places.gone(request)
        self.stirred()
        self.fail("CANCELLED", f"an earlier request of sequence {self.id!r} was given up, and so is all of it")

    def run_again(self, request: Request) -> None:
        """An iterative model wants to run the request again: it waits at the head of the sequence."""
        request.move(RequestState.QUEUED)
        request.instance = request.batch = None
        if request.options is not None and request.options.sequence_start:
            request.options = replace(request.options, sequence_start=False)
        self.requests.appendleft(request)
        self.places.waiting(request)
        self.left(request)

    @property
    def places(self) -> Places:
        places = self.version.places
        assert places is not None
        return places

    def stirred(self) -> None:
        self.places.stirred[self] = None

    def left(self, request: Request) -> None:
        """The request has ended at its worker, or is to be run again."""
        if self.running is request:
            self.running = None
        self.stirred()


class Places:
    """Where the sequences of one version are: `bound` to slots of instances, or in the `backlog`."""

    def __init__(self, policy: SequencePolicy) -> None:
        self.policy = policy
        self.bound: dict[Instance, list[Sequence | None]] = {}
        self.backlog: dict[Sequence, None] = {}
        self._next: dict[str, OrderedDict[Sequence, None]] = {}
        """Those of the backlog that may have a place, by user. The first user is next; invariant: each has some."""
        self.latest: dict[int | str, Sequence] = {}
        """By the workers' id, the newest one that has not ended."""
        self.stirred: dict[Sequence, None] = {}
        """Those for which something has changed since they were last looked at."""
        self.waits = self.bytes = 0
        """Requests that no worker has, and what is inside their messages."""

    @property
    def count(self) -> int:
        """Sequences that live."""
        return len(self.backlog) + sum(slot is not None for slots in self.bound.values() for slot in slots)

    def all(self) -> list[Sequence]:
        return [*self.backlog, *(found for slots in self.bound.values() for found in slots if found is not None)]

    def at(self, instance: Instance) -> list[Sequence]:
        return [sequence for sequence in self.bound.get(instance, ()) if sequence is not None]

    def waiting(self, request: Request) -> None:
        self.waits += 1
        self.bytes += request.inline

    def gone(self, request: Request) -> None:
        self.waits -= 1
        self.bytes -= request.inline

    # ------------------------------------------------------------------------------------ coming and going

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
        """Gives slots that are free to those of the backlog: users in turn, and of a user first come first served."""
        while self._next:
            instance = self._free(instances)
            if instance is None:
                return
            user = next(iter(self._next))
            mine = self._next.pop(user)
            first, _ = mine.popitem(last=False)
            if mine:
                self._next[user] = mine  # behind the others
            del self.backlog[first]
            slots = self.bound.setdefault(instance, [None] * self.policy.slots)
            first.slot = slots.index(None)
            first.instance = instance
            slots[first.slot] = first
            first.move(SequenceState.BOUND)

    def _free(self, instances: list[Instance]) -> Instance | None:
        """Of the instances that can take one more sequence, one with the fewest."""
        best, fewest = None, self.policy.slots
        for instance in instances:
            if instance.usable and not instance.leaving and not instance.waits:
                slots = self.bound.get(instance)
                count = self.policy.slots - slots.count(None) if slots is not None else 0
                if count < (min(fewest, 1) if instance.quarantined else fewest):
                    best, fewest = instance, count
        return best

    def lose(self, instance: Instance | None, text: str) -> None:
        """The instance (None: every one) runs its sequences no more. Their version is to be dispatched."""
        for sequence in self.all() if instance is None else self.at(instance):
            sequence.fail("UNAVAILABLE", f"sequence {sequence.id!r} is over: {text}; send START again")
            sequence.stirred()

    def end(self, sequence: Sequence) -> None:
        before, after = sequence.before, sequence.after
        if sequence.instance is None:
            del self.backlog[sequence]
            if before is None:
                mine = self._next[sequence.user]
                del mine[sequence]
                if not mine:
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


class Version:
    """One generation of a version: a reload makes a new one, which takes over when it is READY.

    `policy`, `checker` and `queue` are made when the first worker has said what the model looks like."""

    __slots__ = (
        "asked",
        "began",
        "cached",
        "checker",
        "crash_limit",
        "decoupled",
        "graph",
        "idle",
        "instances",
        "limit_ns",
        "logged_traceback",
        "member_recovering",
        "members",
        "model",
        "number",
        "order",
        "order_swept",
        "padding",
        "places",
        "plain",
        "policy",
        "prefetch",
        "queue",
        "reason",
        "reserved",
        "retries",
        "service_ns",
        "shape",
        "source",
        "spread_ns",
        "state",
        "statistics",
        "successor",
        "suspects",
        "took_ns",
        "traceback",
        "trial",
        "users",
        "wake",
    )

    def __init__(self, model: str, number: int, instances: list[Instance], source: int = 0, began: int = 0) -> None:
        self.model = model
        self.number = number
        self.source = source
        self.began = began
        """When it was deployed."""
        self.took_ns = 0
        """From then until it was READY; 0: it is not, yet."""
        self.retries = 0
        self.traceback = ""
        """Of the model, when a worker last failed to load it; "" once it is in the log."""
        self.logged_traceback = ""
        self.limit_ns = 0
        """A batch that runs for longer hangs; 0: no limit."""
        self.crash_limit = 0
        """Crashes in a row after which an instance counts as broken; 0: never."""
        self.instances = instances
        self.state = VersionState.LOADING
        self.reason = ""
        self.policy: ModelPolicy | None = None
        self.checker: Checker | None = None
        self.queue: RequestQueue[Request] = RequestQueue(None)
        self.suspects: deque[Request] = deque()
        """Those to be run again, each alone and one at a time, as one of them may have killed a worker."""
        self.reserved: Instance | None = None
        """Where the next suspect is run. Nothing is sent ahead to it, so that it becomes idle."""
        self.trial: Instance | None = None
        """It runs a suspect now."""
        self.places: Places | None = None
        """Of a model of sequences."""
        self.graph: Graph | None = None
        """Of an ensemble."""
        self.members: tuple[Version, ...] = ()
        """The models of its steps, once all are READY."""
        self.member_recovering = False
        """Of an ensemble: the model that it lacks is being loaded, or restarts its instances."""
        self.asked = 0
        """The question to the shell whether they fit together."""
        self.users = 0
        """Runs of ensembles that may still have something for it."""
        self.shape: Shape | None = None
        self.padding: PaddingPolicy | None = None
        self.prefetch = True
        self.plain = True
        """No priorities, no queue policy, no order to preserve: the short way in and out."""
        self.cached = False
        """Its answers are kept."""
        self.decoupled = False
        """It answers a request as often as it likes."""
        self.order: deque[Request] | None = None
        """With preserve_ordering: requests in the order of their arrival, until all before them have been answered."""
        self.order_swept = ORDER
        """From this length on those that left early are taken out."""
        self.idle: list[Instance] = []
        """Those with nothing to do; the one that became idle last is at the end, and used first: it is warm."""
        self.service_ns = 0
        """About how long a batch takes: an exponential mean, 0 before the first."""
        self.spread_ns = 0
        """About how far that is from the time after which the batch is known here to be done: a mean, too."""
        self.successor: Version | None = None
        """The generation that a restart has put in its place, and that takes its requests."""
        self.wake = 0
        """When what waits should be looked at again though nothing happens; 0: not."""
        self.statistics = Statistics()

    @property
    def label(self) -> str:
        return f"model '{self.model}' version {self.number}"

    def adopt(self, policy: ModelPolicy, cache: bool = False) -> None:
        """What it looks like is known. `cache`: the server keeps answers."""
        self.policy = policy
        self.checker = Checker(policy)
        self.queue = RequestQueue(policy.batching)
        self.decoupled = policy.decoupled
        if policy.sequence is not None:
            self.places = Places(policy.sequence)
            self.plain = self.prefetch = False
            if policy.max_batch > 0:
                self.shape = Shape.of(policy.max_batch, policy.sequence.batching, self.checker.varies)
        if policy.steps is not None:
            self.graph = Graph(policy)
            self.plain = False
        batching = policy.batching
        if batching is not None:
            if policy.max_batch > 0:
                self.shape = Shape.of(policy.max_batch, batching, self.checker.varies)
                self.padding = policy.padding
            self.prefetch = _sends_ahead(batching)
            self.plain = self.prefetch and not batching.preserve_ordering
            if batching.preserve_ordering and not policy.decoupled:
                self.order = deque()
        # What must be answered in the order of its arrival cannot overtake what is being run.
        self.cached = cache and policy.cached and self.order is None and not policy.decoupled and not policy.sequence
        if self.cached:
            self.plain = False

    def move(self, finish: VersionState, reason: str = "") -> None:
        self.state = legal(VERSION_MOVES, self.label, self.state, finish, f"{len(self.instances)} instances")
        self.reason = reason

    def take_traceback(self) -> str:
        """For the record of a failed load. "" if the last attempt that was logged ended in the same way."""
        found, self.traceback = self.traceback, ""
        if found == self.logged_traceback:
            return ""
        self.logged_traceback = found
        return found

    @property
    def healthy(self) -> bool:
        """Can somebody run a request now, or after the batches that run?"""
        if self.graph is not None:
            return self.state is VersionState.READY and all(member.healthy for member in self.members)
        return self.state is VersionState.READY and any(instance.usable for instance in self.instances)

    @property
    def alive(self) -> bool:
        """Will what waits here be run?"""
        return any(instance.alive for instance in self.instances)

    @property
    def recovering(self) -> bool:
        """It was READY and has no instance left, but goes on trying to restart them."""
        if self.state is not VersionState.UNAVAILABLE or not self.took_ns:
            return False
        return any(not instance.over for instance in self.instances)

    @property
    def returns(self) -> bool:
        """It is not READY, and becomes so by itself once its instances, or those of its steps, can be restarted."""
        return self.recovering or self.member_recovering

    @property
    def counts(self) -> tuple[int, int]:
        """How many instances serve fully, and how many are meant to."""
        wanted = [i for i in self.instances if not (i.over or i.spec.passive or i.replaces)]
        return sum(i.state is InstanceState.READY and not i.quarantined for i in wanted), len(wanted)

    @property
    def trouble(self) -> str:
        """Why some of its instances do not serve; "" if all do."""
        return "; ".join(
            f"instance '{instance.spec.name}'{' is quarantined' if instance.quarantined else ''}: {instance.reason}"
            for instance in self.instances
            if instance.degraded
        )

    @property
    def loaded(self) -> bool:
        """Every instance that is to serve is there."""
        return all(instance.state is InstanceState.READY or instance.over for instance in self.instances)

    @property
    def batches(self) -> bool:
        return self.policy is not None and self.policy.max_batch > 0

    @property
    def waits(self) -> int:
        """Requests that no worker has."""
        if self.places is not None:
            return self.places.waits
        return self.queue.count + len(self.suspects)

    @property
    def waiting_bytes(self) -> int:
        """Inside the messages of what waits."""
        return self.queue.bytes if self.places is None else self.places.bytes

    def drop(self, request: Request) -> None:
        """It waits no more."""
        if request.sequence is not None:
            request.sequence.drop(request)
        elif request.suspect:
            self.suspects.remove(request)
        else:
            self.queue.remove(request)

    @property
    def finished(self) -> bool:
        """Nothing waits, runs or is still read, and no run of an ensemble needs it."""
        if self.waits or self.users or (self.places is not None and self.places.count):
            return False
        return all(instance.idle and not instance.streams for instance in self.instances)

    def needs(self, instance: Instance) -> bool:
        """Is there what no other instance could go on with?"""
        if self.places is not None:
            return bool(self.places.at(instance))
        return self.decoupled and not (instance.idle and not instance.streams)

    @property
    def gone(self) -> bool:
        """It has no process, and none is to come."""
        return not any(instance.peer or not instance.over for instance in self.instances)

    @property
    def heir(self) -> Version:
        """Where a request that comes back from one of its instances is queued."""
        found = self
        while found.successor is not None:
            found = found.successor
        return self if found.gone else found

    def count_padding(self, batch: Batch) -> None:
        """Of a batch that has run."""
        if self.padding is not None:
            longest, useful = batch.lengths()
            elements = batch.rows * rounded(longest, self.padding)
            self.statistics.elements += elements
            self.statistics.padded_elements += elements - useful

    def served(self, service_ns: int, seen_ns: int) -> None:
        """A batch took so long, and `seen_ns` from here."""
        self.spread_ns += (abs(seen_ns - (self.service_ns or service_ns)) - self.spread_ns) // 16
        self.service_ns = service_ns if not self.service_ns else (7 * self.service_ns + service_ns) // 8


def _sends_ahead(policy: BatchPolicy) -> bool:
    """Requests whose place in the queue may still change stay here until an instance is idle."""
    plain = QueuePolicy()
    return policy.levels == 0 and policy.default_policy == plain

"""A version of a model: its state, what waits for it, and who runs it."""

from __future__ import annotations

from collections import deque

from msgspec import Struct, field

from shmserve.core.batching.form import Plan, Reason, Shape, form
from shmserve.core.batching.padding import form_padded, rounded
from shmserve.core.batching.queue import RequestQueue
from shmserve.core.ensembles.graph import Graph
from shmserve.core.events import Target
from shmserve.core.models.instance import Batch, Instance
from shmserve.core.policy import BatchPolicy, ModelPolicy, PaddingPolicy, QueuePolicy
from shmserve.core.requests.request import Request
from shmserve.core.requests.validation import Checker
from shmserve.core.sequences.sequence import Places
from shmserve.core.states import VERSION_MOVES, InstanceState, VersionState, legal
from shmserve.core.stats.statistics import Loads, Statistics

ORDER = 256
"""With preserve_ordering: up to here `Version.order` is not swept."""


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
        self.queue = RequestQueue(None)
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
            self.prefetch = sends_ahead(batching)
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

    # ------------------------------------------------------------------------------------ what to do next

    def plan(self, now: int, alone: bool = False) -> Plan:
        """The next batch; `alone`: of one request."""
        if alone or self.shape is None:
            return Plan(1, self.queue.first(1)[0].cost, Reason.ALONE if alone else Reason.SINGLE)
        if self.padding is not None:
            waiting = self.queue.first(self.padding.lookahead)
            return form_padded(waiting, self.shape, self.padding, now, self._urgent(now))
        return form(self.queue.first(self.shape.enough), self.shape, now)

    def plan_extension(self, batch: Batch, now: int) -> Plan:
        shape = self.shape
        if shape is None or batch.rows in shape.preferred or batch.rows >= shape.max_batch:
            return Plan(0, 0, batch.reason)
        if self.padding is not None:
            waiting = self.queue.first(self.padding.lookahead)
            base = batch.rows, batch.signature, *batch.lengths()
            return form_padded(waiting, shape, self.padding, now, self._urgent(now), *base)
        return form(self.queue.first(shape.enough), shape, now, batch.rows, batch.signature)

    def _urgent(self, now: int) -> int:
        """A request whose time is over before this might be too late if another batch ran first."""
        return now + 2 * self.service_ns + 4 * self.spread_ns

    def planned(self, plan: Plan) -> list[Request]:
        """What the plan is about."""
        if plan.chosen is None:
            return self.queue.first(plan.count)[: plan.count]
        waiting = self.queue.first(plan.chosen[-1] + 1)
        return [waiting[place] for place in plan.chosen]

    def take(self, plan: Plan) -> list[Request]:
        """The same, out of the queue."""
        return self.queue.take(plan.count) if plan.chosen is None else self.queue.pick(plan.chosen)

    def sends_ahead(self, prefetch_ns: int) -> bool:
        """May a batch wait at a busy instance?"""
        return self.prefetch and (len(self.instances) == 1 or self.service_ns <= prefetch_ns)

    def busy(self) -> list[Instance]:
        """Those that have something to do; the one that will probably be done first is first."""
        kept = (self.trial, self.reserved)
        busy = [
            i for i in self.instances if not i.idle and i.usable and i not in kept and not i.waits and not i.quarantined
        ]
        if len(busy) > 1:
            busy.sort(key=_began)
        return busy

    def place_for(self, suspect: Request) -> Instance | None:
        """Where it is run again: if possible not where its worker died, and where it can begin first."""
        able = [i for i in self.instances if i.usable and not i.leaving and not i.waits]
        return min(
            able,
            key=lambda i: (i.quarantined, i is suspect.suspect, not i.idle, i.waiting is not None, _began(i)),
            default=None,
        )

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


class Operation(Struct, eq=False):
    """A Deploy or Restart under way: what it still waits for, and what goes when nothing of that is left."""

    numbers: list[int]
    """Who is to be told; more than one if the same was asked again meanwhile."""
    targets: tuple[Target, ...]
    beside: bool
    """Something is served meanwhile."""
    restart: bool = False
    """What is served is replaced by itself, which takes its requests."""
    loading: dict[Version, None] = {}
    starting: dict[Instance, Version] = {}
    """Those added to versions that are served."""
    added: list[tuple[Version, Instance]] = []
    surplus: list[tuple[Version, Instance]] = []
    dropped: list[int] = []
    """Versions that are not to be served any more."""
    failures: list[str] = []
    traceback: str = ""
    """Of the model, for the log."""


class FailedChange(Struct, frozen=True):
    """A load or restart that has failed, or a state of the files that cannot be served, and when that was found."""

    reason: str
    at: int


class Unloading(Struct, eq=False):
    """An Unload under way."""

    number: int
    versions: list[Version]


class Departure(Struct, eq=False):
    """Instances that a change has taken from versions that go on: it is over when their processes have ended. Those
    that stay for sequences or streams are not waited for."""

    numbers: list[int]
    """The operations that are told then."""
    instances: list[Instance]


class Model(Struct, eq=False):
    """All versions of one name that are or were known."""

    name: str
    versions: dict[int, Version] = {}
    """What each number stands for now."""
    coming: dict[int, Version] = {}
    """Generations that will take over from those in `versions`."""
    leaving: list[Version] = []
    """Generations that were replaced and still have something to finish, or a process that has not ended."""
    reason: str = ""
    failed: FailedChange | None = None
    """The last change, if it has failed."""
    operation: Operation | None = None
    unloading: list[Unloading] = []
    departures: list[Departure] = []
    loads: Loads = field(default_factory=Loads)

    def default(self) -> Version | None:
        """The highest version that is READY."""
        ready = [version for version in self.versions.values() if version.state is VersionState.READY]
        return max(ready, key=lambda version: version.number, default=None)

    @property
    def is_served_meanwhile(self) -> bool:
        """What loads now is loaded beside versions that are served."""
        return self.operation is not None and self.operation.beside

    def generations(self) -> list[Version]:
        return [*self.versions.values(), *self.coming.values(), *self.leaving]


def _began(instance: Instance) -> int:
    return instance.running.began if instance.running is not None else 0


def sends_ahead(policy: BatchPolicy) -> bool:
    """Requests whose place in the queue may still change stay here until an instance is idle."""
    plain = QueuePolicy()
    return policy.levels == 0 and policy.default_policy == plain

"""State shared by the parts of the core: tables of all records, work lists and effects of the current turn, and timers.

Parts of the core do not call upwards. Where one causes work for a part above it, it adds to a work list here
(`to_dispatch`, `runs.to_advance`, `changes` and more), which `Core` processes at the end of the turn.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from enum import Enum, auto
from itertools import count
from typing import Any, TypeAlias

from shmserve.core.effects import Effect, Log, Send
from shmserve.core.ledger import INTERNAL, Ledger
from shmserve.core.limits import Limits
from shmserve.core.owners.cache import Cache
from shmserve.core.owners.model import Model
from shmserve.core.owners.observers import Observers
from shmserve.core.owners.outputs import Outputs
from shmserve.core.owners.progress import Changes, Loading, Memory
from shmserve.core.owners.rate_limiter import Limiter
from shmserve.core.owners.run import Runs
from shmserve.core.records import (
    CallingWorker,
    ClientState,
    CopyRequest,
    Instance,
    Key,
    Lease,
    Request,
    Sequence,
    Version,
)
from shmserve.core.states import RequestState, SequenceState, VersionState
from shmserve.core.stats.callers import Caller, Callers
from shmserve.core.traffic import ALIAS, Shadow, Split, Traffic
from shmserve.errors import InvalidRequest, NotFound
from shmserve.protocol.namespaces import SEPARATOR, namespace_of, plain

WORKERS_FROM = 1 << 30
"""Peer numbers: 0 is the broker itself; below this number are clients, numbered by the shell; from it on are workers,
numbered by the core."""

SWEPT_TIMERS = 4096
"""Minimum of `State._sweep_at`."""

STOPPING = "Server is stopping, scheduler for model has stopped accepting new inference requests"

Subject: TypeAlias = "Request | Instance | Sequence | Version | None"

_LIVE = (RequestState.QUEUED, RequestState.SENT, RequestState.DONE, RequestState.CHAINED, RequestState.OPEN)
"""States of requests that have not been answered."""


class Timer(Enum):
    DEADLINE = auto()  # the request's own timeout
    QUEUE = auto()  # the queue policy's timeout
    IDLE = auto()  # check whether a sequence has exceeded its idle time
    BACKLOG = auto()  # check whether a sequence has waited too long for a slot
    RETRY = auto()  # start an instance again
    LATE = auto()  # check whether an instance has exceeded the load limit
    HANG = auto()  # check whether an instance has exceeded the execution limit
    UNREAD = auto()  # check whether a caller who accepts no more responses delays others
    RECALL = auto()  # check whether a replaced instance has returned its unstarted requests
    OVERDUE = auto()  # check whether a replaced instance has finished its running batch
    LEAVE = auto()  # end of the grace period for the sequences of an unloaded version
    ROOM = auto()  # re-evaluate which versions make room in memory
    UNUSED = auto()  # check whether a version has been idle for long enough to go to sleep
    SCALE = auto()  # measure whether a version has enough instances
    DRAIN = auto()  # end of the grace period at shutdown


class State:
    """The state of one core. Invariant: only the core changes it."""

    def __init__(self, limits: Limits, tracing: bool) -> None:
        self.limits = limits
        self.now = 0
        """Time of the current turn."""
        self.clients: dict[int, ClientState] = {}
        self.callers: dict[tuple[str, bool], Callers] = {}
        """By user, and whether its clients are gateways of the server."""
        self._caller_numbers = count(-1, -1)
        self.models: dict[str, Model] = {}
        self.namesakes: dict[str, list[Model]] = {}
        """Name without the namespace -> the models that have it, one in each namespace."""
        self.ready: dict[str, Version] = {}
        """Model name or alias -> the version for requests that do not name one."""
        self.splits: dict[str, Split] = {}
        """Models whose requests are divided among several versions."""
        self.shadows: dict[str, Shadow] = {}
        """Models that have a shadow."""
        self.shadowed: dict[int, tuple[Shadow, CopyRequest]] = {}
        """Requests in flight that are repeated at a shadow when they are answered."""
        self.compared_bytes = 0
        """Bytes of tensors in shared memory that requests of shadows keep."""
        self.ledger = Ledger()
        self.outputs = Outputs(self.ledger)
        self.shadow_client = ClientState(0, INTERNAL, "", self.ledger, "frames", "shadow", gone=True, user="shadow")
        """The client that pays for requests of shadows."""
        self.requests: dict[int, Request] = {}
        self.runs = Runs()
        self.instances: dict[int, tuple[Version, Instance]] = {}
        """Worker -> its version and instance. Entries are removed when the process has ended."""
        self.loaded_versions: dict[Version, None] = {}
        """Versions that are no longer loading, and the requests that waited for that have not been checked."""
        self.leases: dict[int, Lease] = {}
        self.offers: dict[int, Lease] = {}
        """Leases that begin once their versions have no requests."""
        self.lease_suspects: dict[tuple[int, int], tuple[int, Instance]] = {}
        """(client, number) of the first of the leased requests that a worker was running when it died -> the number of
        the last, and the worker's instance. They are suspects if sent again."""
        self.cache = Cache(limits.cache_bytes, self.ledger, self.outputs)
        self.limiter = Limiter(limits.resources) if limits.rate_limit else None
        self.effects: list[Effect] = []
        self.to_dispatch: dict[Version, None] = {}
        """Versions to dispatch after all events of this turn have been processed."""
        self.abandoned: Counter[str] = Counter()
        """User -> number of streams that no client reads any more but the model has not ended."""
        self.sequences: dict[Key, Sequence] = {}
        """Sequences that further requests may continue."""
        self.lost_sequences: dict[Key, tuple[str, str]] = {}
        """Error code and text of sequences that ended without END, for requests that would continue them."""
        self.ensembles: dict[Version, None] = {}
        """Deployed ensembles."""
        self.readiness_changed = False
        """Re-evaluate the readiness of ensembles at the end of the turn: what it depends on may have changed."""
        self.changed_models: dict[str, None] = {}
        """Models that were deployed in this turn, or whose default version may have changed."""
        self.wakes: dict[Version, int] = {}
        """Version -> when to dispatch it if no event does so earlier, e.g. at the end of a queue delay."""
        self.loading = Loading()
        self.changes = Changes()
        self.memory = Memory(bool(limits.memory_budget or limits.gpu_budgets))
        self.blocked_instances: dict[Instance, None] = {}
        """Instances that are blocked until the models they called have answered."""
        self.answered_calls: list[CallingWorker] = []
        """Workers for which calls were answered in this turn that have been blocking their instance, one for each."""
        self.deadlock_possible = False
        """Instances that call each other's models may have deadlocked; check at the end of the turn. Set when an
        instance leaves, and when a step starts to wait for resources."""
        self.observers = Observers(self, limits.contexts_per_second)
        self.tracing = tracing
        """Log each batch with the reason for which it was formed."""
        self.draining = self.drained = False
        """`draining`: the server is stopping and accepts no requests. `drained`: all requests have been answered."""
        self.out_of_service = False
        """An operator took the server out of service: it reports not ready, but still accepts requests."""
        self._timers: list[tuple[int, int, Timer, Subject]] = []
        """Heap: time, a number that makes entries comparable, kind and subject. May contain obsolete timers."""
        self._sweep_at = SWEPT_TIMERS
        """Number of timers above which obsolete ones are removed."""
        self.next_number: Callable[[], int] = count(1).__next__
        """A number for a request, an Execute, a lease or a Compose: increasing, never reused."""
        self.worker_numbers = count(WORKERS_FROM + 1)
        self._timer_numbers = count()

    def callers_of(self, user: str, trusted: bool) -> Callers:
        """Those for whom the clients of this user speak. `trusted`: the clients are gateways of the server."""
        callers = self.callers.get((user, trusted))
        if callers is None:
            callers = self.callers[user, trusted] = Callers(user, trusted, self._caller_numbers)
        return callers

    def known_callers(self) -> list[Caller]:
        return [caller for callers in self.callers.values() for caller in callers.values()]

    def begin(self) -> list[Effect]:
        """Begins a turn. Returns the list that will contain its effects."""
        effects: list[Effect] = []
        self.effects = self.ledger.effects = effects
        if self.changed_models:
            self.changed_models.clear()
        return effects

    def send(self, peer: int, message: object) -> None:
        self.effects.append(Send(peer, message))

    def log(self, level: str, text: str, **fields: Any) -> None:
        self.effects.append(Log(level, text, fields or None))

    def log_version(self, level: str, text: str, version: Version, instance: Instance | None = None) -> None:
        fields = {"instance": instance.spec.name} if instance is not None else {}
        self.log(level, text, model=version.model, version=version.number, **fields)

    def refresh(self, name: str) -> None:
        """Updates `ready` and the readiness of ensembles. Call when the default version of a model may have changed."""
        self.readiness_changed = True
        self.changed_models[name] = None
        model = self.models.get(name)
        if model is None:
            self.ready.pop(name, None)
            self.shadows.pop(name, None)
            return
        self._set_shadow(model)
        weights = model.weights()
        split = self.splits.pop(name, None)
        if len(weights) > 1:
            self.splits[name] = split if split is not None and split.weights == weights else Split(weights)
        self._route(name, model.versions[weights[0][0]] if weights else None)
        for alias, number in model.traffic.aliases.items():
            if (full := f"{name}{ALIAS}{alias}") not in self.models:
                self._route(full, model.versions[number] if model.is_ready(number) else None)

        for version in model.versions.values():
            if version.unchecked.count:
                self._end_waiting(version, self.ready.get(name))

    def _end_waiting(self, version: Version, default: Version | None) -> None:
        """Ends the wait for a version that is no longer loading, and that of requests that name no version and can be
        served by another one."""
        if version.state is not VersionState.LOADING:
            self.loaded_versions[version] = None
        elif default is not None:
            for request in version.unchecked.take(version.unchecked.count):
                named = request.unchecked is not None and request.unchecked.version
                request.taken_over(version if named else default)
                request.version.unchecked.add(request)
            if default.unchecked.count:
                self.loaded_versions[default] = None

    def _set_shadow(self, model: Model) -> None:
        before = self.shadows.pop(model.name, None)
        for number, percent in model.traffic.shadow.items():
            same = before is not None and (before.version, before.percent) == (number, percent)
            self.shadows[model.name] = before if before is not None and same else Shadow(number, percent)

    def _route(self, name: str, version: Version | None) -> None:
        if version is None:
            self.ready.pop(name, None)
        else:
            self.ready[name] = version

    def set_traffic(self, name: str, traffic: Traffic) -> None:
        model = self.models[name]
        for alias in model.traffic.aliases:
            if (full := f"{name}{ALIAS}{alias}") not in self.models:
                self.ready.pop(full, None)
        model.traffic = traffic
        self.refresh(name)

    def choose_versions(self) -> None:
        """Chooses, for this turn, the versions for requests that name none."""
        for name, split in self.splits.items():
            self.ready[name] = self.models[name].versions[split.choose()]

    def model(self, name: str) -> Model:
        """The model of that name, which is added if there is none."""
        model = self.models.get(name)
        if model is None:
            model = self.models[name] = Model(name)
            if SEPARATOR in name:
                self.namesakes.setdefault(plain(name), []).append(model)
        return model

    def full_name(self, name: str, namespace: str = "") -> str:
        """The name with a namespace: the given one if it has such a model, else that of the only one. Unknown names
        stay as they are. Raises InvalidRequest if several namespaces have it."""
        if not self.namesakes or name in self.models:
            return name
        base, at, alias = name.partition(ALIAS) if name not in self.namesakes else (name, "", "")
        wanted = [model.name for model in self.namesakes.get(base, ()) if model.is_wanted]
        own = [full for full in wanted if namespace_of(full) == namespace]
        if len(own or wanted) > 1:
            places = ", ".join(f"'{full}'" for full in sorted(wanted))
            raise InvalidRequest(
                f"There are {len(wanted)} identifiers of model '{base}' in global map, model namespace must be "
                f"provided to resolve ambiguity: {places}"
            )
        if not wanted:  # its state tells why no request is served
            wanted = [model.name for model in self.namesakes.get(base, ())]
        return f"{(own or wanted)[0]}{at}{alias}" if wanted else name

    def resolve(self, name: str, near: str = "") -> str:
        """The full name of the model that the name means to the model `near`. Ambiguous names stay as they are."""
        try:
            return self.full_name(name, namespace_of(near))
        except InvalidRequest:
            return name

    def look_up(self, name: str, number: int) -> Version:
        """The version that serves requests for this name and number (0: the default version). Raises if none does."""
        if not number and name in self.ready:
            return self.ready[name]
        model = self.models.get(name)
        if model is None:
            return self._look_up_alias(name, number)
        return model.version(number) if number else model.default_version()

    def loading_version(self, name: str, number: int) -> Version | None:
        """The version that will serve these requests once it has loaded, if there is one. Call it if `look_up` finds no
        version that serves them now."""
        model = self.models.get(name)
        if model is None:
            base, _, alias = name.rpartition(ALIAS)
            model = self.models.get(base)
            own = model.traffic.aliases.get(alias, 0) if model is not None else 0
            number = own if number in (0, own) else 0
            if not number:
                return None
        return model.loading_version(number) if model is not None else None

    def _look_up_alias(self, name: str, number: int) -> Version:
        base, _, alias = name.rpartition(ALIAS)
        model = self.models.get(base)
        if model is None:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        aliases = model.traffic.aliases
        if alias not in aliases:
            known = f"it has {', '.join(sorted(aliases))}" if aliases else "it has none"
            raise NotFound(f"Request for unknown model: '{base}' has no alias '{alias}'; {known}")
        if number not in (0, aliases[alias]):
            raise InvalidRequest(f"'{name}' is version {aliases[alias]}, but the request is for version {number}")
        return model.version(aliases[alias])

    # ------------------------------------------------------------------------------------ time

    def set_timer(self, at: int, kind: Timer, subject: Subject) -> None:
        heapq.heappush(self._timers, (at, next(self._timer_numbers), kind, subject))
        # Most timers belong to requests that are answered before they expire.
        if len(self._timers) > self._sweep_at:
            self._timers = [entry for entry in self._timers if _live(entry[3])]
            heapq.heapify(self._timers)
            self._sweep_at = max(SWEPT_TIMERS, 2 * len(self._timers))

    def due(self, now: int) -> list[tuple[Timer, Subject]]:
        """Removes and returns the expired timers."""
        due = []
        timers = self._timers
        while timers and (timers[0][0] <= now or not _live(timers[0][3])):
            _, _, kind, subject = heapq.heappop(timers)
            if _live(subject):
                due.append((kind, subject))
        return due

    def deadline(self) -> int | None:
        """The earliest time at which `tick` is due."""
        if self.runs.with_rows.users:
            return self.now
        timers = self._timers
        while timers and not _live(timers[0][3]):
            heapq.heappop(timers)
        first = timers[0][0] if timers else None
        if self.wakes:
            wake = min(self.wakes.values())
            return wake if first is None or wake < first else first
        return first


def _live(subject: Subject) -> bool:
    """False if timers of this subject are obsolete: the request was answered, or the sequence has ended."""
    if isinstance(subject, Request):
        return subject.state in _LIVE
    return not isinstance(subject, Sequence) or subject.state is not SequenceState.ENDED

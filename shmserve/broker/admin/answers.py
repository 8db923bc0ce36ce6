"""Answers queries that the core passes on: at once, or when the information that they wait for is known."""

from __future__ import annotations

from collections.abc import Callable, Collection, Set
from typing import Any

import msgspec
from msgspec import Struct

from shmserve.broker.admin.queries import Control, Shared
from shmserve.broker.admin.readiness_probes import Probes
from shmserve.broker.models.operations import ClientOperations
from shmserve.core.traffic import ALIAS
from shmserve.errors import InvalidRequest
from shmserve.protocol.bodies import MALFORMED
from shmserve.protocol.messages import Answer, Ask, Cancel, Changed, Fail

NOTIFIED = 64
"""Maximum number of deferred queries answered per turn."""
WAITING = 512
"""Maximum number of queries of one peer that wait for models. Further ones are answered at once: a gateway needs some
of its queries (client_questions) for health checks and other callers."""

Waiting = dict[int, list[Ask]]
"""Queries by peer."""


class _ConfigArguments(Struct):
    """`wait`: until the model has been loaded. `follow`: the client keeps the answer until it receives a Changed."""

    wait: bool = False
    follow: bool = False


class QueryAnswers:
    """`roles_of` returns the roles of a peer, as bits of shmserve.protocol.roles."""

    def __init__(
        self,
        control: Control,
        probes: Probes,
        operations: ClientOperations,
        send: Callable[[int, Any], None],
        roles_of: Callable[[int], int],
    ) -> None:
        self._operations = operations
        self._roles_of = roles_of
        self._control = control
        self.probes = probes
        self._send = send
        self._shared: Shared | None = None
        """Answers built in this turn, which remain valid until it ends. None between turns."""
        self._awaiting: dict[str, Waiting] = {}
        """Queries that wait until this model, or for "" each model, has loaded."""
        self._models: Waiting = {}
        """Queries that wait until the repositories have been read."""
        self._due: Waiting = {}
        """Queries that can be answered now."""
        self._held: Waiting = {}
        """Queries that could be answered, but whose peer is behind with reading."""
        self._behind: set[int] = set()
        self._followed: dict[int, set[str]] = {}
        """Peer -> the models, and aliases of models, whose configuration it has kept."""

    def begin(self, changed: Collection[str]) -> None:
        """`changed`: the models that may be served by other versions since this turn. Their followers learn it before
        anyone learns of the completion of a load."""
        self._shared = {}
        if changed:
            for peer, names in self._followed.items():
                for name in [name for name in names if name in changed or name.rpartition(ALIAS)[0] in changed]:
                    names.remove(name)
                    self._send(peer, Changed(name))

    def end(self) -> None:
        self._shared = None

    def notify(self) -> None:
        """Answers up to NOTIFIED queries that are due. Sending adds an event, so a turn for the others follows."""
        for model in [model for model in self._awaiting if not self._control.is_loading(model)]:
            self._move(self._awaiting.pop(model))
        if self._due:
            shared: Shared = {}
            for _ in range(NOTIFIED):
                if not self._due:
                    break
                peer = next(iter(self._due))
                asks = self._due.pop(peer)
                ask = asks.pop(0)
                if asks:
                    self._due[peer] = asks  # after the other peers
                self._answer(peer, ask, shared)

    def query(self, peer: int, ask: Ask | Cancel) -> None:
        if isinstance(ask, Cancel):
            self._operations.cancelled(peer, ask.request)
            self._stop_waiting(peer, ask.request)
            return
        if ask.model and ask.what not in ("load", "unload"):  # which also apply to all models of a name
            try:
                ask.model = self._control.full_name(ask.model)
            except InvalidRequest as error:
                self._send(peer, Fail(ask.request, error.code, error.message))
                return
        if ask.what == "models":
            self._models.setdefault(peer, []).append(ask)
            self._operations.refresh_from_disk(self._models_known)
        elif ask.what == "loaded" and self._control.is_loading():
            self._awaiting.setdefault("", {}).setdefault(peer, []).append(ask)
        elif (
            ask.what == "config"
            and _arguments(ask).wait
            and self._control.is_loading(ask.model)
            and self._may_wait(peer)
        ):
            self._awaiting.setdefault(ask.model, {}).setdefault(peer, []).append(ask)
        elif ask.what == "ready" and ask.model:
            instances = self._control.serving(ask)
            if not self.probes.probe(instances, lambda ready: self._answer_ready(peer, ask, ready)):
                self._answer(peer, ask)
        elif not self._operations.handle(peer, ask):
            self._answer(peer, ask)

    def fell_behind(self, peer: int) -> None:
        self._behind.add(peer)
        if peer in self._due:
            self._held[peer] = self._due.pop(peer)

    def caught_up(self, peer: int) -> None:
        self._behind.discard(peer)
        if peer in self._held:
            self._due[peer] = self._held.pop(peer)

    def peer_disconnected(self, peer: int) -> None:
        self._behind.discard(peer)
        self._followed.pop(peer, None)
        for waiting in (*self._awaiting.values(), self._models, self._due, self._held):
            waiting.pop(peer, None)

    def _may_wait(self, peer: int) -> bool:
        return sum([len(waiting.get(peer, ())) for waiting in self._awaiting.values()]) < WAITING

    def _stop_waiting(self, peer: int, request: int) -> None:
        """Answers a query that waits for a model at once, as its caller has cancelled it: the answer frees its place
        among the queries of the peer."""
        for model, waiting in self._awaiting.items():
            asks = waiting.get(peer, []) if model else []
            for ask in asks:
                if ask.request == request:
                    asks.remove(ask)
                    if not asks:
                        del waiting[peer]
                    self._move({peer: [ask]})
                    return

    def _models_known(self, changed: Set[int]) -> None:
        self._control.on_disk(changed)
        self._move(self._models)
        self.notify()

    def _move(self, waiting: Waiting) -> None:
        for peer, asks in waiting.items():
            due = self._held if peer in self._behind else self._due
            due.setdefault(peer, []).extend(asks)
        waiting.clear()

    def _answer_ready(self, peer: int, ask: Ask, ready: bool) -> None:
        if ready:  # according to the model
            self._answer(peer, ask)
        else:
            self._send(peer, Answer(ask.request, b'{"ready":false}'))

    def _answer(self, peer: int, ask: Ask, shared: Shared | None = None) -> None:
        if shared is None:
            shared = self._shared if self._shared is not None else {}
        messages = self._control.answer(ask, self._roles_of(peer), shared)
        for message in messages:
            self._send(peer, message)
        if ask.what == "config" and ask.body and isinstance(messages[0], Answer) and _arguments(ask).follow:
            if self._control.serves(ask.model):
                self._followed.setdefault(peer, set()).add(ask.model)
            else:  # which version will serve it is not known yet
                self._send(peer, Changed(ask.model))


def _arguments(ask: Ask) -> _ConfigArguments:
    """The arguments of a config query; the defaults if its body is malformed."""
    try:
        return msgspec.json.decode(ask.body or b"{}", type=_ConfigArguments)
    except MALFORMED:
        return _ConfigArguments()

"""The broker's event loop: passes events to the core, carries out the effects that it returns, and arms one timer.

One iteration is a turn; it processes everything received since the previous turn.
Invariant: decisions about requests, models and memory are made in the core, not here.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from shmserve.broker.admin.answers import QueryAnswers
from shmserve.broker.broker_memory import BrokerMemory
from shmserve.broker.instance_workers import InstanceWorkers
from shmserve.broker.leases import Leases
from shmserve.broker.link import PeerLink, close_all
from shmserve.broker.listeners.access import AccessRules, Principal
from shmserve.broker.listeners.client_flow import ClientContext, ClientFlow
from shmserve.broker.listeners.fair_turns import ClientTurns
from shmserve.broker.listeners.lane import OWN_DESCRIPTORS, LaneListener, open_to_group, raise_descriptor_limit
from shmserve.broker.listeners.output_backlog import OutputBacklog
from shmserve.broker.listeners.zmq_router import ZmqOutbox, ZmqRouter
from shmserve.broker.models.operations import ClientOperations
from shmserve.broker.observability import logs
from shmserve.broker.observability.logs import log_record
from shmserve.broker.peers import Peers
from shmserve.core import effects, events
from shmserve.core.core import Core
from shmserve.core.effects import Effect, Send
from shmserve.core.internal_errors import INTERNAL_ERROR
from shmserve.core.state import WORKERS_FROM
from shmserve.errors import ServeError
from shmserve.paths import BROKER, LANE
from shmserve.protocol import codec
from shmserve.protocol.messages import PACKET_MESSAGES, ClientMessage, Hello, Map, Part, Ping, Reply
from shmserve.protocol.worker_messages import Counted, Loaded, Probed, Trim
from shmserve.repo.storage.generation import ALL_DESCRIPTORS
from shmserve.system.polling import LoopPolling

log = logging.getLogger("shmserve")

PING_S = 10.0
"""Interval for pinging ZeroMQ clients and for releasing unused memory of the broker and of workers."""

_client_codec = codec.Codec(ClientMessage, PACKET_MESSAGES)


class BrokerSettings(NamedTuple):
    """`traced` is called with the trace of each completed request that was sampled."""

    runtime_dir: Path
    access: AccessRules
    busy_poll_ns: int
    traced: Callable[[effects.Traced], None]


class Broker:
    def __init__(
        self,
        loop: Any,
        core: Core,
        peers: Peers,
        memory: BrokerMemory,
        workers: InstanceWorkers,
        operations: ClientOperations,
        answers: QueryAnswers,
        settings: BrokerSettings,
    ) -> None:
        self._core = core
        self._loop = loop
        self._peers = peers
        self._inbox = peers.inbox
        self._links = peers.links
        self._memory = memory
        self._segments = memory.segments
        self._workers = workers
        self._operations = operations
        self._answers = answers
        self._polling = LoopPolling(loop, settings.busy_poll_ns)
        self._numbers = count(1)
        self._leases = Leases(self._links, self._inbox.put_from, workers.kill)
        self._turns = ClientTurns(self._inbox.wake)
        limits = core.state.limits
        backlog = OutputBacklog(limits.outbox_bytes, self._backlog_changed)
        self._clients = ClientContext(loop, self.deliver, self._ended, limits.client_outbox_bytes, self._turns, backlog)
        self._executing = False
        self._timer: Any = None
        self._timer_at = 0
        self._forgotten: list[int] = []
        self._on_turn: Callable[[], bool] | None = None
        self._listen(settings.runtime_dir, settings.access)
        self._pings = count(1)
        self._keepalive = loop.call_later(PING_S, self._ping_silent)
        self._actions = self._all_actions(settings.traced)

    def begin(self, on_turn: Callable[[], bool]) -> None:
        """Begins the turns. `on_turn` is called after each, until it returns False."""
        self._on_turn = on_turn
        self._inbox.begin(self._turn)

    def _listen(self, runtime_dir: Path, access: AccessRules) -> None:
        limits = self._core.state.limits
        raise_descriptor_limit(limits.connections + limits.segments + OWN_DESCRIPTORS + ALL_DESCRIPTORS)
        self._zmq_user = os.geteuid()
        self._zmq_roles = access.roles_of(Principal(self._zmq_user))
        self._zmq_used = False
        self._lane = LaneListener(runtime_dir / LANE, self._loop, access, self._lane_opened)
        self._zmq = ZmqRouter(
            runtime_dir / BROKER,
            self._segments,
            self._memory.frames,
            self._zmq_opened,
            f"uid:{self._zmq_user}",
            self._clients,
        )
        open_to_group(runtime_dir, access.socket_group)

    def _all_actions(self, traced: Callable[[effects.Traced], None]) -> dict[type, Callable[[Any], None]]:
        return {
            Send: self._send,
            effects.Spawn: lambda effect: self._workers.spawn(effect, self),
            effects.Kill: lambda effect: self._workers.kill(effect.peer, effect.reason),
            effects.Close: self._close,
            effects.StartLease: self._leases.start,
            effects.ReadLease: self._leases.read,
            effects.Pause: self._pause,
            effects.Free: lambda effect: self._memory.free(effect.handles),
            effects.Forget: lambda effect: self._forgotten.append(effect.segment),
            effects.Log: lambda effect: log_record(effect.level, effect.text, effect.fields),
            effects.Traced: traced,
            effects.Compose: self._operations.compose,
            effects.Settled: self._operations.settled,
            effects.Query: self._query,
            effects.Drained: lambda effect: self._loop.stop(),
        }

    # ------------------------------------------------------------------------------------ listeners

    def _lane_opened(self, sock: socket.socket, uid: int, roles: int) -> None:
        peer = next(self._numbers)
        user = f"uid:{uid}"
        self._links[peer] = self._clients.link(sock, peer, user, _client_codec)
        self._inbox.put(events.Opened(peer, user, "lane", roles))

    def _zmq_opened(self, make: Callable[[int], ZmqOutbox]) -> ZmqOutbox:
        peer = next(self._numbers)
        outbox = self._links[peer] = make(peer)
        self._zmq_used = True
        self._inbox.put(events.Opened(peer, f"uid:{self._zmq_user}", "zmq", self._zmq_roles))
        return outbox

    def _ended(self, peer: int, reason: str) -> None:
        if reason:
            log_record("info", f"client {peer}: {reason}", {"client": peer})
        self._peers.remove(peer)
        self._operations.peer_disconnected(peer)
        self._answers.peer_disconnected(peer)
        self._inbox.put(events.Closed(peer))

    def _backlog_changed(self, peer: int, behind: bool) -> None:
        if behind:
            self._answers.fell_behind(peer)
        else:
            self._answers.caught_up(peer)
        self._inbox.put(events.Behind(peer, behind))

    def _ping_silent(self) -> None:
        ask, lost = self._zmq.silent(self._core.state.clients)
        for outbox in ask:
            self._send(Send(outbox.peer, Ping(next(self._pings))))
        for outbox in lost:
            outbox.close("no answer to a ping")
        for segment in self._memory.trim():
            self._inbox.put(events.OwnSegmentGone(segment))
        for owner in self._core.state.ledger.owners_of_unused():
            if owner >= WORKERS_FROM:
                self._send(Send(owner, Trim()))
        if self._core.state.observers.traces.samples:
            for reading in self._leases.read_all():
                self._inbox.put(reading)
        self._flush()
        logs.flush()
        self._keepalive = self._loop.call_later(PING_S, self._ping_silent)

    # ------------------------------------------------------------------------------------ input

    def deliver(self, peer: int, messages: list[Any], descriptors: list[int]) -> None:
        """Queues the messages of a packet. Takes their descriptors, and replaces invalid messages with Garbled
        events."""
        inbox = self._inbox.events
        for message in messages:
            kind = type(message)
            if kind is codec.Refused:
                message = events.Garbled(message.request, message.text)
            elif kind is Map or kind is Loaded or kind is Hello:
                message = self._prepare(peer, message, descriptors)
            elif kind is Counted:
                self._workers.add_counters(peer, message, descriptors)
                continue
            elif kind is Probed:
                self._answers.probes.probed(peer, message)
                continue
            inbox.append((peer, message))
        if descriptors:
            close_all(descriptors)
        if not self._inbox.is_due:
            state = self._core.state
            if len(inbox) == 1 and len(state.requests) - len(state.runs) <= 1 and not self._executing:
                self._turn()  # no other request can join this turn: skip an event loop iteration
                return
            self._inbox.wake()

    def _prepare(self, peer: int, message: Map | Loaded | Hello, descriptors: list[int]) -> Any:
        """Takes the message's descriptor out of `descriptors`; the caller closes the remaining ones."""
        if isinstance(message, Hello):
            link = self._links.get(peer)
            if isinstance(link, ZmqOutbox):
                link.frames = message.outputs == "frames"
                self._zmq.watch(link, message.pid)
            return message
        if isinstance(message, Map) and message.name is not None:
            if peer >= WORKERS_FROM:
                self._segments.add_named(message, self._workers.process_of(peer))
            return message
        if not descriptors:
            return events.Garbled(0, f"{type(message).__name__} without a file descriptor")
        descriptor = descriptors.pop(0)
        try:
            if isinstance(message, Map):
                self._segments.add(peer, message, descriptor)
                return message
            return self._workers.compiled(peer, message.streams, descriptor)
        except ServeError as error:
            return events.Garbled(0, error.message, error.code)

    # ------------------------------------------------------------------------------------ the turn

    def _turn(self) -> None:
        self._inbox.hold()
        again = self._turns.begin()
        arrived = self._inbox.take()
        if again:
            self._inbox.wake()
        now = time.monotonic_ns()
        self._polling.wake(now)
        self._execute(self._core.handle(arrived, now))
        self._polling.wait(bool(self._core.state.requests))

    def _tick(self) -> None:
        self._timer = None
        # By this clock, the timer may fire slightly early. Treat the deadline as reached anyway.
        self._execute(self._core.tick(max(time.monotonic_ns(), self._timer_at)))

    def _execute(self, pending: list[Effect]) -> None:
        """Executes all effects before the next turn, so that messages are sent in the order of the turns."""
        self._executing = True  # `_flush` may deliver ZeroMQ input, which must not start a nested turn
        try:
            self._answers.begin(self._core.state.changed_models)
            self._run_actions(pending)
            self._answers.end()
            self._flush()
        finally:
            self._executing = False
        for segment in self._forgotten:
            self._segments.forget(segment)
        self._forgotten.clear()
        # A queued Deploy may use sources that no version uses yet.
        if self._operations.untidy and not self._inbox.events:
            self._operations.tidy()
        self._arm()
        self._answers.notify()
        if self._on_turn is not None and not self._on_turn():
            self._on_turn = None

    def _run_actions(self, pending: list[Effect]) -> None:
        actions = self._actions
        remaining = iter(pending)
        while True:
            try:
                for effect in remaining:
                    actions[type(effect)](effect)
                return
            except Exception:
                log.critical("%s, please report it: executing %s", INTERNAL_ERROR, type(effect).__name__, exc_info=True)

    def _send(self, effect: Send) -> None:
        link = self._links.get(effect.peer)
        if link is None:
            return
        message = effect.message
        kind = type(message)
        if kind is Map:
            link.maps = True
        elif (kind is Reply or kind is Part) and type(link) is ZmqOutbox and link.frames:
            self._zmq.reply(link, message)
            self._peers.unsent[link] = None
            return
        link.outbox.append(message)
        self._peers.unsent[link] = None

    def _flush(self) -> None:
        unsent = self._peers.unsent
        if not unsent:
            return
        self._peers.unsent = {}
        descriptor_of = self._segments.descriptor
        for link in unsent:
            try:
                link.flush(descriptor_of)
            except Exception:
                log.critical("%s, please report it: sending to peer %d", INTERNAL_ERROR, link.peer, exc_info=True)
                link.close(f"{INTERNAL_ERROR} while sending to it")
        if self._zmq_used:
            self._zmq.read_input()

    def _arm(self) -> None:
        """Arms the timer for the core's deadline if it has changed."""
        at = self._core.deadline()
        if at is None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return
        if self._timer is not None:
            if at == self._timer_at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_later(max(0, at - time.monotonic_ns()) / 1e9, self._tick)

    # ------------------------------------------------------------------------------------ effects

    def worker_exited(self, peer: int, pid: int, reason: str, loading_error: str, detail: str) -> None:
        self._peers.remove(peer)
        self._segments.worker_ended(pid)
        self._workers.keep_counters(peer)
        self._answers.probes.worker_exited(peer)
        self._answers.peer_disconnected(peer)
        self._inbox.put(events.Exited(peer, reason, loading_error, detail))
        self._operations.untidy = True
        self._operations.peer_disconnected(peer)  # the worker may have pending queries

    def _close(self, effect: effects.Close) -> None:
        link = self._links.get(effect.peer)
        if link is not None:
            link.closing = True
            self._peers.unsent[link] = None

    def _pause(self, effect: effects.Pause) -> None:
        link = self._links.get(effect.peer)
        client = link.flow if isinstance(link, PeerLink) else link
        if isinstance(client, ClientFlow | ZmqOutbox):
            client.pause(effect.until)

    def _query(self, effect: effects.Query) -> None:
        for reading in self._leases.read_all():
            self._core.count_leased(reading)
        self._answers.query(effect.peer, effect.ask)

    # ------------------------------------------------------------------------------------ close

    def close(self) -> None:
        """Closes everything. Call after the workers have exited."""
        self._operations.close()
        self._answers.probes.close()
        self._flush()
        self._leases.close()
        self._workers.close()
        self._keepalive.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._lane.close()
        for link in [link for peer, link in self._links.items() if peer < WORKERS_FROM]:
            link.close("")
        self._zmq.close()
        self._segments.close()
        self._memory.close()

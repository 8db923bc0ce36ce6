"""How the links of clients are read."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from shmserve.broker.link import BUSY_MESSAGES, Deliver, PeerLink, close_all
from shmserve.broker.listeners.fair_turns import (
    BYTES,
    CHEAP_BYTES,
    SHARE,
    ClientTurns,
    InputPause,
    refused,
    split,
    weight,
)
from shmserve.broker.listeners.output_backlog import BEHIND_BYTES, OutputBacklog
from shmserve.errors import Unavailable
from shmserve.protocol import codec as wire
from shmserve.protocol.descriptors import LOST
from shmserve.protocol.messages import Goodbye

log = logging.getLogger("shmserve")

PACKETS = 8
"""Maximum number of packets read in a row."""


class ClientContext(NamedTuple):
    """Makes the links of clients. They call `deliver(peer, messages, descriptors)` and `ended(peer, reason)`;
    `outbox_bytes` limits what a client has not read."""

    loop: Any
    deliver: Deliver
    ended: Callable[[int, str], None]
    outbox_bytes: int
    turns: ClientTurns
    backlog: OutputBacklog

    def link(self, sock: socket.socket, peer: int, user: str, codec: wire.Codec) -> PeerLink:
        flow = partial(ClientFlow, user=user, context=self)
        return PeerLink(sock, peer, codec, flow, self.ended, self.loop, self.outbox_bytes)


class ClientFlow:
    """Reads a client's link in fair turns, and only while the client reads its responses.

    Invariant: while messages are left over, the link is queued in `turns`, paused or behind, and not read.
    """

    def __init__(self, link: PeerLink, user: str, context: ClientContext) -> None:
        self.peer = link.peer
        self.user = user
        self._link = link
        self._deliver = context.deliver
        self._turns = context.turns
        self._backlog = context.backlog
        self._pause = InputPause(context.loop)
        self._behind = False
        """The client does not read its responses. Its socket is not read until it has caught up."""
        self._left_over: list[Any] = []
        self._queued = False
        self._draining = False
        """The peer has closed. Event loops do not report such a socket, so it is read in turns until the end."""
        link.listen(self._readable)

    def process_input(self) -> None:
        self._queued = False
        if not self._may_read():
            return
        if self._take_share():
            self._wait()
        elif self._may_read():
            self._listen()

    def _may_read(self) -> bool:
        return self._link.readable and not self._pause.active and not self._behind

    def _readable(self) -> None:
        if self._take_share():
            self._wait()

    def _take_share(self) -> bool:
        """Delivers this link's share of the turn. True if it has more input."""
        link, turns = self._link, self._turns
        share = turns.share()
        if not share:
            return True
        crowded = share < SHARE
        for _ in range(PACKETS):
            descriptors: list[int] = []
            if self._left_over:
                messages, self._left_over = split(self._left_over, share)
                cost = weight(messages)
            else:
                draining, self._draining = self._draining, False
                packet = link.receive()  # sets _draining if the peer has closed
                if packet is None:
                    return self._draining
                self._draining = draining
                messages, descriptors = packet
                turns.charge(link.size // BYTES)
                cost = weight(messages)
                if descriptors:  # do not split: any of the messages may be a Map that needs one
                    refusal = refused(messages)
                    if refusal is not None:
                        close_all(descriptors)
                        messages, descriptors = [refusal], []
                elif cost > share:
                    messages, self._left_over = split(messages, share)
                    cost = weight(messages)
            turns.charge(cost)
            share -= cost
            self._deliver(link.peer, messages, descriptors)
            if not self._may_read():
                return False
            if self._left_over or self._draining:
                return True
            if share <= 0 and crowded:
                return True  # without checking: a turn without input costs less than registering with the loop again
            if cost < BUSY_MESSAGES or share <= 0:
                return False
        return False

    def _wait(self) -> None:
        if not self._queued:
            self._queued = True
            self._link.ignore()
            self._turns.wait(self, self._is_heavy())

    def _is_heavy(self) -> bool:
        """Whether the next input is expensive, by left-over messages or the size of the next packet."""
        return bool(self._left_over) or self._link.next_size() > CHEAP_BYTES

    def pause(self, until: int) -> None:
        """Stops reading until that time of the monotonic clock. Once its socket is full, the client's sends block."""
        if self._link.readable:
            self._link.ignore()
            self._pause.extend(until, self._listen)

    def _listen(self) -> None:
        if self._behind:
            return
        if self._left_over or self._draining:
            self._wait()
        else:
            self._link.listen(self._readable)

    def stop(self) -> None:
        self._pause.cancel()
        self._left_over = []
        self._leave_turns()

    def _leave_turns(self) -> None:
        if self._queued:
            self._queued = False
            self._turns.leave(self)

    def descriptors_lost(self) -> None:
        """Disconnects. The client reconnects and announces its segments again."""
        log.error("client %d disconnected: %s", self.peer, LOST)
        text = "the server has too many open files to map this client's shared memory; try again later"
        link = self._link
        link.outbox.append(Goodbye(Unavailable.code, text))
        link.closing = True
        link.flush(lambda segment: None)

    def drain(self) -> None:
        self._draining = True
        if self._may_read():
            self._wait()

    # ------------------------------------------------------------------------------------ output

    def cut_off(self, behind: str) -> None:
        self._link.cut_off(behind)

    def kept(self, size: int) -> None:
        link = self._link
        self._backlog.add(self, size)
        if link.unsent_bytes > BEHIND_BYTES and not self._behind and link.readable:
            self._behind = True
            link.ignore()
            self._leave_turns()
            self._backlog.changed(self.peer, True)

    def sent(self, size: int) -> None:
        self._backlog.read(self, size)
        if self._behind and self._link.unsent_bytes <= BEHIND_BYTES // 2 and self._link.open:
            self._behind = False
            self._backlog.changed(self.peer, False)
            if self._may_read():
                self._listen()

    def dropped(self) -> None:
        self._backlog.removed(self)

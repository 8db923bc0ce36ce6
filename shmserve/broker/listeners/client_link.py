"""A client's SEQPACKET link: reads in fair turns, and only while the client reads its responses."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

from shmserve.broker.link import BUSY_MESSAGES, PeerLink, close_all
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
_PEEK = int(socket.MSG_PEEK | socket.MSG_TRUNC | socket.MSG_DONTWAIT)
_one_byte = bytearray(1)


class ClientContext(NamedTuple):
    """What the links of all clients share. `deliver(peer, messages, descriptors)` and `ended(peer, reason)` are called
    by the links; `outbox_bytes` limits what a client has not read."""

    loop: Any
    deliver: Callable[[int, list[Any], list[int]], None]
    ended: Callable[[int, str], None]
    outbox_bytes: int
    turns: ClientTurns
    backlog: OutputBacklog


class ClientLink(PeerLink):
    """Invariant: while messages are left over, the link is queued in `turns`, paused or behind, and not read."""

    def __init__(
        self,
        sock: socket.socket,
        peer: int,
        user: str,
        codec: wire.Codec,
        context: ClientContext,
    ) -> None:
        loop, deliver, ended, outbox_bytes, self._turns, self._backlog = context
        super().__init__(sock, peer, codec, deliver, ended, loop, outbox_bytes)
        self.user = user
        self._pause = InputPause(loop)
        self._behind = False
        """The client does not read its responses. Its socket is not read until it has caught up."""
        self._left_over: list[Any] = []
        self._queued = False
        self._draining = False
        """The peer has closed. Event loops do not report such a socket, so it is read in turns until the end."""

    def process_input(self) -> None:
        self._queued = False
        if not self._may_read():
            return
        if self._take_share():
            self._wait()
        elif self._may_read():
            self._listen()

    def _may_read(self) -> bool:
        return self._sock is not None and not self._pause.active and not self._behind and self._linger_timer is None

    def _readable(self) -> None:
        if self._take_share():
            self._wait()

    def _take_share(self) -> bool:
        """Delivers this link's share of the turn. True if it has more input."""
        turns = self._turns
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
                packet = self._receive()  # sets _draining if the peer has closed
                if packet is None:
                    return self._draining
                self._draining = draining
                messages, descriptors = packet
                turns.charge(self._size // BYTES)
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
            self._deliver(self.peer, messages, descriptors)
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
            self._loop.remove_reader(self._fd)
            self._turns.wait(self, self._is_heavy())

    def _is_heavy(self) -> bool:
        """Whether the next input is expensive, by left-over messages or the size of the next packet, which is not
        read."""
        if self._left_over or self._sock is None:
            return True
        try:
            return self._sock.recv_into(_one_byte, 1, _PEEK) > CHEAP_BYTES
        except OSError:
            return False

    def pause(self, until: int) -> None:
        """Stops reading until that time of the monotonic clock. Once its socket is full, the client's sends block."""
        if self._sock is not None and self._linger_timer is None:
            self._loop.remove_reader(self._fd)
            self._pause.extend(until, self._listen)

    def _listen(self) -> None:
        if self._behind:
            return
        if self._left_over or self._draining:
            self._wait()
        else:
            self._loop.add_reader(self._fd, self._readable)

    def _stop_reading(self) -> None:
        super()._stop_reading()
        self._pause.cancel()
        self._left_over = []
        if self._queued:
            self._queued = False
            self._turns.leave(self)

    def _lost_descriptors(self) -> None:
        """Disconnects. The client reconnects and announces its segments again."""
        log.error("client %d disconnected: %s", self.peer, LOST)
        text = "the server has too many open files to map this client's shared memory; try again later"
        self.outbox.append(Goodbye(Unavailable.code, text))
        self.closing = True
        self.flush(lambda segment: None)

    def drain(self) -> None:
        self._draining = True
        if self._may_read():
            self._wait()

    # ------------------------------------------------------------------------------------ output

    def _keep(self, packet: bytes, descriptors: list[int]) -> None:
        super()._keep(packet, descriptors)
        if self._linger_timer is None:
            self._backlog.add(self, len(packet))
        if self._unsent_bytes > BEHIND_BYTES and not self._behind and self._linger_timer is None:
            self._behind = True
            self._loop.remove_reader(self._fd)
            if self._queued:
                self._queued = False
                self._turns.leave(self)
            self._backlog.changed(self.peer, True)

    def _writable(self) -> None:
        before = self._unsent_bytes
        super()._writable()
        if self._unsent_bytes < before:
            self._backlog.read(self, before - self._unsent_bytes)
        if self._behind and self._unsent_bytes <= BEHIND_BYTES // 2 and self._sock is not None:
            self._behind = False
            self._backlog.changed(self.peer, False)
            if self._may_read():
                self._listen()

    def _drop_unsent(self) -> None:
        super()._drop_unsent()
        self._backlog.removed(self)

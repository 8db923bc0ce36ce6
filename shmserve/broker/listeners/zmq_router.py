"""The ZeroMQ listener: a ROUTER socket on ipc. Each identity is a client; a message is [packet, frame, frame, ...].

A frame holds the bytes of a tensor. Inputs are copied once: into the message if they are small, otherwise into the
broker's arena. Outputs are copied from the worker's segment for clients that requested frames. Only the broker's user
may connect, as ZeroMQ does not report the peer's user.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import zmq
from msgspec.structs import replace

from shmserve.broker.listeners.client_flow import ClientContext
from shmserve.broker.listeners.fair_turns import BYTES, CHEAP_BYTES, InputPause, refused, split, weight
from shmserve.broker.listeners.output_backlog import BEHIND_BYTES
from shmserve.broker.segments import Segments
from shmserve.core.events import Framed, Garbled
from shmserve.core.records import ClientState
from shmserve.errors import InvalidRequest, ProtocolError, ServeError, Unavailable
from shmserve.protocol import codec, zmq_frames
from shmserve.protocol.messages import (
    FRAME_BYTES,
    INLINE_BYTES,
    PACKET_BYTES,
    PACKET_MESSAGES,
    ClientMessage,
    Fail,
    Goodbye,
    Handle,
    Hello,
    Infer,
    Part,
    Reply,
    Tensor,
)
from shmserve.shm.arena import Arena
from shmserve.shm.extents import posix

MESSAGE_BYTES = 8 * 1024 * 1024
"""Message size above which libzmq disconnects. For sizes between FRAME_BYTES and this, the broker reports an error."""
QUEUE = 128
"""Messages that libzmq queues per client, in each direction."""
SWEEP_S = 1.0
"""Delay before segments of a disconnected client are removed: its process may still be exiting, and a worker may be
about to open a segment that one of the client's requests names."""
BURST = 64
BURST_NS = 1_000_000
"""Number of messages, or time in ns, after which reading stops to let other callbacks run. This cannot be part of the
fair turns, as the sender of a message is known only after reading it."""
PENDING_MESSAGES = 250
PENDING_BYTES = 4 * MESSAGE_BYTES
"""Limits of queued input from a client that is paused, waiting for its turn, or behind. On the lane, such input stays
in the client's socket. Here it must be read and kept, so a client that exceeds a limit is disconnected."""
FREED = 16
"""Messages released per callback, as each may have hundreds of frames."""
DISCONNECTED = 4096
"""Number of identities of disconnected clients to remember."""


class ZmqOutbox:
    """One ZeroMQ client. Implements the part of PeerLink's interface that the loop uses."""

    def __init__(self, router: ZmqRouter, loop: Any, identity: bytes, user: str, peer: int) -> None:
        self.peer = peer
        self.identity = identity
        self.user = user
        self.outbox: list[Any] = []
        self.maps = False
        self.closing = False
        self.unsent: deque[list[bytes]] = deque()
        self.unsent_bytes = 0
        self.behind = False
        """The client does not read its responses. Its input is queued until it has caught up."""
        self.active = True
        self.frames = False
        """Send large outputs as frames, as requested in the client's Hello."""
        self.watch: int | None = None
        """A pidfd of the client's process, if its Hello gave the pid."""
        self.pid = 0
        self.paused = InputPause(loop)
        self.pending: deque[list[bytes]] = deque()
        """Messages received while the client is paused, queued or behind."""
        self.pending_bytes = 0
        self.left_over: list[Any] = []
        """Decoded messages beyond the client's share of a turn."""
        self.queued = False
        """The client is queued for its next turn."""
        self._router = router

    def flush(self, descriptor_of: Callable[[int], int | None]) -> None:
        messages, self.outbox = self.outbox, []
        self.maps = False
        if messages:
            for packet in codec.pack(messages):
                self._router.send(self, [packet])
        if self.closing:
            self.close("")

    def send_with_frames(self, message: Any, frames: list[bytes]) -> None:
        """Sends the outbox, then this message in a separate packet, as frames belong to a single message."""
        before, self.outbox = self.outbox, []
        for packet in codec.pack(before) if before else []:
            self._router.send(self, [packet])
        self._router.send(self, [codec.encode([message]), *frames])

    def pause(self, until: int) -> None:
        """Queues this client's input until the given time. The input must be read, as all clients share one socket."""
        self.paused.extend(until, partial(self._router.wait_for_turn, self))

    def process_input(self) -> None:
        self._router.process_input(self)

    def cut_off(self, behind: str) -> None:
        self.close(f"it does not read its responses: {behind}")

    def close(self, reason: str) -> None:
        self._router.drop(self, reason)


class ZmqRouter:
    """`opened(make)` gives a new client its number; `make(peer)` returns its outbox."""

    def __init__(
        self,
        path: Path,
        segments: Segments,
        arena: Arena,
        opened: Callable[[Callable[[int], ZmqOutbox]], ZmqOutbox],
        user: str,
        context: ClientContext,
    ) -> None:
        self._user = user
        self._loop, self._deliver, self._ended, self._outbox_bytes, self._turns, self._backlog = context
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE)
        self._socket.setsockopt(zmq.LINGER, 200)
        before = os.umask(0o177)  # bind also listens, so other users could connect before a chmod
        try:
            self._socket.bind(f"ipc://{path}")
        finally:
            os.umask(before)
        self._segments = segments
        self._arena = arena
        self._opened = opened
        self._decode = codec.Codec(ClientMessage, PACKET_MESSAGES).decode
        self._outboxes: dict[bytes, ZmqOutbox] = {}
        self._blocked: set[ZmqOutbox] = set()
        self._to_sweep: set[int] = set()
        self._disconnected: dict[bytes, None] = {}
        self._fd = self._socket.getsockopt(zmq.FD)
        self._loop.add_reader(self._fd, self._readable)

    # ------------------------------------------------------------------------------------ input

    def _readable(self) -> None:
        """Reads until the socket is empty, as its descriptor is edge-triggered; after BURST or BURST_NS, continues in a
        later callback."""
        socket, now = self._socket, time.monotonic_ns
        end = now() + BURST_NS
        for number in range(BURST):
            # After the first message, polling is cheaper than a failed receive. After more, another message is likely.
            if number == 1 and not zmq_frames.events(socket) & zmq_frames.IN:
                break
            try:
                parts = [socket.recv(zmq_frames.NOBLOCK), *zmq_frames.receive(socket)]  # the identity, then the message
            except zmq.Again:
                break
            self._take(parts)
            if now() > end or not self._turns.share():
                self._loop.call_soon(self.read_input)
                return
        else:
            self._loop.call_soon(self.read_input)
            return
        if self._blocked:
            self._retry()

    def read_input(self) -> None:
        """Reads any input. Call after sending, which may have consumed the descriptor's edge."""
        if not self._socket.closed and zmq_frames.events(self._socket) & zmq_frames.IN:
            self._readable()

    def _take(self, parts: list[bytes]) -> None:
        identity = parts[0]
        outbox = self._outboxes.get(identity)
        if outbox is None:
            if identity in self._disconnected and not self._reconnects(parts):
                return
            make = partial(ZmqOutbox, self, self._loop, identity, self._user)
            outbox = self._outboxes[identity] = self._opened(make)
        outbox.active = True
        if outbox.paused.active or outbox.queued or outbox.behind:
            outbox.pending.append(parts)
            outbox.pending_bytes += sum(map(len, parts))
            if len(outbox.pending) > PENDING_MESSAGES or outbox.pending_bytes > PENDING_BYTES:
                self._disconnect_flooding(outbox)
            return
        self._receive(outbox, parts)

    def _reconnects(self, parts: list[bytes]) -> bool:
        """Whether a disconnected client reconnects with a Hello. Other input is dropped without a reply, which would
        cost the broker more than sending costs the client."""
        try:
            return any(isinstance(message, Hello) for message in self._decode(parts[1] if len(parts) > 1 else b""))
        except ProtocolError:
            return False

    def _receive(self, outbox: ZmqOutbox, parts: list[bytes]) -> None:
        packet = parts[1] if len(parts) > 1 else b""
        try:
            messages = self._decode(packet)
        except ProtocolError as error:
            messages = [codec.Refused(0, error.message)]
        self._turns.charge(len(packet) // BYTES)
        share = max(1, self._turns.share())
        if len(parts) > 2:
            frames = parts[2:]
            refusal = refused(messages)
            if refusal is not None:
                messages = [refusal]
            messages = [
                self._with_frames(message, frames) if isinstance(message, Infer) else message for message in messages
            ]
        elif weight(messages) > share:
            messages, outbox.left_over = split(messages, share)
        self._pass_on(outbox, messages)

    def _pass_on(self, outbox: ZmqOutbox, messages: list[Any]) -> None:
        self._turns.charge(weight(messages))
        self._deliver(outbox.peer, messages, [])
        self.wait_for_turn(outbox)

    def wait_for_turn(self, outbox: ZmqOutbox) -> None:
        """Queues the client for its next turn if it has more input and is neither paused nor behind."""
        known = self._outboxes.get(outbox.identity) is outbox
        may_read = not (outbox.paused.active or outbox.behind)
        if known and not outbox.queued and may_read and (outbox.left_over or outbox.pending):
            outbox.queued = True
            size = 0 if outbox.left_over else sum(map(len, outbox.pending[0]))
            self._turns.wait(outbox, bool(outbox.left_over) or size > CHEAP_BYTES)

    def process_input(self, outbox: ZmqOutbox) -> None:
        """Processes the client's share of the turn."""
        outbox.queued = False
        if outbox.paused.active or outbox.behind:
            return
        share = self._turns.share()
        if outbox.left_over:
            messages, outbox.left_over = split(outbox.left_over, share)
            self._pass_on(outbox, messages)
        elif outbox.pending:
            parts = outbox.pending.popleft()
            outbox.pending_bytes -= sum(map(len, parts))
            self._receive(outbox, parts)

    def _disconnect_flooding(self, outbox: ZmqOutbox) -> None:
        text = (
            f"this client has sent more than {PENDING_MESSAGES} packets or {PENDING_BYTES} bytes while it was "
            "throttled for protocol errors (client_errors), was waiting for its turn, or had unread responses; read "
            "responses before sending more"
        )
        self._try(outbox, [codec.encode([Goodbye(Unavailable.code, text)])])
        outbox.closing = True
        self.drop(outbox, text)

    def _with_frames(self, infer: Infer, frames: Sequence[bytes]) -> Any:
        """Replaces frame numbers in the inputs with handles, or with the bytes of small frames."""
        total = sum(map(len, frames))
        if total > FRAME_BYTES:
            text = f"{total} bytes of frames in one message exceed the limit of {FRAME_BYTES}; use shared memory"
            return Garbled(infer.request, text, InvalidRequest.code)
        placed: dict[int, Handle] = {}
        try:
            for tensor in infer.inputs:
                number = tensor.data
                if not isinstance(number, int) or not 0 <= number < len(frames):
                    continue
                if len(frames[number]) <= INLINE_BYTES:
                    tensor.data = bytes(frames[number])
                    continue
                if number not in placed:  # several tensors may refer to one frame
                    placed[number] = self._place(frames[number])
                tensor.data = (placed[number],)
        except ServeError as error:
            free(self._arena, placed.values())
            return Garbled(infer.request, error.message, error.code)
        return Framed(infer, tuple(placed.values())) if placed else infer

    def _place(self, frame: bytes) -> Handle:
        block = self._arena.allocate(len(frame))
        block.memory()[: len(frame)] = frame
        return block.handle()

    # ------------------------------------------------------------------------------------ output

    def reply(self, outbox: ZmqOutbox, reply: Reply | Part) -> None:
        """Sends a response to a client that requested frames."""
        frames: list[bytes] = []
        outputs = []
        total = 0
        for tensor in reply.outputs:
            if isinstance(tensor.data, tuple):
                total += sum(handle.size for handle in tensor.data)
                if total > FRAME_BYTES:
                    text = (
                        f"the response has more than {FRAME_BYTES} bytes, the limit for frames; request fewer "
                        f"outputs, or connect with outputs in shared memory"
                    )
                    outbox.outbox.append(Fail(reply.request, InvalidRequest.code, text))
                    return
                frame = b"".join([self._segments.read(handle) for handle in tensor.data])
                outputs.append(Tensor(tensor.name, tensor.dtype, tensor.shape, len(frames)))
                frames.append(frame)
            else:
                outputs.append(tensor)
        if frames:
            outbox.send_with_frames(replace(reply, outputs=tuple(outputs)), frames)
        else:
            outbox.outbox.append(reply)

    def send(self, outbox: ZmqOutbox, parts: list[bytes]) -> None:
        if outbox.unsent or not self._try(outbox, parts):
            if self._outboxes.get(outbox.identity) is outbox:
                self._keep(outbox, parts)

    def _keep(self, outbox: ZmqOutbox, parts: list[bytes]) -> None:
        size = sum(map(len, parts))
        outbox.unsent.append(parts)
        outbox.unsent_bytes += size
        self._blocked.add(outbox)
        limit, waiting = self._outbox_bytes, outbox.unsent_bytes
        self._backlog.add(outbox, size)
        if self._outboxes.get(outbox.identity) is not outbox:
            return  # the backlog has disconnected it
        if waiting > limit:
            outbox.cut_off(f"{waiting} unsent bytes, over the limit of {limit} (client_outbox_bytes)")
        elif waiting > BEHIND_BYTES and not outbox.behind:
            outbox.behind = True
            if outbox.queued:
                outbox.queued = False
                self._turns.leave(outbox)
            self._backlog.changed(outbox.peer, True)

    def _try(self, outbox: ZmqOutbox, parts: list[bytes]) -> bool:
        gone = partial(self._loop.call_soon, outbox.close, "disconnected")
        return zmq_frames.send_to(self._socket, outbox.identity, parts, gone)

    def _retry(self) -> None:
        for outbox in list(self._blocked):
            while outbox.unsent and self._try(outbox, outbox.unsent[0]):
                size = sum(map(len, outbox.unsent.popleft()))
                outbox.unsent_bytes -= size
                self._backlog.read(outbox, size)
            if not outbox.unsent:
                self._blocked.discard(outbox)
            if outbox.behind and outbox.unsent_bytes <= BEHIND_BYTES // 2:
                outbox.behind = False
                self._backlog.changed(outbox.peer, False)
                self.wait_for_turn(outbox)

    # ------------------------------------------------------------------------------------ connect and disconnect

    def watch(self, outbox: ZmqOutbox, pid: int) -> None:
        """Watches the client's process, to detect its exit at once rather than by a missed ping."""
        with contextlib.suppress(OSError):  # for example, the pid is from another namespace
            if outbox.watch is None and os.stat(f"/proc/{pid}").st_uid == os.geteuid():
                outbox.watch = os.pidfd_open(pid)
                outbox.pid = pid
                self._loop.add_reader(outbox.watch, outbox.close, f"process {pid} has exited")

    def silent(self, clients: Mapping[int, ClientState]) -> tuple[list[ZmqOutbox], list[ZmqOutbox]]:
        """Returns (clients to ping, clients to disconnect). A client that has sent nothing since the last call is
        disconnected. If its process is watched, it is only pinged, as it may be too busy to answer; if it has closed
        its socket without exiting, sending the ping fails at once. Clients whose Hello has not been processed are not
        pinged, as Welcome must be the first message that they receive."""
        ask: list[ZmqOutbox] = []
        lost: list[ZmqOutbox] = []
        for outbox in self._outboxes.values():
            client = clients.get(outbox.peer)
            if not outbox.closing and (client is None or not client.outputs):
                continue
            (ask if outbox.active or outbox.watch is not None else lost).append(outbox)
            outbox.active = False
        self._retry()
        return ask, lost

    def drop(self, outbox: ZmqOutbox, reason: str) -> None:
        if self._outboxes.get(outbox.identity) is not outbox:  # already dropped; its identity may be in use again
            return
        del self._outboxes[outbox.identity]
        self._blocked.discard(outbox)
        self._backlog.removed(outbox)
        self._free(outbox.pending)
        if outbox.queued:
            outbox.queued = False
            self._turns.leave(outbox)
        outbox.paused.cancel()
        if outbox.closing:
            self._disconnected[outbox.identity] = None
            if len(self._disconnected) > DISCONNECTED:
                del self._disconnected[next(iter(self._disconnected))]
        if outbox.watch is not None:
            self._loop.remove_reader(outbox.watch)
            os.close(outbox.watch)
            if outbox.pid not in self._to_sweep:
                self._to_sweep.add(outbox.pid)
                self._loop.call_later(SWEEP_S, self._sweep, outbox.pid)
        self._ended(outbox.peer, reason)

    def _free(self, pending: deque[list[bytes]]) -> None:
        """Releases FREED messages per callback, to let other callbacks run."""
        for _ in range(min(FREED, len(pending))):
            pending.popleft()
        if pending:
            self._loop.call_soon(self._free, pending)

    def _sweep(self, pid: int) -> None:
        """Removes named segments that a process left behind."""
        self._to_sweep.discard(pid)
        posix.sweep(pid)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        for outbox in list(self._outboxes.values()):
            self.drop(outbox, "")
        for pid in list(self._to_sweep):
            self._sweep(pid)
        self._socket.close()
        self._context.term()


def free(arena: Arena, handles: Iterable[Handle]) -> None:
    for handle in handles:
        arena.free(handle.segment, handle.offset)


assert MESSAGE_BYTES > FRAME_BYTES + PACKET_BYTES

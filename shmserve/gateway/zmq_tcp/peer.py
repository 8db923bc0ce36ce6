"""One client of the ZeroMQ endpoint: its messages -> requests to the broker, and the answers -> messages. Invariant: no
handle passes through in either direction. Received frames are copied into this process's arena, and frames are copied
when they are sent. Tensors have no handles, since no memory is shared over TCP."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from shmserve.errors import (
    Cancelled,
    ConnectionLost,
    Denied,
    Internal,
    InvalidRequest,
    ProtocolError,
    ServeError,
    Unavailable,
)
from shmserve.gateway.kserve.answers import Buffer, Held
from shmserve.gateway.kserve.status import text_of
from shmserve.gateway.limits.caller_shares import release
from shmserve.gateway.limits.turns import SlicedWork
from shmserve.gateway.upstream.documents import BrokerQuery
from shmserve.gateway.upstream.link import GatewayLink, stored
from shmserve.gateway.upstream.requests import NO_TIME, ChargedTicket, PendingStream, ask, withdraw
from shmserve.protocol import codec, roles
from shmserve.protocol.bodies import answers_of, pieces_of
from shmserve.protocol.messages import (
    INLINE_BYTES,
    PACKET_BYTES,
    PROTOCOL,
    Ask,
    Bye,
    Cancel,
    ClientMessage,
    Fail,
    Goodbye,
    Hello,
    Infer,
    InferBatch,
    Map,
    More,
    Options,
    Part,
    Ping,
    Pong,
    Reply,
    Return,
    Tensor,
    Unmap,
    Welcome,
)
from shmserve.protocol.roles import OPERATIONS
from shmserve.session.encode import TopK
from shmserve.session.uploads import of_bytes

if TYPE_CHECKING:
    from shmserve.gateway.zmq_tcp.keys import KeyEntry

GIVEN_BY = "the file of --zmq-keys of the gateway"
MISTAKES_S = 100
MISTAKES = 1000
"""A client may make MISTAKES errors at once and MISTAKES_S per second; beyond that it is disconnected."""

_NO_OPTIONS = Options()
decode = codec.Codec(ClientMessage).decode
monotonic = time.monotonic


class ZmqLimits(Struct, frozen=True):
    """Limits of the ZeroMQ endpoint."""

    input_bytes: int = 64 << 20
    """Maximum size of the inputs of one request, and of the body of one operation."""
    unsent_bytes: int = 64 << 20
    connections: int = 1024
    key_connections: int = 256


class _Upload(Struct):
    """An operation whose body is incomplete."""

    ask: Ask
    parts: list[bytes]
    size: int = 0


class PeerHost(Protocol):
    """The listener's interface for its peers."""

    link: GatewayLink
    limits: ZmqLimits
    stopping: bool

    def dirty(self, peer: Peer) -> None:
        """Schedules output: `Peer.take_out` is called before the loop sleeps."""

    def send(self, peer: Peer, packet: bytes, frames: Sequence[Buffer]) -> None:
        """Sends at once, or copies and queues."""

    def drop(self, peer: Peer, still_open: bool) -> None:
        """Disconnects the client. `still_open`: ignore input other than Hello on its connection."""


class PeerRequest(ChargedTicket):
    """A request of a peer with one reply."""

    __slots__ = ("peer", "request")

    def __init__(self, peer: Peer, request: int) -> None:
        self.peer = peer
        self.request = request

    def settle(self, answer: Any) -> None:
        self.peer.answered(self, answer)

    def fail(self, error: ServeError) -> None:
        self.peer.failed(self, error)


class PeerQuery(ChargedTicket):
    """A query or an operation of a peer."""

    __slots__ = ("peer", "request", "what")

    def __init__(self, peer: Peer, ask: Ask) -> None:
        self.peer = peer
        self.request = ask.request
        self.what = ask.what

    def settle(self, answer: Any) -> None:
        self.peer.query_answered(self, answer)

    def fail(self, error: ServeError) -> None:
        self.peer.failed(self, error)


class PeerStream(PendingStream):
    """A request of a peer that is answered in parts. Parts are passed on as they arrive, since the client itself asks
    for more."""

    __slots__ = ("peer", "request")

    def __init__(self, peer: Peer, request: int, window: int) -> None:
        super().__init__(window)
        self.peer = peer
        self.request = request

    def part(self, result: Any, last: bool) -> None:
        self.begun = True
        self.ended = last
        self.peer.part(self, result, last)

    def on_part(self) -> None:
        return  # nobody waits for parts

    def settle(self, answer: Any) -> None:
        self.ended = True
        self.peer.answered(self, answer)

    def fail(self, error: ServeError) -> None:
        self.peer.failed(self, error)


class Peer:
    """`entry`: the roles of its key. `receive` processes a ZeroMQ message; outgoing messages are queued in `outbox`."""

    def __init__(
        self, listener: PeerHost, identity: bytes, connection: int, key: str, entry: KeyEntry, address: str
    ) -> None:
        self.identity = identity
        self.connection = connection
        self.key = key
        self.entry = entry
        self.outbox: list[Any] = []
        self.unsent: list[list[bytes]] = []
        self.unsent_bytes = 0
        self.gone = False
        self.tickets: dict[int, PeerRequest | PeerQuery | PeerStream] = {}
        self._listener = listener
        self._link = listener.link
        self._limits = listener.limits
        self._greeted = False
        self._shares = listener.link.shares.connect(address)
        self._payer = self._shares.payer(key)
        self._upload: _Upload | None = None
        self._mistakes = 0.0
        self._mistaken_at = 0.0

    # ------------------------------------------------------------------------------------ input

    def receive(self, packet: Buffer, frames: Sequence[Buffer]) -> SlicedWork[None]:
        """Processes a ZeroMQ message: a packet may have 65,000 messages. Each slice is one of them."""
        try:
            messages = decode(packet)  # type: ignore[arg-type]
        except ProtocolError as error:
            messages = [codec.Refused(0, error.message)]
        for message in messages:
            if self.gone:
                return
            if type(message) is Infer and self._greeted:
                self._infer(message, frames)
            elif not self._greeted and type(message) is not Hello:
                self.goodbye(ConnectionLost("the first message of a connection must be Hello"))
                return
            else:
                _HANDLERS[type(message)](self, message)
            yield

    def _hello(self, message: Hello) -> None:
        limits = self._limits
        if message.protocol != PROTOCOL:
            text = f"protocol version {message.protocol} is not supported, only {PROTOCOL}; use a matching client"
            self.goodbye(ProtocolError(text))
        elif self._greeted:
            self.goodbye(ProtocolError("second Hello on one connection"))
        elif message.outputs != "frames":
            self.goodbye(ProtocolError("over tcp, outputs can only be sent as 'frames'"))
        elif self._listener.stopping:
            self.goodbye(Unavailable("the gateway is stopping"))
        else:
            self._greeted = True
            known = {
                "packet_bytes": PACKET_BYTES,
                "inline_bytes": INLINE_BYTES,
                "frame_bytes": limits.input_bytes,
                "client_requests": self._link.shares.requests.max_calls,
                "trace_context": int(self._link.session.wants_trace_context),
            }
            self.queue(Welcome(PROTOCOL, 1, self._link.session.server or "gateway", known))

    def _check_role(self, action: str) -> None:
        if not roles.allows(action, self.entry.roles):
            raise roles.refusal(action, self.entry.roles, GIVEN_BY)

    def _refuse(self, number: int, error: ServeError) -> None:
        self.queue(Fail(number, error.code, error.message))
        if not isinstance(error, Unavailable):
            self._count_mistake()

    def _refused(self, message: codec.Refused) -> None:
        self._refuse(self._number(message.request), ProtocolError(message.text))

    def _no_batch(self, message: InferBatch) -> None:
        self._refuse(0, InvalidRequest("InferBatch is not supported over tcp: send each request as Infer"))

    def _count_mistake(self) -> None:
        now = monotonic()
        self._mistakes = max(0.0, self._mistakes - (now - self._mistaken_at) * MISTAKES_S) + 1
        self._mistaken_at = now
        if self._mistakes > MISTAKES:
            text = f"this client made {MISTAKES} errors at more than {MISTAKES_S} per second (client_errors)"
            self.goodbye(Unavailable(text))

    # ------------------------------------------------------------------------------------ inference

    def _infer(self, infer: Infer, frames: Sequence[Buffer]) -> None:
        try:
            self._ask_model(infer, frames)
        except ServeError as error:  # not counted: the client may forward requests of others
            self.queue(Fail(self._number(infer.request), error.code, text_of(error)))

    def _ask_model(self, infer: Infer, frames: Sequence[Buffer]) -> None:
        number = infer.request
        if not self.entry.roles & roles.INFER:
            self._check_role("infer")
        self._check_room(number)
        pieces = [piece_of(tensor, frames) for tensor in infer.inputs]
        size = sum(map(len, pieces))
        self._check_bytes(size)
        window = infer.options.window if infer.options is not None else 0
        ticket = PeerStream(self, number, window) if window else PeerRequest(self, number)
        self._payer.charge(ticket, size)
        try:
            self._put_request(ticket, infer, pieces, window)
        except BaseException:
            release(ticket)
            raise
        self.tickets[number] = ticket

    def _put_request(
        self, ticket: PeerRequest | PeerStream, infer: Infer, pieces: Sequence[Buffer], window: int
    ) -> None:
        options, link = infer.options or _NO_OPTIONS, self._link
        inputs = stored(link.session.memory, infer.inputs, pieces)
        outputs = outputs_of(infer)
        timeout = infer.timeout_us / 1e6 or None
        now = NO_TIME if timeout is None else monotonic()
        parameters = options.parameters
        if options.queue_timeout_us:
            parameters = {**parameters, "timeout": options.queue_timeout_us}
        link.session.infer(
            ticket,
            infer.model,
            inputs,
            now,
            outputs,
            infer.version or None,
            timeout,
            options.priority or None,
            options.sequence or None,
            options.sequence_start,
            options.sequence_end,
            parameters or None,
            options.id or None,
            window,
            self._payer.token,
            self._payer.name,
        )
        link.send_soon(timeout is not None)

    def _is_uploading(self, number: int) -> bool:
        return self._upload is not None and self._upload.ask.request == number

    def _number(self, number: int) -> int:
        """The number for an error: 0 for that of another request in flight, which the error must not end."""
        return 0 if number in self.tickets or self._is_uploading(number) else number

    def _check_room(self, number: int) -> None:
        uploading = self._upload is not None and self._upload.ask.request == number
        if number == 0 or uploading or number in self.tickets:
            raise InvalidRequest(f"request number {number} is 0 or already in flight")
        if self._listener.stopping:
            raise Unavailable("the gateway is stopping")

    def _check_bytes(self, size: int) -> None:
        limits = self._limits
        if size > limits.input_bytes:
            raise InvalidRequest(
                f"the inputs have {size} bytes, over the limit of {limits.input_bytes} for one request; send smaller "
                "requests, or raise --http-max-input-size"
            )

    def _cancel(self, message: Cancel) -> None:
        if self._is_uploading(message.request):
            self._upload = None
        ticket = self.tickets.get(message.request)
        if ticket is None or isinstance(ticket, PeerQuery):
            return  # already answered (the messages crossed), or a query or operation, which is not cancelled
        withdraw(self._link, ticket)
        self._over(ticket)
        self.queue(Fail(message.request, Cancelled.code, "the request was cancelled by the client"))

    def _more(self, message: More) -> None:
        ticket = self.tickets.get(message.request)
        if not isinstance(ticket, PeerStream):
            return
        request, session = ticket.message, self._link.session
        if isinstance(request, Infer) and request.options is not None and not ticket.begun:
            request.options.window += message.count  # in case the request is sent again to a restarted server
        if session.connected:
            session.outbox.queue(More(ticket.number, message.count))
            self._link.send_soon()

    # ------------------------------------------------------------------------------------ queries

    def _ask(self, message: Ask) -> None:
        try:
            if message.what:
                self._begin_query(message)
            else:
                self._go_on(message)
        except ServeError as error:
            self._refuse(self._number(message.request), error)

    def _begin_query(self, message: Ask) -> None:
        if message.what not in roles.QUERIES:
            raise roles.unknown(message.what)
        self._check_role(message.what)
        self._check_room(message.request)
        if message.what in OPERATIONS:
            if self._upload is not None:
                raise InvalidRequest("the body of another operation is incomplete; send it first")
            self._upload = _Upload(message, [])
            self._go_on(message)
        elif message.body or message.more:
            raise InvalidRequest(f"the query '{message.what}' takes no body")
        else:
            self._put(message, b"")

    def _go_on(self, message: Ask) -> None:
        upload = self._upload
        if upload is None or upload.ask.request != message.request:
            return  # refused or cancelled
        upload.size += len(message.body)
        if upload.size > self._limits.input_bytes:
            self._upload = None
            raise InvalidRequest(
                f"the body of '{upload.ask.what}' exceeds {self._limits.input_bytes} bytes; put the files into the "
                "server's repository, or raise --http-max-input-size"
            )
        upload.parts.append(message.body)
        if not message.more:
            self._upload = None
            self._put(upload.ask, b"".join(upload.parts))

    def _put(self, message: Ask, body: bytes) -> None:
        ticket = PeerQuery(self, message)
        query = BrokerQuery(
            message.what, model=message.model, version=message.version, body=of_bytes(body) if body else None
        )
        ask(self._link, self._payer, ticket, query)
        self.tickets[message.request] = ticket

    # ------------------------------------------------------------------------------------ other messages

    def _no_memory(self, message: Map | Unmap) -> None:
        self.goodbye(InvalidRequest("shared memory is not supported over tcp: send tensors in frames"))

    def _return(self, message: Return) -> None:
        if message.handles:
            self._refuse(0, InvalidRequest("this client holds no handles to return"))

    def _ping(self, message: Ping) -> None:
        self.queue(Pong(message.number))

    def _pong(self, message: Pong) -> None:
        """Handles a Pong, which is always unsolicited."""

    def _bye(self, message: Bye) -> None:
        self._listener.drop(self, False)

    # ------------------------------------------------------------------------------------ output

    def queue(self, message: Any) -> None:
        if not self.gone:
            self.outbox.append(message)
            self._listener.dirty(self)

    def take_out(self) -> None:
        """Sends all messages in the outbox."""
        messages, self.outbox = self.outbox, []
        if not messages:
            return
        try:
            packets = codec.pack(messages)
        except Internal:
            packets = [packet for message in messages for packet in _packed(message)]
        for packet in packets:
            self._listener.send(self, packet, ())

    def answered(self, ticket: PeerRequest | PeerStream, answer: Reply | Held) -> None:
        self._over(ticket)
        if isinstance(answer, Held):
            reply = answer.reply
            self._send_framed(answer, lambda outputs: Reply(ticket.request, reply.version, outputs, reply.parameters))
        else:
            self.queue(Reply(ticket.request, answer.version, answer.outputs, answer.parameters))

    def part(self, ticket: PeerStream, answer: Reply | Held | None, last: bool) -> None:
        number = ticket.request
        if last:
            self._over(ticket)
        if answer is None:
            self.queue(Part(number, 0, (), None, True))
        elif isinstance(answer, Held):
            reply = answer.reply
            self._send_framed(answer, lambda outputs: Part(number, reply.version, outputs, reply.parameters, last))
        else:
            self.queue(Part(number, answer.version, answer.outputs, answer.parameters, last))

    def query_answered(self, ticket: PeerQuery, answer: Any) -> None:
        self._over(ticket)
        if not self.entry.roles & roles.OPERATE:
            roles.remove_private(ticket.what, answer)
        for message in answers_of(ticket.request, pieces_of(json.dumps(answer).encode())):
            self.queue(message)

    def failed(self, ticket: PeerRequest | PeerQuery | PeerStream, error: ServeError) -> None:
        if isinstance(ticket, PeerStream):
            ticket.ended = True
        self._over(ticket)
        self.queue(Fail(ticket.request, error.code, text_of(error)))

    def _over(self, ticket: PeerRequest | PeerQuery | PeerStream) -> None:
        if self.tickets.get(ticket.request) is ticket:
            del self.tickets[ticket.request]
            release(ticket)

    def _send_framed(self, answer: Held, make: Callable[[tuple[Tensor, ...]], Reply | Part]) -> None:
        """Sends a reply with its large outputs as frames after it, in a separate packet."""
        if self.gone:
            return
        outputs: list[Tensor] = []
        frames: list[Buffer] = []
        for tensor, buffers in zip(answer.reply.outputs, answer.buffers, strict=True):
            if isinstance(tensor.data, tuple):
                outputs.append(Tensor(tensor.name, tensor.dtype, tensor.shape, len(frames)))
                # An output is one frame, so rows from several workers are joined.
                frames.append(buffers[0] if len(buffers) == 1 else b"".join(buffers))
            else:
                outputs.append(tensor)
        message = make(tuple(outputs))
        if not frames:
            self.queue(message)
            return
        self.take_out()
        self._listener.send(self, codec.encode([message]), frames)

    # ------------------------------------------------------------------------------------ disconnects

    def goodbye(self, error: ServeError) -> None:
        self.queue(Goodbye(error.code, error.message))
        self.take_out()
        self._listener.drop(self, True)

    def key_changed(self, entry: KeyEntry | None) -> None:
        if entry is None:
            self.revoked()
        else:
            self.entry = entry

    def revoked(self) -> None:
        self.goodbye(Denied(f"the key of this client has no roles; roles are set in {GIVEN_BY}"))

    def keep(self, parts: Sequence[Buffer]) -> None:
        """Queues a message that the connection does not take yet. It is copied, as the reply's shared memory is
        returned."""
        self.unsent.append([bytes(part) for part in parts])
        self.unsent_bytes += sum(map(len, parts))

    def first_sent(self) -> None:
        """The first queued message has been sent."""
        self.unsent_bytes -= sum(map(len, self.unsent.pop(0)))

    def end(self) -> None:
        """Cancels the requests of the client; operations continue."""
        self.gone = True
        tickets, self.tickets = list(self.tickets.values()), {}
        for ticket in tickets:
            if isinstance(ticket, PeerQuery) and ticket.what in OPERATIONS:
                release(ticket)
            else:
                withdraw(self._link, ticket)
        self._shares.close()
        self._upload = None
        self.outbox.clear()
        self.unsent.clear()


def _packed(message: Any) -> list[bytes]:
    """The packet of an answer, or of an error if the answer does not fit into a packet any more, because the client's
    own request number is larger."""
    try:
        return codec.pack([message])
    except Internal as error:
        return codec.pack([Fail(message.request, error.code, error.message)])


_HANDLERS: dict[type, Callable[[Peer, Any], None]] = {
    Hello: Peer._hello,
    InferBatch: Peer._no_batch,
    Cancel: Peer._cancel,
    More: Peer._more,
    Ask: Peer._ask,
    Map: Peer._no_memory,
    Unmap: Peer._no_memory,
    Return: Peer._return,
    Ping: Peer._ping,
    Pong: Peer._pong,
    Bye: Peer._bye,
    codec.Refused: Peer._refused,
}


def piece_of(tensor: Tensor, frames: Sequence[Buffer]) -> Buffer:
    data = tensor.data
    if isinstance(data, bytes):
        return data
    if isinstance(data, tuple):
        raise InvalidRequest(f"input '{tensor.name}' is in shared memory, which is not supported over tcp: send frames")
    if not 0 <= data < len(frames):
        raise InvalidRequest(f"input '{tensor.name}' refers to frame {data}, but the message has {len(frames)} frames")
    return frames[data]


def outputs_of(infer: Infer) -> dict[str, TopK | None] | None:
    if infer.outputs is None:
        return None
    outputs: dict[str, TopK | None] = {}
    for wanted in infer.outputs:
        if wanted.place is not None:
            raise InvalidRequest(
                f"output '{wanted.name}' is requested in shared memory, which is not supported over tcp"
            )
        if wanted.name in outputs:
            raise InvalidRequest(f"output '{wanted.name}' is requested twice")
        outputs[wanted.name] = TopK(wanted.classes) if wanted.classes else None
    return outputs

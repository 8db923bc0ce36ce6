"""Keepalive, idle timeout and shutdown of an HTTP/2 connection. Invariant: a client that follows the protocol loses no
call when its connection ends."""

from __future__ import annotations

from shmserve.gateway.http2 import limits
from shmserve.gateway.http2.interface import Awaits
from shmserve.gateway.http2.stream import OPEN, Http2Stream, Http2Streams
from shmserve.http2 import frames
from shmserve.http2.frames import ErrorCode, Http2Error
from shmserve.protocol.grpc.codes import Code, RpcError

_LAST_CALLS = b"lastcall"
_STILL_THERE = b"thereyet"
_NEVER = float("-inf")
_WITHOUT_CALLS_S = 7200.0
"""Minimum ping interval of a client without calls."""


class Life:
    def __init__(self, streams: Http2Streams) -> None:
        self._streams = streams
        self._draining = False
        self.ending = False
        """The final GOAWAY has been sent."""
        self.last = frames.LARGEST_STREAM
        """The last stream to be processed."""
        self.received = True
        """Input has arrived since the last `check_timeouts`."""
        self._received_at = self._born = streams.listener.now()
        self._ping_sent_at: float | None = None
        self._strikes = 0
        self._pinged = _NEVER

    # ------------------------------------------------------------------------------------ shutdown

    def drain(self) -> None:
        """Graceful shutdown: sends GOAWAY with the highest stream id and a PING. Calls that the client sent before its
        PING ACK are still accepted; `no_more` then refuses new ones."""
        streams = self._streams
        if self._draining or streams.over:
            return
        self._draining = True
        if not streams.greeted:
            self.no_more()
            return
        streams.quiet_since = streams.listener.turn
        streams.output.write(
            frames.goaway(frames.LARGEST_STREAM, ErrorCode.NO_ERROR), frames.frame(frames.PING, 0, 0, _LAST_CALLS)
        )

    def no_more(self) -> None:
        streams = self._streams
        if not self.ending:
            self.ending = True
            self.last = streams.last
            streams.output.write(frames.goaway(streams.last, ErrorCode.NO_ERROR))

    # ------------------------------------------------------------------------------------ PING

    def acknowledged(self, payload: bytes) -> None:
        if payload == _LAST_CALLS and self._draining:
            self.no_more()

    def ping_received(self) -> None:
        """Handles a PING of the client, and counts a strike if it comes before the minimum interval has passed."""
        streams, settings = self._streams, self._streams.listener.limits
        now = streams.listener.now()
        if streams.sent_since_ping:
            streams.sent_since_ping = False
            self._strikes, self._pinged = 0, _NEVER
        calm = settings.ping_interval_s
        if not streams.open and not settings.pings_without_calls:
            calm = max(_WITHOUT_CALLS_S, calm)
        if now < self._pinged + calm and settings.ping_strikes:
            self._strikes += 1
            if self._strikes > settings.ping_strikes:
                raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        self._pinged = now

    # ------------------------------------------------------------------------------------ timeouts

    def check_timeouts(self, waited: int, min_bytes: int, idle: int) -> None:
        """Called on every turn of the slow clock. `waited`: turns without `min_bytes` of progress after which a call
        that waits for the client times out. `idle`: idle turns after which a connection without calls is closed."""
        streams = self._streams
        if streams.over:
            return
        turn, now, settings = streams.listener.turn, streams.listener.now(), streams.listener.limits
        streams.abuse.next_turn()
        for stream in list(streams.watched):
            self._check_progress(stream, turn, waited, min_bytes)
        silent = 0
        for stream in list(streams.open.values()):
            if stream.state is OPEN and not stream.stuck:
                silent += stream.silent
                self._check_idle(stream, turn - stream.used, waited, silent > limits.SILENT_STREAMS)
        quiet = turn - streams.quiet_since
        if self._draining:
            if quiet > 1:
                self.no_more()
        elif not streams.open and quiet > (idle if streams.greeted else waited):
            self.drain()
        if settings.age_s and now - self._born > settings.age_s:
            self.drain()
            if settings.age_grace_s and now - self._born > settings.age_s + settings.age_grace_s:
                streams.end(ErrorCode.NO_ERROR, "max_age")
                return
        self._keep_alive(now)

    def _check_progress(self, stream: Http2Stream, turn: int, waited: int, min_bytes: int) -> None:
        if not stream.stuck:
            self._streams.watched.discard(stream)
        elif stream.has_stalled(turn, waited, min_bytes):
            text = "the client stalled; the limit is --limit http_read_secs"
            stream.fail(RpcError(Code.DEADLINE_EXCEEDED, text))

    def _check_idle(self, stream: Http2Stream, quiet: int, waited: int, crowded: bool) -> None:
        """`crowded`: many streams before this one wait for their first request, too."""
        awaits = stream.call.awaits
        if awaits is Awaits.NEXT_REQUEST and stream.silent and crowded:
            awaits = Awaits.REQUEST
        if awaits is Awaits.REQUEST and quiet > waited:
            text = "the request was not received in time; the limit is --limit http_read_secs"
        elif awaits is Awaits.NEXT_REQUEST and quiet > self._streams.listener.stream_turns:
            text = "no request was received on this stream in time; the limit is --limit grpc_stream_idle_secs"
        else:
            return
        stream.fail(RpcError(Code.DEADLINE_EXCEEDED, text))

    def _keep_alive(self, now: float) -> None:
        streams, settings = self._streams, self._streams.listener.limits
        if self.received:
            self.received, self._received_at, self._ping_sent_at = False, now, None
        elif self._ping_sent_at is not None:
            if now - self._ping_sent_at >= settings.keepalive_timeout_s:
                streams.end(ErrorCode.NO_ERROR, "keepalive_timeout")
        elif now - self._received_at >= settings.keepalive_s and (streams.open or settings.pings_without_calls):
            self._ping_sent_at = now
            streams.output.write(frames.frame(frames.PING, 0, 0, _STILL_THERE))

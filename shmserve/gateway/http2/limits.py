"""Size limits and timeouts of the gRPC endpoint. Exceeding a limit that gRPC clients never reach closes the connection;
exceeding any other limit fails the call."""

from __future__ import annotations

from shmserve.gateway.listeners.callers import ConnectionLimits

STREAM_WINDOW = 4 << 20
"""Flow-control window of a stream."""
CONNECTION_WINDOW = 16 << 20
FRAME_BYTES = 1 << 20
"""Largest frame that is accepted (SETTINGS_MAX_FRAME_SIZE)."""
CONTINUATIONS = 16
"""Maximum number of frames in one header block."""
LARGE_FRAME = 64 << 10
"""After a DATA frame of at least this size, another one is expected: its header is read alone, its body in place."""
DIRECT_BYTES = 4 << 10
"""The rest of a frame is read in place if it has at least this size; otherwise it is copied."""
QUANTUM = 256 << 10
"""Bytes that one stream sends before the next stream has its turn."""
AHEAD_BYTES = 1 << 20
"""Maximum output queued for the socket at a time."""
SETTINGS_BYTES = 6 * 64
RESETS = 2000
"""Maximum number of calls per turn of the slow clock that a client cancels, or makes the gateway reset: each causes
work."""
MISTAKES = 1000
"""Maximum number of calls per turn of the slow clock that are refused by their headers alone."""
FIELD_WORK = 2
"""A decoded field counts as this many frames: it takes 5 to 10 us."""
STREAMS_WORK = 8
"""Looking at this many streams counts as one frame."""
INFLATED_BYTES = 4 << 10
"""Inflating this many bytes counts as one frame."""
FIELDS = 64
"""Headers of a call beyond this number count as frames without effect, unless the block was cached."""
SMALL_HEAD = 1024
"""The headers of a call are counted as held bytes if they are larger than this."""
SETTINGS_WEIGHT = 100
"""A SETTINGS frame counts as this many frames without effect: it touches every stream, and clients send only a few."""
SILENT_STREAMS = 16
"""Number of streams of one connection that may wait for their first request as long as an idle stream. Clients open few
ahead; for all others the read timeout applies."""
EARLY_S = 0.1
"""A cancellation within this time before the deadline counts as an expired deadline, not as a reset."""
IDLE_FRAMES = 10_000
"""Maximum number of frames without effect per turn of the slow clock."""
SMALL_UPDATE = 256
"""A WINDOW_UPDATE below this size, for a stream with queued output, counts as a frame without effect."""
UNSENT_REPLIES = 1000
"""Maximum number of acknowledgements queued for a client that does not read."""
MESSAGE_BYTES = 64 << 20
"""Default maximum message size."""


class Http2Limits(ConnectionLimits, frozen=True):
    """Limits set by flags."""

    message_bytes: int = MESSAGE_BYTES
    """Maximum size of a message, before and after decompression."""
    streams: int = 1024
    """Maximum number of concurrent calls of one connection."""
    stream_idle_s: float = 3600.0
    """Idle timeout of a stream without requests in flight."""
    compression: int = 0
    """zlib level of responses to clients that accept compression; 0: none."""
    keepalive_s: float = 7200.0
    """Idle time before a keepalive ping is sent."""
    keepalive_timeout_s: float = 20.0
    pings_without_calls: bool = False
    """Whether keepalive pings are sent and accepted without calls in flight."""
    ping_interval_s: float = 300.0
    """Minimum interval between two pings of the client if no data was sent in between; a shorter interval is a
    strike."""
    ping_strikes: int = 2
    """Number of strikes tolerated before the connection is closed; 0: no limit."""
    age_s: float = 0.0
    """Age from which a connection accepts no more calls; 0: no limit."""
    age_grace_s: float = 0.0
    """Time for its calls to finish after that; 0: no limit."""

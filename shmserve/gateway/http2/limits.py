"""Size limits and timeouts of the gRPC endpoint. Exceeding a limit that gRPC clients never reach closes the connection;
exceeding another fails the call."""

from __future__ import annotations

from shmserve.gateway.listeners.callers import ConnectionLimits

STREAM_WINDOW = 4 << 20
"""Flow-control window of a stream."""
CONNECTION_WINDOW = 16 << 20
FRAME_BYTES = 1 << 20
"""Largest frame that is accepted (SETTINGS_MAX_FRAME_SIZE)."""
CONTINUATIONS = 16
"""Maximum frames of one header block."""
LARGE_FRAME = 64 << 10
"""After a DATA frame of at least this size, another one is expected: its header is read alone, its body in place."""
DIRECT_BYTES = 4 << 10
"""The rest of a frame is read in place from this size on; less is copied there."""
QUANTUM = 256 << 10
"""Bytes that one stream sends before the next one's turn."""
AHEAD_BYTES = 1 << 20
"""Output that is queued for the socket at a time."""
SETTINGS_BYTES = 6 * 64
RESETS = 2000
"""Calls per turn of the slow clock that a client may cancel, or make us reset: each causes work."""
MISTAKES = 1000
"""Calls per turn of the slow clock that are refused by their headers alone."""
WORK = 128
"""Frames, messages and decoded header fields that one connection may cost per iteration of the loop."""
TURN_WORK = 4 * WORK
"""The same, of all connections together."""
FIELD_WORK = 2
"""A decoded field counts as this many frames: it takes 5 to 10 us."""
INFLATED_BYTES = 4 << 10
"""Inflating this many bytes counts as one frame."""
FIELDS = 64
"""Headers of one call beyond this number count as frames without effect, unless the block was cached."""
SETTINGS_WEIGHT = 100
"""A SETTINGS frame counts as this many frames without effect: it touches every stream, and clients send only a few."""
EARLY_S = 0.1
"""A cancellation within this time before the deadline counts as an expired deadline, not as a reset."""
IDLE_FRAMES = 10_000
"""Frames without effect per turn of the slow clock."""
SMALL_UPDATE = 256
"""A smaller WINDOW_UPDATE of a stream with queued output counts as a frame without effect."""
UNSENT_REPLIES = 1000
"""Acknowledgements queued for a client that does not read."""
MESSAGE_BYTES = 64 << 20
"""Default maximum message size."""


class Http2Limits(ConnectionLimits, frozen=True):
    """Limits set by flags."""

    message_bytes: int = MESSAGE_BYTES
    """Bytes of a message, before and after decompression."""
    streams: int = 1024
    """Concurrent calls of one connection."""
    stream_idle_s: float = 3600.0
    """For a stream of requests without requests in flight."""
    compression: int = 0
    """zlib level of responses to clients that accept compression; 0: none."""
    keepalive_s: float = 7200.0
    """Idle time before a keepalive ping is sent."""
    keepalive_timeout_s: float = 20.0
    pings_without_calls: bool = False
    """Send and accept keepalive pings without calls in flight."""
    ping_interval_s: float = 300.0
    """Minimum interval between pings of the client without data sent in between; a shorter one is a strike."""
    ping_strikes: int = 2
    """Strikes tolerated before the connection is closed; 0: no limit."""
    age_s: float = 0.0
    """Age at which a connection takes no more calls; 0: no limit."""
    age_grace_s: float = 0.0
    """Time for its calls to finish after that; 0: no limit."""

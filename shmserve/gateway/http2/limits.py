"""What a caller of the gRPC door may send, and how long it may take. The rule of the file: whoever is over a limit that
clients of gRPC never reach loses the connection; over one that they may reach, the call.
"""

from __future__ import annotations

from msgspec import Struct

STREAM_WINDOW = 4 << 20
"""What a caller may send on a stream before he is granted more."""
CONNECTION_WINDOW = 16 << 20
FRAME_BYTES = 1 << 20
"""The largest frame that is taken."""
CONTINUATIONS = 16
"""Frames of one header block."""
QUANTUM = 256 << 10
"""So much of one stream is sent before the next one's turn."""
AHEAD_BYTES = 1 << 20
"""So much is made ready for the socket at a time."""
SETTINGS_BYTES = 6 * 64
RESETS = 2000
"""Calls that a caller may take back, or make us reset, in one turn of the slow clock: each is work for others."""
MISTAKES = 1000
"""Calls in one turn of the slow clock that are refused from their headers alone."""
WORK = 128
"""Frames, messages, and fields of headers that are decoded, that one connection may cost in one turn of the loop."""
TURN_WORK = 4 * WORK
"""The same, of all connections together."""
FIELD_WORK = 2
"""A field that is decoded counts as so many frames: it takes 5 to 10 us."""
INFLATED_BYTES = 4 << 10
"""Inflating so much counts as one frame."""
FIELDS = 64
"""Headers of one call beyond these count as frames that move nothing, unless the block is one that came before."""
SETTINGS_WEIGHT = 100
"""A SETTINGS frame counts as so many frames that move nothing: it touches every stream, and clients send a few."""
EARLY_S = 0.1
"""A call that is taken back later than so long before its deadline is one whose time is over."""
IDLE_FRAMES = 10_000
"""Frames that move nothing, in one turn of the slow clock."""
SMALL_UPDATE = 256
"""A caller who takes less at a time of what waits for him has it sent in frames that move next to nothing."""
UNSENT_REPLIES = 1000
"""Acknowledgements that wait for a caller who does not read."""
MESSAGE_BYTES = 64 << 20
"""Of a message, unless a flag says otherwise."""


class Limits(Struct, frozen=True):
    """Those that a flag sets."""

    message_bytes: int = MESSAGE_BYTES
    """Of a message, also after it was decompressed."""
    connections: int = 4096
    streams: int = 1024
    """Calls of one connection at a time."""
    read_timeout_s: float = 60.0
    """For a message of which next to nothing has come for so long, or an answer that is not taken."""
    data_rate: int = 1024
    """Bytes a second of a body, or of an answer, below which the read timeout runs."""
    idle_timeout_s: float = 600.0
    """For a connection without calls."""
    stream_idle_s: float = 3600.0
    """For a stream of requests without one in flight."""
    exit_timeout_s: float = 30.0
    compression: int = 0
    """Level of zlib for answers, to callers who take compressed ones; 0: none."""
    keepalive_s: float = 7200.0
    """After so long without a word from the caller he is asked whether he is there."""
    keepalive_timeout_s: float = 20.0
    pings_without_calls: bool = False
    """Callers may ask without a call in flight as often as with one."""
    ping_interval_s: float = 300.0
    """A caller who asks again sooner, and was sent nothing meanwhile, is counted."""
    ping_strikes: int = 2
    """So many times; 0: always."""
    age_s: float = 0.0
    """A connection takes no new calls after so long; 0: it always does."""
    age_grace_s: float = 0.0
    """And is closed after so long again; 0: when the last call has ended."""

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
"""Calls that a caller may take back in one turn of the slow clock: each is work for others."""
EARLY_S = 0.1
"""A call that is taken back later than so long before its deadline is one whose time is over."""
IDLE_FRAMES = 10_000
"""Frames that move nothing, in one turn of the slow clock."""
SMALL_UPDATE = 256
"""A caller who takes less at a time of what waits for him has it sent in frames that move next to nothing."""
UNSENT_REPLIES = 1000
"""Acknowledgements that wait for a caller who does not read."""


class Limits(Struct, frozen=True):
    """Those that a flag sets."""

    message_bytes: int = 64 << 20
    """Of a message, also after it was decompressed."""
    held_bytes: int = 1 << 30
    """Of messages that are being read, of all connections together."""
    connections: int = 4096
    streams: int = 1024
    """Calls of one connection at a time."""
    read_timeout_s: float = 60.0
    """For a message of which next to nothing has come for so long, or an answer that is not taken."""
    idle_timeout_s: float = 600.0
    """For a connection without calls."""
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

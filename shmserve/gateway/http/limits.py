"""What a caller of the HTTP door may send, and how long it may take. The rule of the file: a limit is known before any
memory is taken for what it limits.
"""

from __future__ import annotations

from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.gateway.kserve.json_tensors import json_too_large

HEAD_BYTES = 32 * 1024
"""Request line and headers together."""
HEADERS = 128
CHUNKS = 65_536
"""Of one chunked body."""
AHEAD_BYTES = 64 * 1024
"""What is read of the next requests while one is being answered."""


class Limits(Struct, frozen=True):
    """Those that a flag sets."""

    input_bytes: int = 64 << 20
    """Of a body, also after it was decompressed."""
    json_bytes: int = 16 << 20
    """Of the JSON of a request to a model: its numbers take many times as much while they are read."""
    connections: int = 4096
    read_timeout_s: float = 60.0
    """A request that is not complete, and of which next to nothing has come for so long, is given up; a caller who
    takes next to nothing of an answer for so long, too. The first lines have to be complete within it."""
    data_rate: int = 1024
    """Bytes a second of a body, or of an answer, below which the read timeout runs."""
    idle_timeout_s: float = 600.0
    """Between two requests."""
    exit_timeout_s: float = 30.0
    """For requests in flight when the gateway is told to stop."""

    def json_too_large(self, size: int) -> InvalidRequest:
        """Of the JSON of a request to a model."""
        limit, flag = self.input_bytes, "--http-max-input-size"
        if self.json_bytes < limit:
            limit, flag = self.json_bytes, "--http-max-json-size"
        text = json_too_large(size, limit, flag)
        return InvalidRequest(f"{text} Tensors sent as binary data do not count.")

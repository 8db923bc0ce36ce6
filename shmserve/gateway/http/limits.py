"""Size limits and timeouts of the HTTP endpoint. Invariant: a limit is known before memory is allocated for what it
limits."""

from __future__ import annotations

from shmserve.errors import InvalidRequest
from shmserve.gateway.kserve.json_tensors import json_size_text
from shmserve.gateway.listeners.callers import ConnectionLimits

HEAD_BYTES = 32 * 1024
"""Request line and headers together."""
HEADERS = 128
CHUNKS = 65_536
"""Non-empty chunks of one body."""
AHEAD_BYTES = 64 * 1024
"""Bytes of the next requests that are read while one is processed."""


class HttpLimits(ConnectionLimits, frozen=True):
    """Limits set by flags."""

    input_bytes: int = 64 << 20
    """Bytes of a body, before and after decompression."""
    json_bytes: int = 16 << 20
    """Bytes of the JSON of a request to a model: parsed numbers take many times as much memory."""

    def json_size_error(self, size: int, hint: str = " Tensors sent as binary data do not count.") -> InvalidRequest:
        """The error for the JSON of a request to a model."""
        limit, flag = self.input_bytes, "--http-max-input-size"
        if self.json_bytes < limit:
            limit, flag = self.json_bytes, "--http-max-json-size"
        return InvalidRequest(json_size_text(size, limit, flag) + hint)

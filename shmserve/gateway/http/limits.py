"""Size limits and timeouts of the HTTP endpoint. Invariant: a limit is known before memory is allocated for what it
limits."""

from __future__ import annotations

from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.gateway.kserve.json_tensors import json_size_text

HEAD_BYTES = 32 * 1024
"""Request line and headers together."""
HEADERS = 128
CHUNKS = 65_536
"""Non-empty chunks of one body."""
AHEAD_BYTES = 64 * 1024
"""Bytes of the next requests that are read while one is processed."""


class HttpLimits(Struct, frozen=True):
    """Limits set by flags."""

    input_bytes: int = 64 << 20
    """Bytes of a body, before and after decompression."""
    json_bytes: int = 16 << 20
    """Bytes of the JSON of a request to a model: parsed numbers take many times as much memory."""
    connections: int = 4096
    read_timeout_s: float = 60.0
    """Timeout of a request that is incomplete and arrives at less than `data_rate`, and of a response that the client
    reads at less than that. The head must be complete within it."""
    data_rate: int = 1024
    """Bytes per second of a body or response below which the read timeout runs."""
    idle_timeout_s: float = 600.0
    """Between two requests."""
    exit_timeout_s: float = 30.0
    """For requests in flight when the gateway stops."""

    def json_size_error(self, size: int) -> InvalidRequest:
        """The error for the JSON of a request to a model."""
        limit, flag = self.input_bytes, "--http-max-input-size"
        if self.json_bytes < limit:
            limit, flag = self.json_bytes, "--http-max-json-size"
        text = json_size_text(size, limit, flag)
        return InvalidRequest(f"{text} Tensors sent as binary data do not count.")

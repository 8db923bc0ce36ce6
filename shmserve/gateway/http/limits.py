"""Size limits and timeouts of the HTTP endpoint. Invariant: a limit is checked before the memory that it bounds is
allocated."""

from __future__ import annotations

from shmserve.errors import InvalidRequest
from shmserve.gateway.kserve.json_tensors import json_size_text
from shmserve.gateway.listeners.callers import ConnectionLimits

HEAD_BYTES = 32 * 1024
"""Maximum size of request line and headers together."""
HEADERS = 128
CHUNKS = 65_536
"""Maximum number of non-empty chunks in one body."""
HEAD_WORK = 512
"""Parsing this many bytes of a head or of JSON is one unit of work (limits/backlog.py)."""
LINE_WORK = 2
"""Parsing this many lines of a head is another unit."""
AHEAD_BYTES = 64 * 1024
"""Bytes of following requests that are read ahead while one is processed."""


class HttpLimits(ConnectionLimits, frozen=True):
    """Limits set by flags."""

    input_bytes: int = 64 << 20
    """Maximum size of a body, before and after decompression."""
    json_bytes: int = 16 << 20
    """Maximum size of the JSON in a request to a model: parsed numbers take many times as much memory."""

    keep_idle: bool = False
    """At a stop, idle connections stay open for one more request."""

    def json_size_error(self, size: int, hint: str = " Tensors sent as binary data do not count.") -> InvalidRequest:
        """The error for a request to a model whose JSON is too large."""
        limit, flag = self.input_bytes, "--http-max-input-size"
        if self.json_bytes < limit:
            limit, flag = self.json_bytes, "--limit http_json_bytes"
        return InvalidRequest(json_size_text(size, limit, flag) + hint)

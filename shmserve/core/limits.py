"""The core's limits: what each protects, its default, and why that much."""

from __future__ import annotations

from msgspec import Struct


class Limits(Struct, frozen=True):
    client_requests: int = 8192
    """Requests in flight of one client: 64 KiB of inline bytes each are 512 MiB at the very worst."""
    client_segments: int = 1024
    """Segments one client may announce: each costs the broker a descriptor and each worker a mapping."""
    client_held_bytes: int = 8 << 30
    """Bytes of answers one client may hold. Over it, new requests are refused until it returns some."""
    restarts: int = 5
    """Worker deaths in a row, with no batch done between them, after which an instance is given up."""
    backoff_ns: int = 1_000_000_000
    """Wait before the second restart in a row (the first is at once); doubles, up to backoff_max_ns."""
    backoff_max_ns: int = 30_000_000_000
    loading: int = 4
    """Instances that load at the same time: loading takes cores and disk from those that serve."""
    load_retries: int = 0
    """How often a version that fails to load is tried again, each time after backoff_ns."""
    prefetch_ns: int = 100_000_000
    """With several instances, a batch is sent ahead to a busy one only if batches take less than this. It goes to the
    instance that began first; if another is done before that one, it has waited at the wrong place."""

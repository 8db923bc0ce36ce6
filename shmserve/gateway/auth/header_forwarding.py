"""Request headers that become parameters: the trace context, and those that the operator's pattern selects, which are
passed on to the model.

Invariant: matching takes time linear in the length of the name, which a client chooses (hence RE2).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from shmserve.errors import InvalidRequest
from shmserve.gateway.kserve.plans import RESERVED_PREFIX
from shmserve.gateway.limits.bounded_cache import BoundedCache
from shmserve.protocol.messages import NAME_LENGTH, PARAMETERS, Value
from shmserve.protocol.trace_context import TRACE_PARENT, TRACE_STATE, parsed

PATTERN_LENGTH = 1024
_MEMORY = 1 << 20
_CACHED_NAMES = 1024
_OWN = frozenset(
    ("headers", "timeout", "priority", "sequence_id", "sequence_start", "sequence_end", "binary_data_output")
)
"""Parameters with a meaning for the server: headers of these names cannot be forwarded."""
STREAM_ERROR = "triton_grpc_error"
"""gRPC metadata that the server itself reads: never forwarded."""


class Forward:
    """Forwards headers whose whole name matches `pattern`, except those in `withheld` (lower case): models must not see
    tokens and keys.

    ValueError: the pattern is invalid. ImportError: RE2 is not installed.
    """

    def __init__(self, pattern: str, withheld: Iterable[str] = ()) -> None:
        import re2

        if len(pattern) > PATTERN_LENGTH:
            raise ValueError(f"the pattern has {len(pattern)} characters; the limit is {PATTERN_LENGTH}")
        options = re2.Options()
        options.case_sensitive = False
        options.max_mem = _MEMORY
        options.log_errors = False
        try:
            self._fits = re2.compile(pattern, options).fullmatch
        except re2.error as error:
            text = error.args[0] if error.args else ""
            raise ValueError(text.decode(errors="replace") if isinstance(text, bytes) else str(text)) from None
        self._withheld = frozenset(withheld)
        self._cache: BoundedCache[str, bool] = BoundedCache(_CACHED_NAMES)

    def of(self, headers: Iterable[tuple[str, str]]) -> dict[str, str] | None:
        """Joins headers of the same name, as HTTP does, and keeps the spelling of the first."""
        forwarded: dict[str, str] = {}
        spellings: dict[str, str] = {}
        for name, value in headers:
            wanted = self._cache.get(name)
            if wanted is None:
                wanted = self._wants(name)
            if not wanted:
                continue
            first = spellings.setdefault(name.lower(), name)
            forwarded[first] = f"{forwarded[first]}, {value}" if first in forwarded else value
        if len(forwarded) > PARAMETERS:
            raise InvalidRequest(
                f"{len(forwarded)} headers would be forwarded to the model as parameters; the limit is {PARAMETERS}"
            )
        return forwarded or None

    def _wants(self, name: str) -> bool:
        low = name.lower()
        wanted = (
            len(name) <= NAME_LENGTH
            and low != STREAM_ERROR
            and low not in self._withheld
            and self._fits(name) is not None
        )
        if wanted and (low in _OWN or low.startswith(RESERVED_PREFIX)):
            raise InvalidRequest(
                f"header '{name}' is reserved for Triton usage and cannot be forwarded to the model: do not send it, "
                "or change the header forward pattern"
            )
        self._cache.put(name, wanted)
        return wanted


class HeaderParameters:
    """The headers of a request that become parameters: those that the operator's pattern selects and, while the broker
    `wants_context`, a sampled trace context."""

    def __init__(self, forward: Forward | None, wants_context: Callable[[], bool] = lambda: False) -> None:
        self._forward = forward
        self._wants_context = wants_context

    @property
    def active(self) -> bool:
        """True if `of` may return headers."""
        return self._forward is not None or self._wants_context()

    def of(self, headers: Collection[tuple[str, str]]) -> dict[str, str] | None:
        forwarded = self._forward.of(headers) if self._forward is not None else None
        context = _context(headers) if self._wants_context() else None
        if context is None or forwarded is None:
            return context or forwarded
        return forwarded | context


def _context(headers: Iterable[tuple[str, str]]) -> dict[str, str] | None:
    """Contexts that are not sampled are left out: the broker ignores them, and requests with parameters cost more."""
    values: dict[str, list[str]] = {TRACE_PARENT: [], TRACE_STATE: []}
    for name, value in headers:
        low = name.lower()
        if low in values:
            values[low].append(value)
    if len(values[TRACE_PARENT]) != 1:
        return None
    (parent,), state = values[TRACE_PARENT], ",".join(values[TRACE_STATE])
    context = parsed(parent, state)
    if context is None or not context.sampled:
        return None
    return {TRACE_PARENT: parent} | ({TRACE_STATE: context.state} if context.state else {})


def merged(parameters: Mapping[str, Value] | None, forwarded: dict[str, str] | None) -> Mapping[str, Value] | None:
    """The parameters of a request with its forwarded headers, which take precedence over parameters of the same
    name."""
    if not forwarded:
        return parameters
    together: dict[str, Value] = dict(forwarded)
    if parameters:
        taken = {name.lower() for name in forwarded}
        together.update((name, value) for name, value in parameters.items() if name.lower() not in taken)
        if len(together) > PARAMETERS:
            raise InvalidRequest(
                f"the request has {len(together)} parameters, including forwarded headers; the limit is {PARAMETERS}"
            )
    return together

"""How a worker process ends. The rule: the broker can tell from the exit code alone what happened."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Codes start at 64, apart from what interpreters and shells use themselves (1, 2, 126 and above)."""

    STOPPED = 0
    """Told to stop: everything was answered and the model is finalized."""
    USAGE = 64
    """The command line makes no sense."""
    LINK_LOST = 65
    """The broker's end of the link has gone."""
    LOAD_FAILED = 66
    """LoadFailed was sent and says why."""
    BAD_ORDER = 67
    """The broker sent what the protocol does not allow."""
    FINALIZE_FAILED = 68
    """Everything was answered, but the model raised while it was finalized."""
    INTERNAL = 69
    """A fault in the worker itself; stderr has the trace."""
    DEVICE_LOST = 70
    """The GPU failed in a way after which no process that used it then can use it; stderr says how."""

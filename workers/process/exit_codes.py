"""Exit codes of a worker process, and its exit. The broker can tell from the exit code alone what happened."""

from __future__ import annotations

import os
import sys
from enum import IntEnum
from typing import NoReturn


class Exit(IntEnum):
    """Codes start at 64, to avoid those of interpreters and shells (1, 2, 126 and above)."""

    STOPPED = 0
    """Stopped by the broker: all requests were answered and the model is finalized."""
    USAGE = 64
    """Invalid command line."""
    LINK_LOST = 65
    """The link to the broker was lost."""
    LOAD_FAILED = 66
    """LoadFailed was sent with the reason."""
    BAD_ORDER = 67
    """The broker violated the protocol."""
    FINALIZE_FAILED = 68
    """All requests were answered, but the model raised an exception in its finalization."""
    INTERNAL = 69
    """A fault in the worker itself; stderr has the traceback."""
    DEVICE_LOST = 70
    """The GPU failed in a way that prevents this process from using it any more; stderr has the details."""


def exit_process(code: int) -> NoReturn:
    """Exits without interpreter shutdown: threads that a model left running, and libraries that fail during teardown,
    must neither delay the exit nor change its code."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)

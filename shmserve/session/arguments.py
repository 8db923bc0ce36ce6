"""Checks of the callers' names, versions, times and sizes. Each error names the argument and its value."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from shmserve.errors import InvalidRequest
from shmserve.protocol.messages import NAME_LENGTH

_LARGEST = 2**63 - 1


def check_name(what: str, name: Any) -> None:
    if not isinstance(name, str):
        raise InvalidRequest(f"the name of a {what} must be a str, not {type(name).__name__}")
    if len(name) > NAME_LENGTH:
        raise InvalidRequest(f"{what} name '{name[:40]}...' has {len(name)} characters; the limit is {NAME_LENGTH}")


def version_of(version: int | str | None) -> int:
    """The version as a number; 0 is the default version of the model."""
    if version is None or version == "":
        return 0
    try:
        number = int(version)
    except (TypeError, ValueError):
        raise InvalidRequest(f"version {version!r} is not a number") from None
    if not 0 < number <= _LARGEST:
        raise InvalidRequest(f"version {number} is not a number from 1 to 2^63-1")
    return number


def timeout_us_of(timeout: float | None) -> int:
    if timeout is None or timeout == math.inf:
        return 0
    try:
        positive = timeout > 0
    except TypeError:
        positive = False
    if not positive:
        raise InvalidRequest(f"timeout={timeout!r} must be a number of seconds above 0")
    return min(max(1, int(timeout * 1e6)), _LARGEST)


def check_seconds(name: str, seconds: Any) -> None:
    """Checks a time limit that may be 0, which means a single attempt."""
    if not isinstance(seconds, Real) or not float(seconds) >= 0:
        raise InvalidRequest(f"{name}={seconds!r} must be a number of seconds, at least 0")


def check_memory_bytes(size: Any) -> None:
    if not isinstance(size, Integral) or int(size) < 1:
        raise InvalidRequest(f"memory_bytes={size!r} must be a whole number of bytes above 0")

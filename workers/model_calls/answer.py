"""What a backend that runs requests one by one receives and returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

if TYPE_CHECKING:
    import numpy as np

    from shmserve.protocol.messages import Failure, Value, Work

    Array = np.ndarray[Any, np.dtype[Any]]


class Request(Struct, gc=False):
    """One request: its arrays in the order of the configuration, None where an optional input is not there."""

    work: Work
    arrays: list[Array | None]


class Answer(Struct, gc=False):
    """What became of one request: its outputs by name, or why there are none. `again`: it is to be run once more, and
    this is no answer; of its outputs only those count that are states of its sequence."""

    outputs: list[tuple[str, Any]] = []
    error: Failure | None = None
    parameters: dict[str, Value] | None = None
    again: bool = False

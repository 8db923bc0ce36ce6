"""The arguments and results of a backend that runs requests one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

if TYPE_CHECKING:
    import numpy as np

    from shmserve.protocol.messages import Failure, Value, Work

    Array = np.ndarray[Any, np.dtype[Any]]


class Request(Struct, gc=False):
    """One request: its arrays in the order of the configuration, None for an absent optional input."""

    work: Work
    arrays: list[Array | None]


class Answer(Struct, gc=False):
    """The result of one request: outputs by name, or an error. `again`: the request must run again; only outputs that
    are states of its sequence are used."""

    outputs: list[tuple[str, Any]] = []
    error: Failure | None = None
    parameters: dict[str, Value] | None = None
    again: bool = False

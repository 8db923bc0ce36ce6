"""What a caller asks for beside the inputs, made into fields of messages. The rule of the file: only what the wire
cannot carry is refused here; the rest is the server's to judge, as it knows the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import index
from typing import Any

from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.protocol import codec
from shmserve.protocol.messages import NAME_LENGTH, PACKET_BYTES, PARAMETERS, TENSORS, Infer, Options, Wanted
from shmserve.session.inputs import Encoder
from shmserve.session.ticket import Kept

_LARGEST = 2**63 - 1
_MOST_CLASSES = 2**31 - 1


class TopK(Struct, frozen=True):
    """In the place of an output: not the tensor, but its `k` largest values of each batch item, as strings
    b"value:index", or b"value:index:label" where the model has labels (`parse_class` takes them apart)."""

    k: int

    def __post_init__(self) -> None:
        try:
            good = 0 < index(self.k) <= _MOST_CLASSES and not isinstance(self.k, bool)
        except TypeError:
            good = False
        if not good:
            raise InvalidRequest(f"TopK({self.k!r}): it takes a number from 1 to {_MOST_CLASSES}")


def check_name(what: str, name: Any) -> None:
    if not isinstance(name, str):
        raise InvalidRequest(f"the name of a {what} is a str, not {type(name).__name__}")
    if len(name) > NAME_LENGTH:
        raise InvalidRequest(f"{what} name '{name[:40]}...' has {len(name)} characters; the limit is {NAME_LENGTH}")


def version_of(version: int | str | None) -> int:
    """0 is the default version of the model."""
    if version is None or version == "":
        return 0
    try:
        number = int(version)
    except (TypeError, ValueError):
        raise InvalidRequest(f"version {version!r} is not a number") from None
    if not 0 < number <= _LARGEST:
        raise InvalidRequest(f"version {number} is not a number from 1 on")
    return number


def timeout_us_of(timeout: float | None) -> int:
    if timeout is None or timeout == math.inf:
        return 0
    if not timeout > 0:
        raise InvalidRequest(f"timeout={timeout} is not a time in seconds above 0")
    return min(max(1, int(timeout * 1e6)), _LARGEST)


def options_of(
    priority: int | None,
    sequence: int | str | None,
    sequence_start: bool,
    sequence_end: bool,
    parameters: Mapping[str, Any] | None,
    request_id: str | None,
    window: int = 0,
    caller: str = "",
) -> Options | None:
    """None where nothing is set. The queue timeout travels in a field of its own, as Triton's parameter `timeout`."""
    if not (priority or sequence or sequence_start or sequence_end or parameters or request_id or window):
        return None
    if request_id is not None:
        check_name("request_id", request_id)
    if isinstance(sequence, str):
        check_name("sequence", sequence)
    elif sequence is not None and not 0 <= sequence < 2**64:
        raise InvalidRequest(f"sequence={sequence} does not fit in 64 bits")
    if (sequence_start or sequence_end) and not sequence:
        raise InvalidRequest("sequence_start and sequence_end need sequence=, its number or name")
    if priority is not None and not 0 <= priority < 2**64:
        raise InvalidRequest(f"priority={priority} is not a number from 0 to 2^64-1")
    given = dict(parameters or {})
    if len(given) > PARAMETERS:
        raise InvalidRequest(f"a request may have {PARAMETERS} parameters, this one has {len(given)}")
    queue_timeout_us = 0
    for name, value in given.items():
        check_name("parameter", name)
        if not isinstance(value, (str, int, float, bool)):
            raise InvalidRequest(f"parameter '{name}' must be str, int, float or bool, not {type(value).__name__}")
    if "timeout" in given:
        value = given.pop("timeout")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
            raise InvalidRequest(f"parameter 'timeout' is the time in the queue in microseconds, not {value!r}")
        queue_timeout_us = value
    return Options(
        request_id or "", priority or 0, queue_timeout_us, sequence or 0, sequence_start, sequence_end, given, window,
        caller if sequence else "",
    )  # fmt: skip


def wanted_of(outputs: Any, kept: Kept, encoder: Encoder, placed: bool = True) -> tuple[Wanted, ...]:
    """`outputs` is a list of names, or a mapping of names to arrays, TopK, or None: the output, wherever it is. Without
    `placed` there may be no arrays."""
    if isinstance(outputs, (str, bytes)):
        raise InvalidRequest(f"outputs is a list of names or a mapping of names to arrays, not {outputs!r}")
    try:
        names = list(outputs)
    except TypeError:
        raise InvalidRequest(f"outputs is a list of names or a mapping of names to arrays, not {outputs!r}") from None
    if len(names) > TENSORS:
        raise InvalidRequest(f"a request may ask for {TENSORS} outputs, this one asks for {len(names)}")
    found = []
    for name in names:
        check_name("output", name)
        how = outputs[name] if isinstance(outputs, Mapping) else None
        if type(how) is TopK:
            found.append(Wanted(name, None, index(how.k)))
        elif how is not None and not placed:
            raise InvalidRequest(f"output '{name}' has an array, but there is an answer for each part of a stream")
        else:
            found.append(Wanted(name, encoder.place(name, how, kept) if how is not None else None))
    return tuple(found)


def check_size(message: Infer) -> None:
    """Names and parameters can make a message larger than a packet."""
    try:
        size = len(codec.encode([message]))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"the request cannot be sent: {error}") from error
    if size > PACKET_BYTES - 1024:
        raise InvalidRequest(f"names and parameters make a message of {size} bytes; the limit is {PACKET_BYTES - 1024}")

"""Every error that shmserve raises or sends, in one tree; each class has the code that travels on the wire.

    ServeError
    |-- InvalidRequest      INVALID_ARG         the caller asked wrongly
    |   `-- ProtocolError   PROTOCOL            the caller's bytes are not our protocol
    |-- NotFound            NOT_FOUND           no such model, version, request
    |-- AlreadyExists       ALREADY_EXISTS
    |-- Unsupported         UNSUPPORTED         understood, but not done here
    |-- Denied              DENIED              understood, but not for you
    |-- Unavailable         UNAVAILABLE         not now: a limit, a stop, a model that is not ready
    |   |-- QueueTimeout    QUEUE_TIMEOUT       waited in the queue for longer than its policy allows
    |   `-- ConnectionLost  CONNECTION_LOST     the link ended before the answer came
    |-- DeadlineExceeded    DEADLINE_EXCEEDED   the caller's own timeout passed
    |-- Cancelled           CANCELLED           the caller took it back
    |-- HandleLost          HANDLE_LOST         the memory behind a tensor has gone with its owner
    |-- ModelFailed         MODEL_FAILED        the model, or the process it ran in, failed
    |-- Internal            INTERNAL            our fault
    `-- UnknownError        UNKNOWN             a code this version does not know

Texts go to callers who may not be trusted: they carry public names, numbers and the knob, never a path of the
server, the name of a segment, or an address.
"""

from __future__ import annotations


class ServeError(Exception):
    """The root. `code` is what travels; `str(error)` is the text for a person."""

    code = "UNKNOWN"

    @property
    def message(self) -> str:
        return str(self)


class InvalidRequest(ServeError):
    code = "INVALID_ARG"


class ProtocolError(InvalidRequest):
    code = "PROTOCOL"


class NotFound(ServeError):
    code = "NOT_FOUND"


class AlreadyExists(ServeError):
    code = "ALREADY_EXISTS"


class Unsupported(ServeError):
    code = "UNSUPPORTED"


class Denied(ServeError):
    code = "DENIED"


class Unavailable(ServeError):
    code = "UNAVAILABLE"


class QueueTimeout(Unavailable):
    code = "QUEUE_TIMEOUT"


class ConnectionLost(Unavailable):
    code = "CONNECTION_LOST"


class DeadlineExceeded(ServeError, TimeoutError):
    code = "DEADLINE_EXCEEDED"


class Cancelled(ServeError):
    code = "CANCELLED"


class HandleLost(ServeError):
    code = "HANDLE_LOST"


class ModelFailed(ServeError):
    code = "MODEL_FAILED"


class Internal(ServeError):
    code = "INTERNAL"


class UnknownError(ServeError):
    code = "UNKNOWN"


def _tree(root: type[ServeError]) -> dict[str, type[ServeError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


BY_CODE = _tree(ServeError)
"""Wire code -> class. What `from_wire` looks in."""


def from_wire(code: str, text: str) -> ServeError:
    """The exception for a code and a text that came in a message."""
    return BY_CODE.get(code, UnknownError)(text)

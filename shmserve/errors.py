"""All errors that shmserve raises or sends. Each class has a code on the wire.

    ServeError
    |-- InvalidRequest      INVALID_ARG         the request is invalid
    |   `-- ProtocolError   PROTOCOL            the bytes do not follow the protocol
    |-- NotFound            NOT_FOUND           no such model, version, request
    |-- AlreadyExists       ALREADY_EXISTS
    |-- Unsupported         UNSUPPORTED         valid, but not supported by this server
    |-- Denied              DENIED              valid, but the caller lacks the role
    |-- Unavailable         UNAVAILABLE         temporary: a limit, a stop, a model that is not ready
    |   |-- QueueTimeout    QUEUE_TIMEOUT       queued for longer than the queue's policy allows
    |   `-- ConnectionLost  CONNECTION_LOST     the link ended before the response
    |-- DeadlineExceeded    DEADLINE_EXCEEDED   the caller's own timeout passed
    |-- Cancelled           CANCELLED           the caller cancelled the request
    |-- HandleLost          HANDLE_LOST         the memory of a tensor was lost with its owner
    |-- ModelFailed         MODEL_FAILED        the model, or its process, failed
    |-- Internal            INTERNAL            a bug in shmserve
    `-- UnknownError        UNKNOWN             a code that this version does not define

Invariant: callers may be untrusted, so texts contain public names, numbers and the setting to change, but never paths
of the server, names of segments, or addresses.
"""

from __future__ import annotations


class ServeError(Exception):
    """Base class. `code` is sent on the wire; `str(error)` is the text for users."""

    code = "UNKNOWN"

    @property
    def message(self) -> str:
        return str(self)


class InvalidRequest(ServeError):
    """The request is invalid. Retrying it does not help."""

    code = "INVALID_ARG"


class ProtocolError(InvalidRequest):
    """The bytes do not follow the protocol."""

    code = "PROTOCOL"


class NotFound(ServeError):
    """There is no such model, version or request."""

    code = "NOT_FOUND"


class AlreadyExists(ServeError):
    """The object to create already exists."""

    code = "ALREADY_EXISTS"


class Unsupported(ServeError):
    """The request is valid, but this server does not support it."""

    code = "UNSUPPORTED"


class Denied(ServeError):
    """The request is valid, but the caller lacks the role for it."""

    code = "DENIED"


class Unavailable(ServeError):
    """Temporary: a limit was reached, the server is stopping, or the model is not ready. Try again later."""

    code = "UNAVAILABLE"


class QueueTimeout(Unavailable):
    """The request was queued for longer than the queue's policy allows."""

    code = "QUEUE_TIMEOUT"


class ConnectionLost(Unavailable):
    """The connection ended before the response. The request may or may not have run."""

    code = "CONNECTION_LOST"


class DeadlineExceeded(ServeError, TimeoutError):
    """The caller's own timeout passed."""

    code = "DEADLINE_EXCEEDED"


class Cancelled(ServeError):
    """The caller cancelled the request."""

    code = "CANCELLED"


class HandleLost(ServeError):
    """The memory of a tensor was lost with the process that owned it."""

    code = "HANDLE_LOST"


class ModelFailed(ServeError):
    """The model, or its process, failed. The text comes from the model."""

    code = "MODEL_FAILED"


class Internal(ServeError):
    """A bug in shmserve."""

    code = "INTERNAL"


class UnknownError(ServeError):
    """A code that this version does not define, as the server is newer than the client."""

    code = "UNKNOWN"


def _tree(root: type[ServeError]) -> dict[str, type[ServeError]]:
    kinds = {root.code: root}
    for child in root.__subclasses__():
        kinds.update(_tree(child))
    return kinds


BY_CODE = _tree(ServeError)
"""Wire code -> class."""


def from_wire(code: str, text: str) -> ServeError:
    """The exception for a received code and text."""
    return BY_CODE.get(code, UnknownError)(text)

"""Status codes of gRPC. The rule of the file: a service ends a call with one of these, and says nothing else of how."""

from __future__ import annotations

from enum import IntEnum

from shmserve.clients.gateway.kserve.documents import BadLoad
from shmserve.clients.gateway.kserve.status import grpc_of, grpc_text_of
from shmserve.errors import ServeError


class Code(IntEnum):
    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class RpcError(Exception):
    """How a call ends, where it does not end well."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


def code_of(error: ServeError) -> Code:
    return Code.INTERNAL if isinstance(error, BadLoad) else Code[grpc_of(error)]


def rpc_error(error: ServeError, request_id: str = "") -> RpcError:
    return RpcError(code_of(error), grpc_text_of(error, request_id))

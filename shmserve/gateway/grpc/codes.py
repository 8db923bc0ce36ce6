"""Converts errors of the server to gRPC errors: status code and text."""

from __future__ import annotations

from shmserve.errors import ServeError
from shmserve.gateway.kserve.status import grpc_of, grpc_text_of
from shmserve.gateway.upstream.documents import BadLoad
from shmserve.protocol.grpc.codes import Code, RpcError


def code_of(error: ServeError) -> Code:
    # Triton answers every failed load with INTERNAL.
    return Code.INTERNAL if isinstance(error, BadLoad) else Code[grpc_of(error)]


def rpc_error(error: ServeError, request_id: str = "") -> RpcError:
    return RpcError(code_of(error), grpc_text_of(error, request_id))

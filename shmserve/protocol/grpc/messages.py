"""The protobuf messages of gRPC, from grpc.binpb, which `make proto` writes. Invariant: errors of protobuf are
converted here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import json_format, message_factory
from google.protobuf.message import DecodeError, Message

from shmserve.errors import Internal, InvalidRequest
from shmserve.protobuf_pools import pool_of

INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"
POOL = pool_of(Path(__file__).with_name("grpc.binpb"))


def message_class(name: str) -> Any:
    """`name` includes the package."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(name))


def methods(service: str) -> dict[str, Any]:
    """Method name -> its descriptor."""
    return dict(POOL.FindServiceByName(service).methods_by_name)


def read(kind: Any, data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError:
        raise unreadable(kind.DESCRIPTOR.name) from None


def unreadable(name: str) -> InvalidRequest:
    return InvalidRequest(f"failed to parse the request: its bytes are not a valid {name}")


def filled(kind: Any, document: Any) -> bytes:
    """Encodes a document as a message, without fields that the message does not define."""
    message: Message = kind()
    try:
        json_format.ParseDict(document, message, ignore_unknown_fields=True, descriptor_pool=POOL)
    except json_format.ParseError as error:
        raise Internal(f"the server's response does not fit into {kind.DESCRIPTOR.name}: {error}") from error
    return message.SerializeToString()

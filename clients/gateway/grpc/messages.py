"""The messages of gRPC as protobuf has them: grpc.binpb, which `make proto` writes. The rule of the file: descriptors
live in a pool of their own, as other packages register messages of the same names in the one of the process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import DecodeError, Message

from shmserve.errors import Internal, InvalidRequest

INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"
_FILE = Path(__file__).with_name("grpc.binpb")


def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(_FILE.read_bytes()).file:
        pool.Add(file)
    return pool


POOL = _pool()


def message_class(name: str) -> Any:
    """`name` with its package."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(name))


def methods(service: str) -> dict[str, Any]:
    """Name of a method -> its descriptor."""
    return dict(POOL.FindServiceByName(service).methods_by_name)


def read(kind: Any, data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError:
        raise unreadable(kind.DESCRIPTOR.name) from None


def unreadable(name: str) -> InvalidRequest:
    return InvalidRequest(f"failed to parse the request: its bytes are no {name}")


def filled(kind: Any, document: Any) -> bytes:
    """A document of the server as a message. Fields that the message does not have are left out."""
    made: Message = kind()
    try:
        json_format.ParseDict(document, made, ignore_unknown_fields=True, descriptor_pool=POOL)
    except json_format.ParseError as error:
        raise Internal(f"the server's answer does not fit into {kind.DESCRIPTOR.name}: {error}") from error
    return made.SerializeToString()

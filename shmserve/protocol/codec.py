"""Converts packets to messages and back, without I/O.

A packet is a MessagePack array of messages. Decoding is typed and bounded. A bad message does not affect the others in
its packet: `decode` returns it as a `Refused`, with its request number if that can be found, so that a client's mistake
fails only that request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta, Struct

from shmserve.errors import Internal, ProtocolError
from shmserve.protocol import messages
from shmserve.protocol.bodies import MALFORMED
from shmserve.protocol.messages import PACKET_BYTES, PACKET_MESSAGES

Message = Any


class Refused(Struct):
    """A message that could not be decoded. `request` is 0 if its request number could not be read."""

    request: int
    text: str


REFUSED = 64
"""Maximum number of bad messages in one packet, since each costs time. With more, the whole packet is refused."""

encode = msgspec.msgpack.Encoder().encode
"""Encodes a list of messages as a packet."""

_raw_list = msgspec.msgpack.Decoder(list[msgspec.Raw], strict=True)
_integer = msgspec.msgpack.Decoder(int)


def encode_of_model(batch: Sequence[Message]) -> bytes:
    """Like `encode`, for texts that a model made: characters that UTF-8 does not have become '?', such as half of a
    surrogate pair in an error about a client's JSON."""
    try:
        return encode(batch)
    except UnicodeEncodeError:
        return encode(_encodable(msgspec.to_builtins(batch, builtin_types=(bytes,))))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list | tuple):
        return [_encodable(one) for one in value]
    if isinstance(value, dict):
        return {_encodable(name): _encodable(one) for name, one in value.items()}
    return value


class Codec:
    """Decodes the messages of one direction, e.g. `Codec(messages.ClientMessage)`. `limit`: maximum number of messages
    per packet."""

    def __init__(self, union: Any, limit: int = PACKET_BYTES) -> None:
        self._limit = limit
        self._decode: Callable[[bytes], list[Message]] = msgspec.msgpack.Decoder(
            Annotated[list[union], Meta(max_length=limit)]
        ).decode
        self._raws = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], Meta(max_length=limit)]).decode
        self._decode_one = msgspec.msgpack.Decoder(union).decode
        self._by_tag = {kind.__struct_config__.tag: kind for kind in get_args(union)}

    def decode(self, packet: bytes) -> list[Message]:
        """All messages of a packet, bad ones as Refused. Raises ProtocolError if `packet` is not a packet."""
        if len(packet) > PACKET_BYTES:
            raise ProtocolError(f"packet of {len(packet)} bytes exceeds the limit of {PACKET_BYTES}")
        try:
            return self._decode(packet)
        except MALFORMED:
            return self._decode_singly(packet)

    def _decode_singly(self, packet: bytes) -> list[Message]:
        try:
            raws = self._raws(packet)
        except MALFORMED as error:
            if "of length <=" in str(error):
                raise ProtocolError(f"the packet has more than {self._limit} messages, the limit") from None
            raise ProtocolError(f"invalid packet, expected a MessagePack array of messages: {error}") from None
        decoded: list[Message] = []
        refused = 0
        for raw in raws:
            try:
                decoded.append(self._decode_one(raw))
            except MALFORMED as error:
                refused += 1
                if refused > REFUSED:
                    raise ProtocolError(f"more than {REFUSED} messages of the packet are invalid: {error}") from None
                decoded.append(self._refuse(raw, str(error)))
        return decoded

    def _refuse(self, raw: msgspec.Raw, reason: str) -> Refused:
        """Finds the request number of a bad message, and names the wrong field instead of its index. Reads no more of
        the message than that, as it may be large and clients may send many."""
        try:
            fields = _raw_list.decode(raw)
            tag = _integer.decode(fields[0])
        except (msgspec.MsgspecError, IndexError):
            return Refused(0, "a message must be an array that begins with its tag, an integer")
        kind = self._by_tag.get(tag)
        if kind is None:
            known = ", ".join(f"{tag} {known.__name__}" for tag, known in sorted(self._by_tag.items()))
            return Refused(_request_of(fields), f"unknown message type {tag}; known types: {known}")
        number = _request_of(fields) if "request" in kind.__struct_fields__[:1] else 0
        return Refused(number, f"message {kind.__name__}: {_in_names(kind, reason)}")


def _request_of(fields: list[msgspec.Raw]) -> int:
    try:
        number = _integer.decode(fields[1])
    except (msgspec.MsgspecError, IndexError):
        return 0
    return number if 0 < number < 2**63 else 0


_PATH = re.compile(r" - at `\$(.*)`$")
_STEP = re.compile(r"\[(\d+|\.\.\.)\]")


def _in_names(kind: type[Struct], reason: str) -> str:
    """`Expected `str` ... - at `$[4][0][0]`` -> `inputs[0].name: expected `str` ...`."""
    match = _PATH.search(reason)
    if not match:
        return reason
    path, here = "", kind
    in_struct = True
    steps = _STEP.findall(match[1])
    for position, step in enumerate(steps):
        if in_struct and step != "..." and here is not None:
            index = int(step) - (1 if position == 0 else 0)  # a tagged array begins with its tag
            fields = here.__struct_fields__
            name = fields[index] if 0 <= index < len(fields) else f"field {index}"
            path += f".{name}" if path else name
            here = _ELEMENT.get((here, name))  # type: ignore[assignment]
            in_struct = here is messages.Options
        else:
            path += f"[{step}]" if step != "..." else "[]"
            in_struct = here is not None
    text = reason[: match.start()]
    return f"{path or 'message'}: {text[:1].lower()}{text[1:]}"


_ELEMENT: dict[tuple[type[Struct], str], type[Struct]] = {
    (messages.Infer, "inputs"): messages.Tensor,
    (messages.Infer, "outputs"): messages.Wanted,
    (messages.Tensor, "data"): messages.Handle,
    (messages.Return, "handles"): messages.Handle,
}


def pack(batch: Sequence[Message]) -> list[bytes]:
    """Encodes messages as few packets, in order."""
    packet = encode(batch)
    if len(packet) <= PACKET_BYTES and len(batch) <= PACKET_MESSAGES:
        return [packet]
    if len(batch) == 1:
        name = type(batch[0]).__name__
        raise Internal(f"a {name} message of {len(packet)} bytes exceeds the packet limit of {PACKET_BYTES}")
    half = len(batch) // 2
    return pack(batch[:half]) + pack(batch[half:])

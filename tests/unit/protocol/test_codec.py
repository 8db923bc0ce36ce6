"""Decoding of anything that is not a valid packet.

Invariant: for any bytes `Codec.decode` returns a list of messages and Refused, or raises ProtocolError; its
memory is proportional to the packet, and the error of an invalid request has its number.
"""

from __future__ import annotations

import tracemalloc
from typing import Any, get_args

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from msgspec import inspect
from msgspec.structs import replace

from shmserve.errors import ProtocolError
from shmserve.protocol import codec, messages, worker_messages
from tests.support.hypothesis_profiles import examples

UNIONS = {
    "client": messages.ClientMessage,
    "broker": messages.BrokerMessage,
    "order": worker_messages.WorkerOrder,
    "report": worker_messages.WorkerReport,
}
CODECS = {name: codec.Codec(union) for name, union in UNIONS.items()}
KINDS = {name: get_args(union) for name, union in UNIONS.items()}


def values(kind: inspect.Type) -> SearchStrategy[Any]:
    if isinstance(kind, inspect.IntType):
        return st.integers(-(2**63) if kind.ge is None else kind.ge, 2**63 - 1 if kind.le is None else kind.le)
    if isinstance(kind, inspect.StrType):
        return st.text(max_size=min(kind.max_length or 12, 12))
    if isinstance(kind, inspect.BytesType):
        return st.binary(max_size=40)
    if isinstance(kind, inspect.VarTupleType):
        return st.lists(values(kind.item_type), max_size=3).map(tuple)
    if isinstance(kind, inspect.TupleType):
        return st.tuples(*(values(item) for item in kind.item_types))
    if isinstance(kind, inspect.DictType):
        return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=3)
    if isinstance(kind, inspect.UnionType):
        return st.one_of([values(one) for one in kind.types])
    if isinstance(kind, inspect.StructType):
        return st.builds(kind.cls, **{field.name: values(field.type) for field in kind.fields})
    simple = {
        inspect.BoolType: st.booleans(),
        inspect.FloatType: st.floats(allow_nan=False),
        inspect.NoneType: st.none(),
    }
    return simple[type(kind)]


VALID = {
    union: st.lists(st.one_of([values(inspect.type_info(kind)) for kind in kinds]), max_size=4)
    for union, kinds in KINDS.items()
}


def decode(union: str, packet: bytes) -> list[Any] | None:
    """The decoded messages; None if the codec refused the packet."""
    try:
        found = CODECS[union].decode(packet)
    except ProtocolError:
        return None
    assert type(found) is list
    for message in found:
        assert isinstance(message, (*KINDS[union], codec.Refused))
        if isinstance(message, codec.Refused):
            assert message.text
            assert 0 <= message.request < 2**63
    return found


unions = st.sampled_from(sorted(UNIONS))


@given(unions, st.data())
def test_messages_round_trip(union: str, data: st.DataObject) -> None:
    batch = data.draw(VALID[union])
    assert decode(union, codec.encode(batch)) == batch


@given(unions, st.binary(max_size=300))
def test_any_bytes(union: str, packet: bytes) -> None:
    decode(union, packet)


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=8), st.binary(max_size=8)
)
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=6), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=25,
)
tags = st.sampled_from([kind.__struct_config__.tag for kinds in KINDS.values() for kind in kinds])
tagged = st.builds(lambda tag, fields: [tag, *fields], tags | st.integers(-3, 130), st.lists(trees, max_size=9))


@settings(max_examples=examples(quick=30))
@given(unions, st.one_of(trees, st.lists(tagged, max_size=4), st.lists(tagged | trees, max_size=4)))
def test_any_structure(union: str, tree: Any) -> None:
    found = decode(union, msgpack.packb(tree))
    if isinstance(tree, list):
        assert found is not None
        assert len(found) == len(tree), "one bad message must not take the others with it"


@st.composite
def mutated(draw: DrawFn) -> tuple[str, bytes]:
    """A valid packet with a few bytes changed, removed or duplicated, or with a part of another packet inserted."""
    union = draw(unions)
    packet = bytearray(codec.encode(draw(VALID[union])))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(packet)))
        how = draw(st.sampled_from(["set", "cut", "insert", "double", "end"]))
        if how == "set" and at < len(packet):
            packet[at] = draw(st.sampled_from([0, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC6, 0xCF, 0xD3, 0xDD, 0xDF, 0xFF]))
        elif how == "cut":
            del packet[at : at + draw(st.integers(1, 8))]
        elif how == "insert":
            packet[at:at] = draw(st.binary(min_size=1, max_size=6))
        elif how == "double":
            packet[at:at] = packet[at : at + 30]
        else:
            del packet[at:]
    return union, bytes(packet)


@settings(max_examples=examples(600, quick=200))
@given(mutated())
def test_mutated_packets(case: tuple[str, bytes]) -> None:
    decode(*case)


@st.composite
def one_field_wrong(draw: DrawFn) -> tuple[int, list[Any]]:
    request = draw(st.integers(1, 2**63 - 1))
    infer = [7, request, "model", 1, [["x", "FP32", [2, 2], b"0" * 16]], None, 0, None]
    tensor = infer[4][0]  # type: ignore[index]
    place, index = draw(st.sampled_from([(infer, i) for i in range(2, 8)] + [(tensor, i) for i in range(4)]))
    place[index] = draw(
        st.sampled_from(
            [-1, 2**64 - 1, 1.5, "n" * 300, [["x"] * 5] * 300, {"unknown": 1}, b"b" * 5000, [[1, 2]] * 5000, [[]]]
        )
    )
    return request, infer


@given(one_field_wrong())
def test_a_refused_request_keeps_its_number(case: tuple[int, list[Any]]) -> None:
    request, infer = case
    found = decode("client", msgpack.packb([[4, 1], infer, [8, 77]]))
    assert found is not None
    before, bad, after = found
    assert before == messages.Ping(1)
    assert after == messages.Cancel(77)
    assert bad.request == request, "whether Refused or, as some values are valid in some places, an Infer"


def test_the_text_names_the_field() -> None:
    tensor = ["x", "FP32", [2, 2], b""]
    cases = {
        "inputs[1].name": [7, 5, "m", 1, [tensor, ["n" * 300, "FP32", [1], b""]]],
        "inputs[0].shape": [7, 5, "m", 1, [["x", "FP32", [1] * 33, b""]]],
        "inputs[0].data": [7, 5, "m", 1, [["x", "FP32", [1], b"b" * 4097]]],
        "inputs": [7, 5, "m", 1, [tensor] * 10_000],
        "model": [7, 5, "m" * 300, 1, []],
        "version": [7, 5, "m", -1, []],
        "timeout_us": [7, 5, "m", 1, [], None, -1],
    }
    for field, message in cases.items():
        found = decode("client", msgpack.packb([message]))
        assert found is not None
        assert isinstance(found[0], codec.Refused)
        assert found[0].request == 5
        assert field in found[0].text, found[0].text


def headers() -> list[bytes]:
    """Headers that claim up to four billion elements: alone, nested, and at every position of an Infer."""
    huge = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"]
    fields = [b"\x07", b"\x01", b"\xa1m", b"\x00", b"\x90", b"\xc0", b"\x00", b"\x80"]
    found = [*huge, *(claim * 30_000 for claim in huge), b"\x91" * 190_000, b"\x81\xa0" * 90_000]
    for claim in huge:
        for place in range(1, len(fields)):
            start = b"\x91\x98" + b"".join(fields[:place]) + claim
            found += [start, start + b"\x01" * 1000]
        found.append(b"\x91\x95\x07\x01\xa1m\x00\x91\x94\xa1x\xa4FP32" + claim)
        found.append(b"\x91\x95\x07\x01\xa1m\x00\x91\x94\xa1x\xa4FP32\x91\x01" + claim)
        found.append(b"\x91\x92\x03" + claim + b"\x93\x01\x02\x03" * 100)
    return found


def measured(union: str, packet: bytes) -> tuple[list[Any] | None, int]:
    tracemalloc.start()
    try:
        return decode(union, packet), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("union", sorted(UNIONS))
def test_an_announced_size_allocates_nothing(union: str) -> None:
    for packet in headers():
        found, peak = measured(union, packet)
        assert found is None
        assert peak < 1 << 20, f"{peak} bytes for a packet of {len(packet)} that begins {packet[:12].hex()}"


@pytest.mark.parametrize("message", [b"\xc0", b"\x90", b"\x91\x63", b"\x92\x04\x01"])
def test_decoding_many_small_objects_takes_proportional_memory(message: bytes) -> None:
    """Objects cost some hundred bytes of memory per byte of the packet; the size of packets is limited."""
    count = 10_000
    packet = b"\xdd" + count.to_bytes(4, "big") + message * count
    _, peak = measured("client", packet)
    assert peak < 300 * len(packet)


@pytest.mark.parametrize("size", [messages.PACKET_BYTES + 1, 4 * messages.PACKET_BYTES])
def test_a_packet_over_the_limit_is_refused_unread(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"{size}.*{messages.PACKET_BYTES}"):
        CODECS["client"].decode(b"\xdd" + b"\xff" * (size - 1))


def test_deep_nesting_inside_a_valid_packet() -> None:
    """The nested message is refused with its number; the other messages are decoded."""
    deep = b"\x91" * 500 + b"\x01"
    packet = b"\x93" + msgspec.msgpack.encode([4, 1]) + b"\x93\x07\x05" + deep + msgspec.msgpack.encode([8, 9])
    found = decode("client", packet)
    assert found is not None
    assert found[0] == messages.Ping(1)
    assert isinstance(found[1], codec.Refused)
    assert found[2] == messages.Cancel(9)
    with pytest.raises(ProtocolError, match="invalid packet"):
        CODECS["client"].decode(b"\x91\x93\x04\x01" + b"\x91" * 100_000 + b"\x01")  # in a field after those of a Ping


UNUSUAL = {
    "utf8": b"\x91\x95\x07\x01\xa4\xff\xfe\xfd\xfc\x00\x90",
    "utf8-deep": b"\x91\x95\x07\x01\xa1m\x00\x91\x94\xa2\xc3\x28\xa4FP32\x91\x01\xc4\x01z",
    "text-tag": b"\x91\x93\xa3abc\x01\x02",
    "huge-tag": b"\x91\x91\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    "extension": b"\x91\xc7\x03\x05abc",
    "timestamp": b"\x91\xd6\xff\x00\x00\x00\x00",
    "float-tag": b"\x91\x92\xcb\x40\x1c\x00\x00\x00\x00\x00\x00\x01",
    "bool-tag": b"\x91\x92\xc3\x01",
    "two": b"\x90\x90",
    "empty": b"",
}


@pytest.mark.parametrize("packet", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_packets_are_refused(packet: bytes) -> None:
    for union in UNIONS:
        found = decode(union, packet)
        assert found is None or all(isinstance(message, codec.Refused) for message in found)


def test_a_packet_with_too_many_invalid_messages_is_refused() -> None:
    invalid = [4, "no number"]
    assert len(CODECS["client"].decode(msgpack.packb([invalid] * codec.REFUSED))) == codec.REFUSED
    with pytest.raises(ProtocolError, match=f"more than {codec.REFUSED} messages of the packet are invalid"):
        CODECS["client"].decode(msgpack.packb([invalid] * (codec.REFUSED + 1)))


def test_invalid_unicode_of_models_is_encoded() -> None:
    row = worker_messages.Row(
        7,
        (messages.Tensor("y\udcff", "FP32", (1,), b"\xff" * 4),),
        messages.Failure("C", "a\ud800b"),
        {"\udfff": "\ud8ff", "é": 1.5},
    )
    with pytest.raises(UnicodeEncodeError):
        codec.encode([row])
    (found,) = msgpack.unpackb(codec.encode_of_model([row]), strict_map_key=False)
    expected = replace(
        row,
        outputs=(messages.Tensor("y?", "FP32", (1,), b"\xff" * 4),),
        error=messages.Failure("C", "a?b"),
        parameters={"?": "?", "é": 1.5},
    )
    assert found == msgpack.unpackb(codec.encode([expected]))[0]
    assert codec.encode_of_model([expected]) == codec.encode([expected])

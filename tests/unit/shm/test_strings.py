"""String tensors against a plain loop over struct, and malformed input."""

from __future__ import annotations

import re
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import InvalidRequest
from shmserve.shm.strings import decode_bytes, encode_bytes
from tests.support.cases import cases


def plain(items: list[bytes]) -> bytes:
    out = b""
    for item in items:
        out += struct.pack("<I", len(item)) + item
    return out


def objects(items: list[Any]) -> np.ndarray[Any, np.dtype[np.object_]]:
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array


@given(st.lists(st.one_of(st.text(max_size=10), st.binary(max_size=20)), max_size=20))
def test_strings_round_trip_as_bytes(items: list[str | bytes]) -> None:
    expected = [item.encode() if isinstance(item, str) else item for item in items]
    array = objects(items)
    data = encode_bytes(array)
    assert data == encode_bytes(items) == plain(expected)
    assert array.tolist() == items
    back = decode_bytes(data, (len(items),))
    assert back.tolist() == expected
    assert back.dtype == object
    assert not back.flags.writeable


@cases(
    (np.array("word"), [b"word"]),
    (np.array(b"word", dtype=object), [b"word"]),
    (np.array([["a", "bc"], ["déf", ""]]), [b"a", b"bc", "déf".encode(), b""]),
    (np.array([[b"a", b"bc"], [b"d", b""]]).T, [b"a", b"d", b"bc", b""]),
    (np.array([["a", "b"], ["c", "d"]], dtype=object)[:, 1], [b"b", b"d"]),
    (np.asfortranarray(np.array([["a", "b"], ["c", "d"]], dtype=object)), [b"a", b"b", b"c", b"d"]),
    (objects([np.str_("x"), np.bytes_(b"y"), bytearray(b"z"), memoryview(b"w")]), [b"x", b"y", b"z", b"w"]),
    (np.zeros((0, 3), dtype=object), []),
    (["a\0", b"b\0"], [b"a\0", b"b\0"]),
    ([["a", "b"], ["c", "d"]], [b"a", b"b", b"c", b"d"]),
    ("word", [b"word"]),
    (b"word\0", [b"word\0"]),
)
def test_all_containers_of_strings(array: Any, items: list[bytes]) -> None:
    assert encode_bytes(array) == plain(items)


@cases(
    (["a", 5], "element 1 is of type int; expected str or bytes"),
    ([None], "element 0 is of type NoneType"),
    (["a", "\ud800"], "element 1 cannot be sent as UTF-8"),
    ([1.5], "element 0 is of type float"),
)
def test_other_elements_are_refused(items: list[Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(says)):
        encode_bytes(objects(items))


def test_other_types_are_converted_on_request() -> None:
    assert encode_bytes(objects(["a", 5, None, b"b", 1.5]), str) == plain([b"a", b"5", b"None", b"b", b"1.5"])
    with pytest.raises(InvalidRequest, match="element 0 cannot be sent as UTF-8"):
        encode_bytes(objects(["\ud800"]), str)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
@pytest.mark.parametrize("shape", [(3,), (3, 1), (1, 3, 1)])
def test_any_buffer_is_read_and_copied(kind: Any, shape: tuple[int, ...]) -> None:
    data = bytearray(plain([b"ab", b"", b"c\0"]))
    array = decode_bytes(kind(data), shape)
    data[:] = b"\xff" * len(data)
    assert (array.shape, array.ravel().tolist()) == (shape, [b"ab", b"", b"c\0"])
    assert decode_bytes(kind(b""), (4, 0)).shape == (4, 0)
    assert decode_bytes(kind(plain([b"a"])), ()).tolist() == b"a"


@cases(
    (plain([b"x"] * 14), (4, 4), "expected 16 string elements for T, got 14"),
    (b"", (), "expected 1 string elements for T, got 0"),
    (plain([b"x"] * 17), (16,), "unexpected number of string elements 17 for T, expecting 16"),
    (plain([b"x"]), (0,), "unexpected number of string elements 1 for T, expecting 0"),
    (plain([b"x", b"yz"])[:-1], (2,), "incomplete string element 1 of 2 for T: only 1 of its 2 bytes are present"),
    (plain([b"x"]) + b"\0\0\0", (2,), "incomplete string element 1 of 2 for T: only 3 of the 4 bytes of"),
    (plain([b"x"]) + b"\0\0\0", (1,), "unexpected bytes for T after the last of 1 string elements"),
    (plain([b"x"]) + b"\5\0\0\0abc", (1,), "unexpected bytes for T after the last of 1 string elements"),
    (b"\xff" * 4, (1,), "incomplete string element 0 of 1 for T: only 0 of its 4294967295 bytes are present"),
    (b"\xff\xff\xff\x7fa", (2**62, 2**62), f"incomplete string element 0 of {2**124} for T"),
    (b"", (2**63, 2**63), f"expected {2**126} string elements for T, got 0"),
    (b"", (0, 2**63), f"invalid shape [0, {2**63}]"),
    (b"", (0,) * 70, "invalid shape"),
    (b"", (-1, -1), "shape [-1, -1] has a negative dim"),
)
def test_malformed_tensors_are_refused(data: bytes, shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(says)):
        decode_bytes(data, shape, "T")
    if "for T" in says:
        with pytest.raises(InvalidRequest, match=re.escape(says.replace(" for T", ""))):
            decode_bytes(data, shape)


@given(st.binary(max_size=60), st.integers(0, 5))
def test_any_bytes_are_decoded_or_refused(data: bytes, count: int) -> None:
    try:
        array = decode_bytes(data, (count,))
    except InvalidRequest:
        return
    assert plain(array.tolist()) == data

"""Python numbers and lists as arrays of a model's data type: values do not change, except that floats are rounded."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve import python_values
from shmserve.dtypes import ITEM_BYTES, to_numpy
from shmserve.errors import InvalidRequest
from shmserve.python_values import is_python_value, to_array
from tests.support.cases import cases

INTEGERS = [name for name in ITEM_BYTES if "INT" in name]


@cases(
    ([[1, 2]], "FP32", np.array([[1, 2]], np.float32)),
    ([0.1, 2], "FP32", np.array([0.1, 2], np.float32)),
    ((1.5, math.inf), "FP16", np.array([1.5, np.inf], np.float16)),
    ([], "INT8", np.zeros(0, np.int8)),
    ([[], []], "BOOL", np.zeros((2, 0), np.bool_)),
    ([True, False], "BOOL", np.array([True, False])),
    ([0, 1], "BOOL", np.array([False, True])),
    ([2**64 - 1], "UINT64", np.array([2**64 - 1], np.uint64)),
    ([2**63 + 1, 1], "UINT64", np.array([2**63 + 1, 1], np.uint64)),
    ([2**63, -1], "FP64", np.array([2**63, -1], np.float64)),
    ([2**53, 0.5], "FP64", np.array([2**53, 0.5], np.float64)),
    ([1e20, 3], "FP32", np.array([1e20, 3], np.float32)),
    ([-(2**63)], "INT64", np.array([-(2**63)], np.int64)),
    (3, "INT32", np.array(3, np.int32)),
    ([2**24], "FP32", np.array([2**24], np.float32)),
    ([2**60], "FP32", np.array([2**60], np.float32)),
    (["a", b"\xff"], "BYTES", np.array(["a", b"\xff"], object)),
    ([["a"], ["b"]], "BYTES", np.array([["a"], ["b"]], object)),
    ("text", "BYTES", np.array("text", object)),
)
def test_values_are_converted(value: Any, dtype: str, expected: Any) -> None:
    array = to_array(value, dtype)
    assert array.dtype == to_numpy(dtype)
    np.testing.assert_array_equal(array, expected)


@cases(
    ([1, 300], "UINT8", "300 is not within 0 ... 255, as UINT8 needs"),
    ([-1], "UINT64", "-1 is not within 0 ... 18446744073709551615"),
    ([2**70], "INT64", "1180591620717411303424 does not fit in INT64"),
    ([1.0], "INT32", "1.0 is not an integer, as INT32 needs"),
    ([1.5, 2], "INT32", "1.5 is not an integer"),
    ([2**24 + 1], "FP32", "16777217 is not exact as FP32; write a float"),
    ([2**53 + 1], "FP64", "9007199254740993 is not exact as FP64"),
    ([1e39], "FP32", "1e+39 is beyond the range of FP32"),
    ([70000], "FP16", "70000 is beyond the range of FP16"),
    ([257], "BF16", "257 is not exact as BF16"),
    (["1"], "FP32", "'1' is not a number, as FP32 needs"),
    ([None], "FP32", "None is not a number"),
    ([True], "FP32", "True is not a number"),
    ([True, 2], "INT32", "True is not a number, as INT32 needs"),
    ([[1, 2], (3, False)], "INT64", "False is not a number"),
    ([0.5, True], "FP32", "True is not a number"),
    ([2**53 + 1, 0.5], "FP64", "9007199254740993 is not exact as FP64; write a float"),
    ([[0.5], [-(2**24) - 1]], "FP32", "-16777217 is not exact as FP32"),
    ([2**63 + 1, -1], "FP64", "9223372036854775809 is not exact as FP64"),
    ([257, 0.5], "BF16", "257 is not exact as BF16"),
    ([2**53 + 1], "BF16", "9007199254740993 is not exact as BF16"),
    ([2, 1.5], "INT32", "1.5 is not an integer"),
    ([2**63, -1], "INT64", "9223372036854775808 is not within"),
    ([1.0], "BOOL", "1.0 is not true or false"),
    ([True, 1.0], "BOOL", "1.0 is not true or false"),
    ([2], "BOOL", "2 is not true or false"),
    ([0.5], "BOOL", "0.5 is not true or false"),
    ([[1, 2], np.array([True, False])], "FP32", "True is not a number"),
    ([np.array(["a", "b"])], "BYTES", "is not str or bytes"),
    (["a", 1], "BYTES", "1 is not str or bytes, as BYTES needs"),
    ([[1, 2], [3]], "FP32", "its lists have different lengths: 2 items at [0], 1 items at [1]"),
    ([[[1], [2]], [[1], [2, 3]]], "FP32", "1 items at [1][0], 2 items at [1][1]"),
    ([1, [2]], "FP32", "no list at [0], 1 items at [1]"),
    ([["a"], "b"], "BYTES", "1 items at [0], no list at [1]"),
)
def test_unsupported_values_are_refused(value: Any, dtype: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        to_array(value, dtype)
    assert text in str(caught.value)


def test_bfloat16_is_rounded() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = [0.1, 1.0, -3.3, 65504.0]
    array = to_array(values, "BF16")
    np.testing.assert_array_equal(array.view(np.uint16), np.array(values, ml_dtypes.bfloat16).view(np.uint16))


def test_bfloat16_without_a_type_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_values, "to_numpy", lambda dtype: np.dtype(np.uint16))
    assert to_array([[256, 0.5]], "BF16").tolist() == [[0x4380, 0x3F00]]
    assert to_array(-3, "BF16") == 0xC040
    for value, text in (([257], "257 is not exact"), (257, "257 is not exact"), ([0.5, 257], "257 is not exact"),
                        ([3.4e38], "3.4e+38 is beyond the range of BF16")):  # fmt: skip
        with pytest.raises(InvalidRequest, match=re.escape(text)):
            to_array(value, "BF16")


@cases(
    ([1], True),
    ("a", True),
    (b"a", True),
    (1.5, True),
    ([[]], True),
    ((True,), True),
    (np.zeros(2), False),
    ([np.zeros(2)], False),
    (np.float64(1), False),
    ([np.float32(1)], False),
    (None, False),
)
def test_python_values_are_recognised(value: Any, is_python: bool) -> None:
    assert is_python_value(value) is is_python


@given(st.lists(st.integers(-(2**65), 2**65), min_size=1), st.sampled_from([*INTEGERS, "FP16", "FP32", "FP64"]))
def test_integers_are_exact_or_refused(values: list[int], dtype: str) -> None:
    try:
        array = to_array(values, dtype)
    except InvalidRequest:
        return
    assert [int(item) for item in array] == values


@given(
    st.lists(st.integers(-(2**65), 2**65) | st.floats(width=16, allow_nan=False) | st.booleans(), min_size=1),
    st.sampled_from([*INTEGERS, "FP16", "FP32", "FP64", "BOOL"]),
)
def test_mixed_lists_keep_their_values_or_are_refused(values: list[Any], dtype: str) -> None:
    """Floats of 16 bits are exact in every type that has them."""
    try:
        array = to_array(values, dtype)
    except InvalidRequest:
        return
    assert array.tolist() == values
    assert dtype == "BOOL" or bool not in map(type, values)

"""Input texts become the tensor that the model expects, for every dtype; texts that do not fit are refused."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shmserve.dtypes import ITEM_BYTES, from_bfloat16, to_numpy
from shmserve.python_values import bfloat16_bits
from shmserve.terminal import inputs, values
from shmserve.terminal.errors import Misuse
from tests.support.cases import cases

INTEGERS = [name for name in ITEM_BYTES if "INT" in name]


def spec(dtype: str, *shape: int, name: str = "x") -> values.Spec:
    return {"name": name, "datatype": dtype, "shape": list(shape)}


PHOTO = spec("BYTES", 1, name="photo")


def known(*specs: values.Spec) -> dict[str, values.Spec]:
    return {one["name"]: one for one in specs}


def same(found: Any, dtype: Any, values: Any) -> bool:
    expected = np.array(values, dtype)
    return bool(found.dtype == expected.dtype and found.shape == expected.shape and np.array_equal(found, expected))


@pytest.mark.parametrize("dtype", ["FP16", "FP32", "FP64"])
def test_numbers_can_be_written_in_several_ways(dtype: str) -> None:
    for text in ("1,2,3", "1 2 3", "1, 2, 3", "[1, 2, 3]", "[[1, 2, 3]]", "[1.0, 2.0, 3.0]"):
        assert same(values.from_text(text, spec(dtype, -1, 3)), to_numpy(dtype), [[1, 2, 3]])


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_cover_the_range_of_their_type(dtype: str) -> None:
    info = np.iinfo(to_numpy(dtype))
    assert same(values.from_text(f"{info.min},{info.max}", spec(dtype, 2)), info.dtype, [info.min, info.max])
    for beyond in (info.min - 1, info.max + 1):
        with pytest.raises(Misuse, match=rf"'x' \({dtype}\): {beyond} is not within {info.min} \.\.\. {info.max}"):
            values.from_text(str(beyond), spec(dtype, 1))


def test_booleans_and_strings() -> None:
    for text in ("true,false,True", "1 0 1", "[true, false, true]", "[1, 0, 1]"):
        assert same(values.from_text(text, spec("BOOL", 3)), np.bool_, [True, False, True])
    for text in ("hello world", "42", "true", '"true"', ""):
        assert same(values.from_text(text, spec("BYTES", -1)), object, [text.strip('"')])
    assert same(values.from_text('["a", "", "ü"]', spec("BYTES", -1)), object, ["a", "", "ü"])


@cases(
    ("INT32", "1.5", r"1\.5 is not an integer"),
    ("INT32", "true", "true is not an integer"),
    ("BOOL", "2", r"'x' \(BOOL\): 2 is not true or false"),
    ("BOOL", '["yes"]', '"yes" is not true or false'),
    ("BYTES", '["a", 1]', "1 is not a string"),
    ("FP32", "1,abc", "'abc' is not a number"),
    ("FP32", '["1"]', '"1" is not a number'),
    ("FP32", "null", "null is not a number"),
    ("FP32", "[[1, 2], [3]]", "the lists in it have different lengths"),
    ("FP32", "[1, [2]]", "the lists in it have different lengths"),
    ("FP16", "65520", "is not within the range of FP16"),
    ("FP32", "1e39", "is not within the range of FP32"),
    ("BF16", "-3.4e38", "is not within the range of BF16"),
)
def test_values_of_another_type_are_refused(dtype: str, text: str, error: str) -> None:
    with pytest.raises(Misuse, match=error):
        values.from_text(text, spec(dtype, -1))


def test_infinities_nan_and_the_bits_of_bf16() -> None:
    assert str(values.from_text("inf,-inf,nan", spec("FP16", 3))) == "[ inf -inf  nan]"
    assert str(from_bfloat16(values.from_text("inf,-inf,nan", spec("BF16", 3)))) == "[ inf -inf  nan]"
    assert same(values.from_text("1,-2.5", spec("BF16", 2)), np.uint16, [0x3F80, 0xC020])


@given(arrays.arrays(np.float32, arrays.array_shapes(min_dims=0, max_dims=2), elements=st.floats(width=32)))
def test_bf16_is_rounded_as_ml_dtypes_does(values: Any) -> None:
    bits = bfloat16_bits(values)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    found = from_bfloat16(bits)
    assert found.shape == values.shape
    assert np.array_equal(found, expected.astype(np.float32), equal_nan=True)
    assert np.array_equal(from_bfloat16(expected), expected.astype(np.float32), equal_nan=True)


@cases(
    ("5", [], ()),
    ("5", [-1, 1], (1, 1)),
    ("1,2,3", [-1, 3], (1, 3)),
    ("1,2,3,4,5,6", [-1, 3], (2, 3)),
    ("1,2,3,4,5,6", [-1, 2, -1], (1, 2, 3)),
    ("[[[1,2],[3,4]]]", [-1, 2, 2], (1, 2, 2)),
    ("[]", [-1], (0,)),
    ("[[], []]", [2, -1], (2, 0)),
)
def test_shapes_that_fit(text: str, pattern: list[int], shape: tuple[int, ...]) -> None:
    assert values.from_text(text, spec("FP32", *pattern)).shape == shape


def test_shapes_that_do_not_fit() -> None:
    for text, pattern in (
        *[("1,2,3", pattern) for pattern in ([4], [])],
        *[("1,2,3,4", [-1, 3]), ("[]", [3]), ("[[1,2],[3,4]]", [4]), ("[[1],[2]]", [-1, 2]), ("[1,2]", [-1, -1, -1])],
    ):
        with pytest.raises(Misuse, match=r"input 'x' \(INT32\): a value of shape \[.*\] does not fit \["):
            values.from_text(text, spec("INT32", *pattern))


MONSTROUS = ["[" * 33 + "1" + "]" * 33, "[" * 100_000, "1" + "0" * 400, "1" * 5000, "[1e999]", '{"a": 1}', '[""]']


@pytest.mark.parametrize("dtype", ["FP32", "INT64", "BOOL"])
def test_hostile_values_are_refused_with_a_short_error(dtype: str) -> None:
    for text in MONSTROUS:
        with pytest.raises(Misuse, match=r"input 'x'") as refused:
            values.from_text(text, spec(dtype, -1))
        assert len(str(refused.value)) < 300


def test_arguments_name_their_input() -> None:
    both = known(spec("FP32", 2, name="a"), spec("BYTES", 1, name="b"))
    found = inputs.from_arguments(["a=1,2", "b=k=v"], both)
    assert same(found["a"], np.float32, [1, 2])
    assert found["b"].tolist() == ["k=v"]
    with pytest.raises(Misuse, match=r"no input 'c'; it has a \(FP32 \[2\]\), b \(BYTES \[1\]\)"):
        inputs.from_arguments(["c=1"], both)
    for text in ("a", "=1", "1,2"):
        with pytest.raises(Misuse, match="write NAME=VALUE"):
            inputs.from_arguments([text], both)


def test_npy_files(tmp_path: Path) -> None:
    numbers = [name for name in ITEM_BYTES if name not in ("BYTES", "BF16")]
    for array, dtype, expected in (
        *[(array, name, array) for name in numbers for array in [np.arange(2).astype(to_numpy(name))]],
        (np.array(["one", "two"]), "BYTES", np.array(["one", "two"], object)),
        (np.array([0x3F80, 0], np.uint16), "BF16", np.array([0x3F80, 0], np.uint16)),
        (np.array([1, 0], ml_dtypes.bfloat16), "BF16", np.array([0x3F80, 0], np.uint16)),
    ):
        np.save(tmp_path / "x.npy", array)
        found = inputs.from_arguments([f"x=@{tmp_path}/x.npy"], known(spec(dtype, 2)))["x"]
        assert same(found, expected.dtype, expected)


def test_npy_files_that_do_not_fit(tmp_path: Path) -> None:
    file = tmp_path / "x.npy"

    def refused(match: str, dtype: str = "FP32", *shape: int) -> None:
        with pytest.raises(Misuse, match=match):
            inputs.from_arguments([f"x=@{file}"], known(spec(dtype, *(shape or (-1, 3)))))

    refused("cannot read .*x.npy: No such file")
    np.save(file, np.zeros((1, 3)))
    refused(r"holds float64; save it with \.astype\('float32'\)")
    refused("holds float64, not strings", "BYTES")
    refused("holds float64, not 16-bit patterns", "BF16")
    np.save(file, np.zeros((2, 4), np.float32))
    refused(r"shape \[2, 4\] does not fit \[-1, 3\]")
    np.save(file, np.array([{}]), allow_pickle=True)
    refused("cannot read .*x.npy: Object arrays cannot be loaded", "BYTES")
    for content in (b"", b"not numpy"):
        file.write_bytes(content)
        refused("cannot read .*x.npy")


def test_raw_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photo, numbers = tmp_path / "photo.jpg", tmp_path / "x.bin"
    photo.write_bytes(b"\xff\xd8\x00")
    numbers.write_bytes(np.arange(6, dtype="<f4").tobytes())
    found = inputs.from_arguments([f"photo=@{photo}", f"x=@{numbers}"], known(PHOTO, spec("FP32", -1, 3)))
    assert found["photo"].tolist() == [b"\xff\xd8\x00"]
    assert same(found["x"], np.float32, [[0, 1, 2], [3, 4, 5]])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(photo.read_bytes())))
    assert inputs.from_arguments(["photo=@-"], known(PHOTO))["photo"].tolist() == [b"\xff\xd8\x00"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(numbers.read_bytes())))
    assert same(inputs.from_arguments(["x=@-"], known(spec("FP32", 6)))["x"], np.float32, np.arange(6))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    odd = tmp_path / "x.bin"
    odd.write_bytes(bytes(7))
    for texts, match in (
        ([f"x=@{odd}"], "has 7 bytes, not a multiple of 4"),
        ([f"x=@{tmp_path}/x.txt"], r"unknown suffix of .*x.txt; expected one of: \.npy, \.json, \.png"),
        (["x=@-", "photo=@-"], "can be read only once"),
    ):
        with pytest.raises(Misuse, match=match):
            inputs.from_arguments(texts, known(PHOTO, spec("FP32", -1)))
    with pytest.raises(Misuse, match="can be read only once"):
        inputs.InputSource(["x=@-"], "-").check()


@cases(
    {"inputs": {"x": [[1, 2, 3]]}},
    {"inputs": {"x": [1, 2, 3]}},
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]},
)
def test_json_documents(document: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps(document))
    expected = known(spec("FP32", -1, 3))
    assert same(inputs.from_json(str(file), expected)["x"], np.float32, [[1, 2, 3]])
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(document)))
    assert same(inputs.from_json("-", expected)["x"], np.float32, [[1, 2, 3]])


@cases(
    ("{", "cannot read inputs from standard input: Expecting"),
    ("[1, 2]", 'write {"inputs"'),
    ('{"x": [1]}', "standard input has no inputs"),
    ('{"inputs": {"y": [1]}}', r"no input 'y'; it has x \(FP32 \[-1, 3\]\)"),
    ('{"inputs": [{"name": "x"}]}', "needs name, shape and data"),
    ('{"inputs": [{"name": "x", "shape": [2, 3], "data": [1]}]}', r"1 values do not fill shape \[2, 3\]"),
    ('{"inputs": [{"name": "x", "shape": [-1, 3], "data": [1, 2, 3]}]}', "is not a list of sizes"),
    ('{"inputs": [{"name": "x", "shape": 3, "data": [1, 2, 3]}]}', "is not a list of sizes"),
)
def test_json_documents_that_do_not_fit(text: str, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    with pytest.raises(Misuse, match=match):
        inputs.from_json("-", known(spec("FP32", -1, 3)))
    with pytest.raises(Misuse, match="No such file or directory; to send one input, write --input x=1"):
        inputs.from_json("x=1", known(spec("FP32", -1, 3)))


@pytest.mark.parametrize("dtype", list(ITEM_BYTES))
def test_random_data_of_every_type(dtype: str) -> None:
    one = known(spec(dtype, -1, 3, -1))
    found = inputs.random(one, 4, {}, 1)["x"]
    again = inputs.random(one, 4, {}, 1)["x"]
    other = inputs.random(one, 4, {}, 2)["x"]
    assert found.dtype == (np.uint16 if dtype == "BF16" else to_numpy(dtype))
    assert found.shape == (4, 3, 1)
    assert np.array_equal(found, again)
    assert not np.array_equal(found, other)


def test_shapes_of_random_data() -> None:
    one = known(spec("FP32", -1, 3, -1))
    assert inputs.random(one, None, {}, None)["x"].shape == (1, 3, 1)
    assert inputs.shapes_from(["x=2,3,5"], one) == {"x": (2, 3, 5)}
    assert inputs.random(one, None, {"x": (2, 3, 5)}, None)["x"].shape == (2, 3, 5)
    for text, error in (
        *[(text, r"does not fit input 'x', which is \[-1, 3, -1\]") for text in ("x=2,4,5", "x=2,3", "x=2")],
        *[(text, "write NAME=D1,D2") for text in ("x", "x=", "x=a", "x=-1,3,5")],
        ("y=1", "no input 'y'"),
    ):
        with pytest.raises(Misuse, match=error):
            inputs.shapes_from([text], one)
    with pytest.raises(Misuse, match=r"input 'x' is \[4\]: the model takes no batches"):
        inputs.random(known(spec("FP32", 4)), 2, {}, None)


@pytest.mark.parametrize("dtype", ["FP32", "INT8", "BOOL", "BYTES", "BF16"])
def test_random_data_larger_than_the_memory_is_refused(dtype: str) -> None:
    text = r"'x' of shape \[1000000000000000000, 4\] would take [\d.]+ TiB, and this machine has [\d.]+ \w+: give a sm"
    with pytest.raises(Misuse, match=text):
        inputs.random(known(spec(dtype, 10**18, 4)), None, {}, None)
    with pytest.raises(Misuse, match="would take"):
        inputs.random(known(spec(dtype, -1, 4)), None, {"x": (10**18, 4)}, None)

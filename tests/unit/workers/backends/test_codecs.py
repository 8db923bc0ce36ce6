"""Images, tables and records as values of functions: what is read from bytes, what is written, and their schemas."""

from __future__ import annotations

import dataclasses
import io
import json
from typing import Any, NamedTuple, TypedDict

import msgspec
import pandas
import pydantic
import pytest
from jsonschema import Draft202012Validator
from PIL import Image

from shmserve.workers.backends.python.codecs import ValueCodec, codec_of
from shmserve.workers.backends.python.records import build, fields_of
from tests.support.cases import cases


class Box(pydantic.BaseModel):  # type: ignore[misc]
    x: int = pydantic.Field(ge=0, alias="left")
    y: int = 0


@dataclasses.dataclass
class Shape:
    name: str
    corners: list[int] = dataclasses.field(default_factory=list)


class Typed(TypedDict):
    name: str


class Named(NamedTuple):
    name: str
    size: int = 1


class Packed(msgspec.Struct):
    name: str


@dataclasses.dataclass
class Found:
    box: Box
    shapes: dict[str, Shape]


def codec(hint: Any) -> ValueCodec:
    found = codec_of(hint)
    assert found is not None
    return found


RECORDS = [
    (Box, Box(left=3), {"left": 3, "y": 0}),
    (Shape, Shape("a", [1]), {"name": "a", "corners": [1]}),
    (Typed, {"name": "a"}, {"name": "a"}),
    (Named, Named("a"), ["a", 1]),
    (Packed, Packed("a"), {"name": "a"}),
    (dict[str, float], {"a": 0.5}, {"a": 0.5}),
    (Found, Found(Box(left=1), {"s": Shape("b")}), {"box": {"left": 1}, "shapes": {"s": {"name": "b"}}}),
]


@pytest.mark.parametrize(("hint", "value", "document"), RECORDS, ids=lambda value: getattr(value, "__name__", ""))
def test_records_are_json_that_matches_their_schema(hint: Any, value: Any, document: Any) -> None:
    found = codec(hint)
    assert found.schema is not None
    assert found.decode(json.dumps(document).encode()) == value
    schema = {**found.schema, "components": {"schemas": found.components}}
    Draft202012Validator(schema).validate(document)
    assert not Draft202012Validator(schema).is_valid(7)


@pytest.mark.parametrize("hint", [Shape, Typed, Packed, dict[str, float]])
def test_records_are_written_as_they_are_read(hint: Any) -> None:
    value = next(value for one, value, _ in RECORDS if one == hint)
    assert codec(hint).decode(codec(hint).encode(value)) == value
    with pytest.raises(TypeError, match="expected"):
        codec(hint).encode([value])


@cases(
    (Box, b'{"left": -1}', "left: Input should be greater than or equal to 0"),
    (Shape, b'{"corners": []}', "is not valid: .*`name`"),
    (dict[str, float], b"{", "is not valid"),
    (Image.Image, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n", "is not an image; expected one of PNG"),
    (Image.Image, b"\x89PNG\r\n\x1a\n", "is not "),
    (pandas.DataFrame, b"[1, ", "is not a table: JSONDecodeError"),
    (pandas.DataFrame, b"PAR1", "is not a table"),
    (str, b"\xff", "is not UTF-8 text"),
)
def test_what_cannot_be_read_is_refused(hint: Any, data: bytes, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        codec(hint).decode(data)


@cases(
    (Image.Image, 1, "expected a PIL image"),
    (Image.Image, Image.new("CMYK", (1, 1)), "cannot write mode CMYK as PNG"),
    (pandas.DataFrame, [1], "expected a pandas.DataFrame"),
)
def test_what_cannot_be_written_is_refused(hint: Any, value: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        codec(hint).encode(value)


def test_an_image_with_too_many_pixels_is_refused() -> None:
    file = io.BytesIO()
    Image.new("1", (1 << 13, 1 << 13 | 1)).save(file, "PNG")
    with pytest.raises(ValueError, match="has 67117056 pixels; the limit is 67108864"):
        codec(Image.Image).decode(file.getvalue())


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP"])
def test_images(kind: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (6, 4), (255, 0, 0)).save(file, kind)
    image = codec(Image.Image).decode(file.getvalue())
    assert (image.size, image.format) == ((6, 4), kind)
    again = Image.open(io.BytesIO(codec(Image.Image).encode(image)))
    assert (again.format, again.tobytes()) == ("PNG", image.tobytes())


@cases(
    b'[{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]',
    b'{"a": [1, 2], "b": ["x", "y"]}',
    b"a,b\n1,x\n2,y\n",
)
def test_tables(data: bytes) -> None:
    found = codec(pandas.DataFrame)
    frame = found.decode(data)
    assert (list(frame["a"]), list(frame["b"])) == ([1, 2], ["x", "y"])
    assert json.loads(found.encode(frame)) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]


def test_records_are_built_from_their_fields() -> None:
    assert build(Box, {"x": 2}) == Box(left=2)
    assert build(Shape, {"name": "a"}) == Shape("a")
    fields = fields_of(Named)
    assert fields is not None
    assert [field.required for field in fields.values()] == [True, False]
    assert fields_of(int) is None

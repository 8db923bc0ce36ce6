"""Types of values in hints that are more than a number: how each is written as the bytes of a BYTES tensor, and read.

    str                                         UTF-8
    PIL.Image.Image                             an image file; a result is a PNG
    pandas.DataFrame, polars.DataFrame          JSON, a list of rows; CSV, Parquet and Arrow files are read as well
    a class with fields, dict[str, ...]         JSON

Invariant: a library is used only if a hint names one of its types, which the model's file has then imported.
"""

from __future__ import annotations

import inspect
import io
import json
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from shmserve.workers.backends.python.records import fields_of, is_pydantic

Schema = dict[str, Any]
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Others are not decoded: some of them start programs."""
PIXELS = 64 << 20
"""Maximum number of pixels of an image: a small file can have many."""
_REFERENCE = "#/components/schemas/{%s}"
_ROWS: Schema = {"type": "array", "items": {"type": "object"}}
_IMAGE: Schema = {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png"}


class ValueCodec(NamedTuple):
    """`decode` and `encode` raise ValueError or TypeError. `schema`: the JSON schema, None for text; a value with
    `contentEncoding` is a file, others are JSON. `components`: the schemas that it refers to."""

    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    schema: Schema | None = None
    components: Schema = {}


def codec_of(hint: Any) -> ValueCodec | None:
    """Returns the codec of a type; None if it needs no codec, or has none."""
    if hint is str:
        return TEXT
    if inspect.isclass(hint):
        library = _LIBRARIES.get((hint.__module__.partition(".")[0], hint.__name__))
        if library is not None:
            return library
    if fields_of(hint) is not None or typing.get_origin(hint) is dict:
        return _json_codec(hint)
    return None


# ------------------------------------------------------------------------------------------ text and images


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text: {error}") from None


def _image(data: bytes) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
        pixels = image.width * image.height
        if pixels > PIXELS:
            raise ValueError(f"has {pixels} pixels; the limit is {PIXELS}")
        image.load()
    except UnidentifiedImageError:
        raise ValueError(f"is not an image; expected one of {', '.join(IMAGE_FORMATS)}") from None
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"is not a valid image: {error}") from None
    return image


def _png(image: Any) -> bytes:
    from PIL import Image

    if not isinstance(image, Image.Image):
        raise TypeError("expected a PIL image")
    file = io.BytesIO()
    try:
        image.save(file, "PNG", compress_level=1)
    except OSError as error:  # PNG has no such mode
        raise ValueError(str(error)) from error
    return file.getvalue()


# ------------------------------------------------------------------------------------------ frames


def _pandas(data: bytes) -> Any:
    import pandas

    readers = {b"PAR1": pandas.read_parquet, b"ARRO": pandas.read_feather}
    return _frame(data, pandas.DataFrame, readers, pandas.read_csv)


def _polars(data: bytes) -> Any:
    import polars

    readers = {b"PAR1": polars.read_parquet, b"ARRO": polars.read_ipc}
    return _frame(data, polars.DataFrame, readers, polars.read_csv)


def _frame(data: bytes, kind: Any, readers: dict[bytes, Any], read_csv: Any) -> Any:
    """JSON is a list of rows or an object of columns. Files are told apart by their first bytes."""
    try:
        if data[:1] in (b"[", b"{"):
            return kind(json.loads(data))
        return readers.get(data[:4], read_csv)(io.BytesIO(data))
    except Exception as error:  # each library has exceptions of its own
        raise ValueError(f"is not a table: {type(error).__name__}: {error}") from error


def _rows_of_pandas(frame: Any) -> bytes:
    import pandas

    if not isinstance(frame, pandas.DataFrame):
        raise TypeError("expected a pandas.DataFrame")
    return str(frame.to_json(orient="records", date_format="iso")).encode()


def _rows_of_polars(frame: Any) -> bytes:
    import polars

    if not isinstance(frame, polars.DataFrame):
        raise TypeError("expected a polars.DataFrame")
    return str(frame.write_json()).encode()


# ------------------------------------------------------------------------------------------ JSON


def _json_codec(hint: Any) -> ValueCodec:
    """pydantic handles its own models and what contains them, msgspec everything else."""
    if _mentions_pydantic(hint, set()):
        from pydantic import TypeAdapter, ValidationError

        adapter = TypeAdapter(hint)
        schema = adapter.json_schema(ref_template=_REFERENCE % "model")

        def validated(data: bytes) -> Any:
            try:
                return adapter.validate_json(data)
            except ValidationError as error:
                raise ValueError(why_invalid(error)) from None

        return ValueCodec(validated, _checked(hint, adapter.dump_json), schema, schema.pop("$defs", {}))
    (reference,), components = msgspec.json.schema_components([hint], ref_template=_REFERENCE % "name")
    decoder = msgspec.json.Decoder(hint)

    def decoded(data: bytes) -> Any:
        try:
            return decoder.decode(data)
        except msgspec.DecodeError as error:
            raise ValueError(f"is not valid: {error}") from None

    return ValueCodec(decoded, _checked(hint, msgspec.json.encode), reference, components)


def why_invalid(error: Any) -> str:
    """The first problem that pydantic has found, without the value, which may be long."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    more = f", and {error.error_count() - 1} more" if error.error_count() > 1 else ""
    return f"is not valid: {f'{where}: ' if where else ''}{first['msg']}{more}"


def _checked(hint: Any, encode: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    kind = dict if typing.get_origin(hint) is dict or typing.is_typeddict(hint) else hint

    def encoded(value: Any) -> bytes:
        if not isinstance(value, kind):
            raise TypeError(f"expected {kind.__name__}")
        return encode(value)

    return encoded


def _mentions_pydantic(hint: Any, seen: set[int]) -> bool:
    if id(hint) in seen:
        return False
    seen.add(id(hint))
    if is_pydantic(hint) or hasattr(hint, "__pydantic_fields__"):  # a model, or a dataclass of pydantic
        return True
    inner = [*typing.get_args(hint), *(field.hint for field in (fields_of(hint) or {}).values())]
    return any(_mentions_pydantic(one, seen) for one in inner)


TEXT = ValueCodec(_text, str.encode)
_LIBRARIES = {
    ("PIL", "Image"): ValueCodec(_image, _png, _IMAGE),
    ("pandas", "DataFrame"): ValueCodec(_pandas, _rows_of_pandas, _ROWS),
    ("polars", "DataFrame"): ValueCodec(_polars, _rows_of_polars, _ROWS),
}

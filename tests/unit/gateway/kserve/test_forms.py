"""Forms, as the standard library and curl write them, and broken ones."""

from __future__ import annotations

from collections.abc import Iterable
from email.message import EmailMessage
from email.policy import HTTP

import pytest

from shmserve.errors import InvalidRequest
from shmserve.gateway.kserve.forms import FIELD_BYTES, Form, form_of
from shmserve.gateway.limits.turns import COPY_BYTES
from tests.support.cases import cases
from tests.support.gateway.sliced_work import finished, slices_of

LINES = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--x--\r\n'


def read(body: bytes) -> Form:
    return finished(form_of(body))


def written(parts: Iterable[tuple[str, bytes, str | None]]) -> bytes:
    message = EmailMessage(HTTP)
    message.add_header("Content-Type", "multipart/form-data")
    for name, value, filename in parts:
        part = EmailMessage(HTTP)
        part.set_content(value, "application", "octet-stream", cte="binary")
        more = {} if filename is None else {"filename": filename}
        del part["Content-Disposition"]
        part.add_header("Content-Disposition", "form-data", name=name, **more)
        message.attach(part)
    return bytes(message).partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("size", [0, 1, COPY_BYTES - 40, COPY_BYTES, 3 * COPY_BYTES + 5])
def test_fields_and_files(size: int) -> None:
    """The boundary may be at any place, also at the end of what is searched at once."""
    content = b"\r\n--" * (size // 4) + b"-" * (size % 4)
    body = written([("a", "ü".encode(), None), ("f", content, "ä b.wav"), ("l[]", b"1", None), ("l[]", b"2", None)])
    found = read(body)
    assert found.fields == {"a": "ü", "l[]": ["1", "2"]}
    assert {name: list(map(bytes, files)) for name, files in found.files.items()} == {"f": [content]}


@cases(
    (b"", "does not begin with a boundary"),
    (b'{"model": "m"}', "does not begin with a boundary"),
    (b"--" + b"x" * 100 + b"\r\n", "does not begin with a boundary"),
    (LINES[:-7], "last boundary is missing"),
    (LINES.replace(b"name", b"nome"), "has no name"),
    (LINES.replace(b"\r\n\r\n", b"\r\nX: " + b"y" * 5000 + b"\r\n\r\n"), "headers that are too long"),
    (LINES.replace(b"\r\n1", b"\r\n\xff"), "the field 'a' of the form is not UTF-8"),
    (LINES[:-7] * 65 + b"--x--", "more than 64 parts"),
    (LINES.replace(b"\r\n1", b"\r\n" + b"1" * (FIELD_BYTES + 1)), f"'a' of the form has {FIELD_BYTES + 1} bytes"),
)
def test_broken_forms(body: bytes, text: str) -> None:
    assert read(LINES).fields == {"a": "1"}
    with pytest.raises(InvalidRequest, match=text):
        read(body)


def test_many_files_are_searched_in_slices() -> None:
    """None of them alone is a slice."""
    body = written([("f", bytes(COPY_BYTES - 1), "f")] * 9)
    assert slices_of(form_of(body)) >= 4

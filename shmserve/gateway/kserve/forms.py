"""Bodies of the type multipart/form-data, which have files. They are searched in slices.

The boundary is the first line of the body, so the header Content-Type is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.kserve.json_tensors import joined_in_slices
from shmserve.gateway.limits.turns import COPY_BYTES, SlicedWork

PARTS = 64
HEAD_BYTES = 4096
"""Maximum size of the headers of a part."""
FIELD_BYTES = 64 * 1024
"""Maximum size of a field that is not a file, which is decoded in one slice."""
_BOUNDARY_BYTES = 72
_NAME = re.compile(rb'^content-disposition:[ \t]*form-data;.*?\bname="([^"]*)"(.*?\bfilename\*?=)?', re.I | re.M)


class Form(Struct, frozen=True):
    """`fields`: texts by name, or lists of texts for names that end with []. `files`: contents by name, of which there
    are several for a name that is repeated."""

    fields: dict[str, str | list[str]]
    files: dict[str, list[memoryview]]


def form_of(body: Buffer) -> SlicedWork[Form]:
    """Parses the body. Raises InvalidRequest."""
    view = memoryview(body)
    boundary = bytes(view[: _BOUNDARY_BYTES + 2]).partition(b"\r\n")[0]
    if not boundary.startswith(b"--") or not 3 <= len(boundary) <= _BOUNDARY_BYTES:
        raise InvalidRequest("the body is not multipart/form-data: it does not begin with a boundary")
    delimiter = re.compile(re.escape(b"\r\n" + boundary))
    form, at, sliced_at = Form({}, {}), len(boundary), 0
    for _ in range(PARTS + 1):
        if at - sliced_at >= COPY_BYTES:
            sliced_at = at
            yield
        if bytes(view[at : at + 2]) == b"--":
            return form
        name, is_file, begin = _head(view, at)
        end = yield from _found(delimiter, view, begin)
        if is_file:
            form.files.setdefault(name, []).append(view[begin:end])
        elif end - begin > FIELD_BYTES:
            text = f"the field '{name[:80]}' of the form has {end - begin} bytes; the limit is {FIELD_BYTES}"
            raise InvalidRequest(text)
        else:
            _add(form.fields, name, bytes(view[begin:end]))
        at = end + 2 + len(boundary)
    raise InvalidRequest(f"the form has more than {PARTS} parts")


def encoded_files(files: Sequence[memoryview]) -> SlicedWork[bytearray]:
    """The files as elements of a tensor of type BYTES, copied out of the body."""
    return joined_in_slices([part for file in files for part in (len(file).to_bytes(4, "little"), file)])


def _head(view: memoryview, at: int) -> tuple[str, bool, int]:
    """The name of a part, whether it is a file, and where its content begins."""
    head, end, _ = bytes(view[at : at + HEAD_BYTES]).partition(b"\r\n\r\n")
    named = _NAME.search(head)
    if not end or named is None:
        raise InvalidRequest("a part of the form has no name, or headers that are too long")
    return named[1].decode(errors="replace"), named[2] is not None, at + len(head) + len(end)


def _found(delimiter: re.Pattern[bytes], view: memoryview, begin: int) -> SlicedWork[int]:
    for at in range(begin, len(view), COPY_BYTES):
        match = delimiter.search(view, at, min(at + COPY_BYTES + _BOUNDARY_BYTES + 2, len(view)))
        if match is not None:
            return match.start()
        yield
    raise InvalidRequest("the form is incomplete: its last boundary is missing")


def _add(fields: dict[str, str | list[str]], name: str, value: bytes) -> None:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"the field '{name[:80]}' of the form is not UTF-8") from None
    if name.endswith("[]"):
        known = fields.setdefault(name, [])
        assert isinstance(known, list)
        known.append(text)
    else:
        fields[name] = text

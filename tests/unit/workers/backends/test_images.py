"""The pixels of images, which are limited before an engine decodes them."""

from __future__ import annotations

import base64
import io
import json
import struct
from typing import Any

import numpy as np
import pytest

from shmserve.errors import InvalidRequest
from shmserve.workers.backends.language.image_headers import pixels_in
from shmserve.workers.backends.language.requests import PIXELS, chat_in
from tests.support.cases import cases
from tests.support.optional import optional

image = optional("PIL.Image")

SIDE = 8192
PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", SIDE, SIDE)


def chat(*images: bytes) -> Any:
    parts = [{"type": "image"} for _ in images]
    encoded = np.array([base64.b64encode(one) for one in images], object)
    return chat_in(json.dumps({"messages": [{"role": "user", "content": parts}]}), encoded)


@cases(
    ("PNG", {}),
    ("JPEG", {}),
    ("JPEG", {"progressive": True, "comment": b"x" * 9}),
    ("GIF", {}),
    ("BMP", {}),
)
def test_the_pixels_of_known_formats(kind: str, more: dict[str, Any]) -> None:
    file = io.BytesIO()
    image.new("RGB", (40, 30)).save(file, kind, **more)
    assert pixels_in(file.getvalue()) == 1200
    for size in range(12 if kind == "PNG" else 10):
        with pytest.raises(ValueError, match=r"cut off|unknown"):
            pixels_in(file.getvalue()[:size])


@cases(
    (b"", "its format is unknown"),
    (b"8BPS" + bytes(100), "its format is unknown"),
    (PNG.replace(b"IHDR", b"CgBI"), "does not begin with its size"),
    (b"\xff\xd8\xff\xe0\x00\x02x\xff\xc0", "data between its segments"),
    (b"\xff\xd8\xff\xd9\x00\x02", "unknown segment"),
    (b"\xff\xd8\xff\xe0\x00\x00", "unknown segment"),
    (b"\xff\xd8" + b"\xff" * 100, "cut off"),
)
def test_other_files_are_refused(data: bytes, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        chat(data)


def test_the_images_of_a_chat_share_a_limit() -> None:
    """A file of 1 MB can have 400 million pixels."""
    assert SIDE * SIDE == PIXELS
    chat(PNG)
    with pytest.raises(InvalidRequest, match=f"have {2 * PIXELS} pixels or more; the limit is {PIXELS}"):
        chat(PNG, PNG)
    bitmap = b"BM" + bytes(12) + struct.pack("<Iii", 40, 1 << 15, -(1 << 15))
    with pytest.raises(InvalidRequest, match=f"have {1 << 30} pixels"):
        chat(bitmap)

"""Draws picture.png, an image of a line of text for the OCR sample. Needs Pillow; the image is committed.

Invariant: the PNG contains unfiltered 8-bit RGB rows, so that `shmserve.repo.ocr` can read it with zlib.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

TEXT = "Handles travel, tensors stay: 64 MiB, 0 copies"
SIZE = (800, 48)
INK = (38, 44, 66)
STRIP = (242, 196, 92)


def draw() -> np.ndarray:
    """Text on a yellow strip, rotated by 0.4 degrees, slightly blurred, and darker towards the right."""
    twice = (SIZE[0] * 2, SIZE[1] * 2)
    page = Image.new("RGB", twice, STRIP)
    font = ImageFont.load_default(size=72)
    ImageDraw.Draw(page).text((twice[0] // 2, twice[1] // 2), TEXT, fill=INK, font=font, anchor="mm")
    page = page.rotate(0.4, resample=Image.Resampling.BICUBIC, fillcolor=STRIP)
    page = page.filter(ImageFilter.GaussianBlur(1.0)).resize(SIZE, Image.Resampling.LANCZOS)
    light = np.linspace(1.0, 0.82, SIZE[0])[None, :, None]
    return np.clip(np.asarray(page) * light, 0, 255).astype(np.uint8)


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(picture: np.ndarray) -> bytes:
    height, width, _ = picture.shape
    rows = b"".join(b"\0" + row.tobytes() for row in picture)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


if __name__ == "__main__":
    target = Path(__file__).parent / "picture.png"
    target.write_bytes(png(draw()))
    print(f"{target.name}: {target.stat().st_size} bytes")

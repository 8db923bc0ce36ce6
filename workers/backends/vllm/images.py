"""The images of a chat, before vLLM decodes them."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

from shmserve.errors import InvalidRequest
from shmserve.workers.backends.language.requests import PIXELS


def check_images(chat: dict[str, Any]) -> None:
    """Raises InvalidRequest if images have more pixels for the decoder than their headers say: a frame of a GIF can be
    larger than its screen."""
    pixels = 0
    for message in chat["messages"]:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if part.get("type") == "image_url":
                pixels += _pixels(part["image_url"]["url"].partition(",")[2])
                if pixels > PIXELS:
                    raise InvalidRequest(f"the images of a chat have {pixels} pixels or more; the limit is {PIXELS}")


def _pixels(image: str) -> int:
    try:
        with Image.open(io.BytesIO(base64.b64decode(image))) as opened:  # which decodes nothing yet
            return opened.width * opened.height
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise InvalidRequest(f"an image cannot be read: {error}") from error

"""The images of a chat: each leaves the messages, where a part {"type": "image"} stays in its place, and becomes an
element of a tensor. As for Triton's vLLM backend, an element is an image in base64.

Only images in the request itself are accepted. A gateway that fetched URLs for its clients would reach hosts that they
cannot reach.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Any

from shmserve.gateway.kserve.json_strings import CutStrings
from shmserve.gateway.kserve.plans import InputPlan
from shmserve.gateway.limits.turns import SLICE_BYTES, SlicedWork
from shmserve.gateway.openai.errors import BadParameter
from shmserve.gateway.openai.models import IMAGE, LanguageModel

IMAGES = 32
"""Maximum number of images in one chat."""
IMAGE_BYTES = 8 << 20
PART = {"type": "image"}
"""What stays in the message."""
_URL = re.compile(r"data:image/[\w.+-]+;base64,")
_BASE64 = re.compile(rb"[A-Za-z0-9+/]*")
_LIMIT = -(-IMAGE_BYTES // 3) * 4
"""Maximum length of an image in base64."""


def take_images(messages: list[dict[str, Any]], strings: CutStrings | None) -> list[str]:
    """Takes the images out of the messages, and returns them in base64. `strings`: those that were cut out of the
    messages."""
    images = []
    for where, content, number in _parts(messages):
        image = _image(where, content[number], strings)
        if image is not None:
            images.append(image)
            content[number] = PART
    if len(images) > IMAGES:
        raise BadParameter("messages", f"'messages' has {len(images)} images; the limit is {IMAGES}")
    return images


def _parts(messages: list[dict[str, Any]]) -> Iterator[tuple[str, list[Any], int]]:
    """The contents that are lists, and the number of each part."""
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            for index in range(len(content)):
                yield f"messages[{number}].content", content, index


def _image(where: str, part: Any, strings: CutStrings | None) -> str | None:
    """The image of a part in the form of chat completions, responses or messages; None: it is not an image."""
    whole = (lambda text: text) if strings is None else strings.whole
    match part:
        case {"type": "image_url", "image_url": {"url": str(url)}} | {"type": "input_image", "image_url": str(url)}:
            text = whole(url)
            prefix = _URL.match(text)
            if prefix is None:
                raise BadParameter(
                    where,
                    f"'{where}' has an image at another place than the request itself; send it as a URL that begins "
                    "with 'data:image/png;base64,', or the same for another type of image",
                )
            image = text[prefix.end() :]
        case {"type": "image", "source": {"type": "base64", "data": str(data)}}:
            image = whole(data)
        case {"type": "image_url" | "input_image" | "image"}:
            raise BadParameter(where, f"'{where}' has an image that is not in base64 in the request itself")
        case _:
            return None
    if not 0 < len(image) <= _LIMIT:
        raise BadParameter(
            where, f"'{where}' has an image of {len(image)} characters in base64; expected 1 to {_LIMIT}"
        )
    return image


def image_tensor(model: LanguageModel, images: list[str]) -> SlicedWork[InputPlan]:
    """The tensor for the model's input."""
    spec = model.inputs.get(IMAGE)
    if spec is None:
        raise BadParameter("messages", f"model '{model.name[:80]}' cannot see images: it has no input '{IMAGE}'")
    if min(spec.shape) > 0 and prod(spec.shape) != len(images):
        raise BadParameter(
            "messages", f"'messages' has {len(images)} images; model '{model.name[:80]}' needs {prod(spec.shape)}"
        )
    data = bytearray()
    for image in images:
        data += len(image).to_bytes(4, "little")
        for at in range(0, len(image), SLICE_BYTES):
            piece = image[at : at + SLICE_BYTES].encode()
            text = piece.rstrip(b"=") if at + SLICE_BYTES >= len(image) else piece
            if len(piece) - len(text) > 2 or _BASE64.fullmatch(text) is None:
                raise BadParameter("messages", "'messages' has an image that is not valid base64")
            data += piece
            yield
    return spec.plan(data, len(images))

"""Bytes of a PNG or JPEG file -> the image, its placement in the original, and the input of the detector.

Invariant: sizes and rounding are those of the package that the networks come from, so that they get the same input.
"""

from __future__ import annotations

import io
import json

import cv2
import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image

SHORTEST_SIDE = 30
FLATTEST = 8
"""An image with a larger ratio of width to height, or lower than SHORTEST_SIDE, gets black bars above and below."""
DETECTOR_SIDE = 736
STEP = 32
"""The detector takes images whose sides are multiples of this, the shorter at least about DETECTOR_SIDE."""


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.longest = int(parameters["longest_side"]["string_value"])
        self.max_pixels = int(parameters["max_pixels"]["string_value"])
        cv2.setNumThreads(1)

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        data = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()[0]
        try:
            original = decode(data, self.max_pixels)
            picture, place = fit(original, self.longest)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"IMAGE cannot be read: {error}"))
        tensors = [
            pb_utils.Tensor("PICTURE", picture),
            pb_utils.Tensor("PLACE", place),
            pb_utils.Tensor("X", detector_input(picture)),
        ]
        return pb_utils.InferenceResponse(output_tensors=tensors)


def decode(data: bytes, max_pixels: int) -> np.ndarray:
    """BGR [height, width, 3]. Transparent pixels are blended with white."""
    try:
        image = Image.open(io.BytesIO(data), formats=("PNG", "JPEG"))
    except OSError:  # its text contains a memory address
        raise ValueError(f"its {len(data)} bytes are not a PNG or JPEG file") from None
    if image.width * image.height > max_pixels:
        raise ValueError(f"it has {image.width} x {image.height} pixels; the limit is {max_pixels}")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(image.convert("RGB"))[:, :, ::-1]


def resized(picture: np.ndarray, ratio: float) -> np.ndarray:
    """Scales both sides by the ratio, rounded to multiples of STEP."""
    height, width = (round(int(side * ratio) / STEP) * STEP for side in picture.shape[:2])
    if not height or not width:
        raise ValueError(f"{picture.shape[1]} x {picture.shape[0]} pixels is too small for text")
    return cv2.resize(np.ascontiguousarray(picture), (width, height))


def fit(original: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """The image to search, and its placement: factors of x and y to the original, height of the bar above, original
    size.
    """
    picture = original
    if max(picture.shape[:2]) > longest:
        picture = resized(picture, longest / max(picture.shape[:2]))
    if min(picture.shape[:2]) < SHORTEST_SIDE:
        picture = resized(picture, SHORTEST_SIDE / min(picture.shape[:2]))
    height, width = picture.shape[:2]
    across, down = original.shape[1] / width, original.shape[0] / height
    bar = 0
    if height <= SHORTEST_SIDE or width / height > FLATTEST:
        bar = abs(2 * max(int(width / FLATTEST), SHORTEST_SIDE) - height) // 2
        picture = np.pad(picture, ((bar, bar), (0, 0), (0, 0)))
    place = np.array([across, down, bar, original.shape[1], original.shape[0]], np.float32)
    return np.ascontiguousarray(picture), place


def detector_input(picture: np.ndarray) -> np.ndarray:
    enlarged = resized(picture, max(1.0, DETECTOR_SIDE / min(picture.shape[:2])))
    return np.ascontiguousarray(((enlarged / 255 - 0.5) / 0.5).transpose(2, 0, 1), np.float32)

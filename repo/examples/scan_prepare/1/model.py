"""Bytes of a PNG or JPEG file -> the input of the classifier, 48 pixels high, and that of the segmentation, whose
shorter side has at least `shorter_side` pixels and whose sides are multiples of 32.
"""

from __future__ import annotations

import io
import json
import math

import cv2
import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image

LINE_HEIGHT, LINE_WIDTH = 48, 192
STEP = 32


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.shorter_side = int(parameters["shorter_side"]["string_value"])
        self.max_pixels = int(parameters["max_pixels"]["string_value"])
        cv2.setNumThreads(1)

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        data = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()[0]
        try:
            picture = decode(data, self.max_pixels)
            tensors = [
                pb_utils.Tensor("LINE", line(picture)),
                pb_utils.Tensor("PAGE", page(picture, self.shorter_side)),
            ]
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"IMAGE cannot be read: {error}"))
        return pb_utils.InferenceResponse(output_tensors=tensors)


def decode(data: bytes, max_pixels: int) -> np.ndarray:
    """BGR [height, width, 3]."""
    try:
        image = Image.open(io.BytesIO(data), formats=("PNG", "JPEG"))
    except OSError:  # its text contains a memory address
        raise ValueError(f"its {len(data)} bytes are not a PNG or JPEG file") from None
    if image.width * image.height > max_pixels:
        raise ValueError(f"it has {image.width} x {image.height} pixels; the limit is {max_pixels}")
    return np.ascontiguousarray(np.asarray(image.convert("RGB"))[:, :, ::-1])


def line(picture: np.ndarray) -> np.ndarray:
    """The image scaled to the classifier's height; what is wider is squeezed, what is narrower padded with 0."""
    width = min(LINE_WIDTH, math.ceil(LINE_HEIGHT * picture.shape[1] / picture.shape[0]))
    canvas = np.zeros((3, LINE_HEIGHT, LINE_WIDTH), np.float32)
    canvas[:, :, :width] = normalised(cv2.resize(picture, (width, LINE_HEIGHT)))
    return canvas


def page(picture: np.ndarray, shorter_side: int) -> np.ndarray:
    ratio = max(1.0, shorter_side / min(picture.shape[:2]))
    height, width = (max(STEP, round(int(side * ratio) / STEP) * STEP) for side in picture.shape[:2])
    return normalised(cv2.resize(picture, (width, height)))


def normalised(picture: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray((picture.astype(np.float32) / 127.5 - 1).transpose(2, 0, 1))

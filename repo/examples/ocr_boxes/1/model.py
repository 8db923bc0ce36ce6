"""The detector's map -> the boxes of the lines in reading order, and each line upright, 48 pixels high.

Invariant: thresholds, order and rounding are those of the package that the networks come from. The corners of a box are
clockwise from the upper left.
"""

from __future__ import annotations

import math

import cv2
import numpy as np
import pyclipper
import triton_python_backend_utils as pb_utils

TEXT_FROM = 0.3
LINE_FROM = 0.5
"""Thresholds: of a text pixel, and of the mean of a line's pixels."""
MAX_LINES = 1000
GROW = 1.6
MIN_SIDE = 3
SAME_LINE = 10
LINE_HEIGHT = 48
MIN_WIDTH = 320
UPRIGHT = 1.5
"""Ratio of height to width from which a crop is rotated by 90 degrees."""


class TritonPythonModel:
    def initialize(self, args):
        cv2.setNumThreads(1)

    def execute(self, requests):
        responses = []
        for request in requests:
            likely, picture, place = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("MAP", "PICTURE", "PLACE")
            )
            boxes = in_reading_order(find(likely[0], picture.shape[0], picture.shape[1]))
            crops = lines([cut(picture, box) for box in boxes])
            tensors = [pb_utils.Tensor("CROPS", crops), pb_utils.Tensor("BOXES", in_original(boxes, place))]
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return responses


# ------------------------------------------------------------------------------------------------- finding the lines


def find(likely: np.ndarray, height: int, width: int) -> list[np.ndarray]:
    """The boxes [4, 2], in pixels of the image."""
    mask = cv2.dilate((likely > TEXT_FROM).astype(np.uint8), np.ones((2, 2), np.uint8))
    outlines = cv2.findContours(mask * 255, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)[-2]
    searched = np.array(likely.shape[::-1], np.float32)
    size = np.array([width, height], np.float32)
    boxes = []
    for outline in outlines[:MAX_LINES]:
        area, side = smallest_box(outline)
        if side < MIN_SIDE or mean_inside(likely, area) < LINE_FROM:
            continue
        box, side = smallest_box(grown(area))
        if side < MIN_SIDE + 2:
            continue
        box = clockwise(np.round(box / searched * size))
        box = np.clip(box, 0, size - 1).astype(np.float32)
        if min(int(np.linalg.norm(box[0] - box[1])), int(np.linalg.norm(box[0] - box[3]))) > MIN_SIDE:
            boxes.append(box)
    return boxes


def smallest_box(points: np.ndarray) -> tuple[np.ndarray, float]:
    """The smallest rectangle around the points, at any angle, and the length of its shorter side."""
    rectangle = cv2.minAreaRect(points)
    return clockwise(cv2.boxPoints(rectangle)), min(rectangle[1])


def clockwise(box: np.ndarray) -> np.ndarray:
    """The corners in clockwise order, starting with the upper one of the two leftmost."""
    ordered = box[np.argsort(box[:, 0], kind="stable")]
    left, right = ordered[:2], ordered[2:]
    upper_left, lower_left = left[np.argsort(left[:, 1], kind="stable")]
    upper_right, lower_right = right[np.argsort(right[:, 1], kind="stable")]
    return np.array([upper_left, upper_right, lower_right, lower_left])


def mean_inside(likely: np.ndarray, box: np.ndarray) -> float:
    last = np.array(likely.shape[::-1]) - 1
    low = np.clip(np.floor(box.min(axis=0)), 0, last).astype(int)
    high = np.clip(np.ceil(box.max(axis=0)), 0, last).astype(int)
    inside = np.zeros((high - low + 1)[::-1], np.uint8)
    cv2.fillPoly(inside, [(box - low.astype(np.float32)).astype(np.int32)], 1)
    return cv2.mean(likely[low[1] : high[1] + 1, low[0] : high[0] + 1], inside)[0]


def grown(box: np.ndarray) -> np.ndarray:
    """Expands a box: the network marks only the middle of a line; its border is outside by a multiple of area /
    circumference.
    """
    following = np.roll(box, -1, axis=0).astype(np.float64)
    x, y = box.astype(np.float64).T
    area = abs(float(np.sum(x * following[:, 1] - following[:, 0] * y))) / 2
    around = float(np.sum(np.hypot(following[:, 0] - x, following[:, 1] - y)))
    offset = pyclipper.PyclipperOffset()
    offset.AddPath(box.tolist(), pyclipper.JT_ROUND, pyclipper.ET_CLOSEDPOLYGON)
    paths = offset.Execute(area * GROW / around)
    return np.array([point for path in paths for point in path], np.int32).reshape(-1, 1, 2)


def in_reading_order(boxes: list[np.ndarray]) -> list[np.ndarray]:
    """Sorts from top to bottom, and from left to right where boxes start at nearly the same height."""
    ordered: list[np.ndarray] = []
    for box in sorted(boxes, key=lambda box: (box[0, 1], box[0, 0])):
        at = len(ordered)
        while at and abs(ordered[at - 1][0, 1] - box[0, 1]) < SAME_LINE and box[0, 0] < ordered[at - 1][0, 0]:
            at -= 1
        ordered.insert(at, box)
    return ordered


def in_original(boxes: list[np.ndarray], place: np.ndarray) -> np.ndarray:
    across, down, bar, width, height = place
    corners = np.array(boxes, np.float32).reshape(-1, 4, 2)
    corners[:, :, 0] = np.clip(corners[:, :, 0] * across, 0, width)
    corners[:, :, 1] = np.clip((corners[:, :, 1] - bar) * down, 0, height)
    return corners


# ------------------------------------------------------------------------------------------------- cropping the lines


def cut(picture: np.ndarray, box: np.ndarray) -> np.ndarray:
    """The contents of the box, upright."""
    upper_left, upper_right, lower_right, lower_left = box
    width = int(max(np.linalg.norm(upper_left - upper_right), np.linalg.norm(lower_right - lower_left)))
    height = int(max(np.linalg.norm(upper_left - lower_left), np.linalg.norm(upper_right - lower_right)))
    target = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    turn = cv2.getPerspectiveTransform(box, target)
    line = cv2.warpPerspective(picture, turn, (width, height), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE)
    return np.rot90(line) if height / width >= UPRIGHT else line


def lines(crops: list[np.ndarray]) -> np.ndarray:
    """Scales all crops to the recogniser's height, padded with grey on the right to the widest."""
    ratios = [crop.shape[1] / crop.shape[0] for crop in crops]
    width = int(LINE_HEIGHT * max([MIN_WIDTH / LINE_HEIGHT, *ratios]))
    batch = np.zeros((len(crops), 3, LINE_HEIGHT, width), np.float32)
    for target, crop, ratio in zip(batch, crops, ratios, strict=True):
        scaled = min(width, math.ceil(LINE_HEIGHT * ratio))
        line = cv2.resize(np.ascontiguousarray(crop), (scaled, LINE_HEIGHT)).astype(np.float32)
        target[:, :, :scaled] = (line.transpose(2, 0, 1) / 255 - 0.5) / 0.5
    return batch

"""The samples `scan` and `lanes`: an image for two networks in one ensemble, and a dense output in FP16.

The oracles are the package that the networks of `scan` come from, numpy for `lanes`, and the pictures themselves: text
and lane lines must be where the test has drawn them.
"""

from __future__ import annotations

import io
import runpy
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import shmserve
from shmserve.repo import samples

for module in ("onnxruntime", "cv2", "PIL"):
    pytest.importorskip(module)

pytestmark = pytest.mark.process
SAMPLES = ("lanes", "scan")
HEIGHT, WIDTH, HORIZON = 144, 400, 44
STRIPS = np.arange(36) * 4 + 1.5
Array = NDArray[Any]


# -------------------------------------------------------------------------------------------------------------- scan


def drawn(text: str, place: tuple[int, int], turned: bool) -> Any:
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (360, 64), (250, 248, 240))
    ImageDraw.Draw(image).text(place, text, fill=(20, 20, 60), font=ImageFont.load_default(size=32))
    return image.rotate(180) if turned else image


@pytest.fixture(scope="module")
def package() -> Any:
    for module in ("shapely", "pyclipper", "rapidocr_onnxruntime"):
        pytest.importorskip(module)
    import cv2
    from rapidocr_onnxruntime import RapidOCR

    cv2.setNumThreads(1)
    return RapidOCR(intra_op_num_threads=1)


@pytest.mark.parametrize(
    ("turned", "form", "text"),
    [(False, "PNG", "Invoice 2024-117"), (True, "PNG", "Three boxes of tea"), (True, "JPEG", "Total: 42.50 EUR")],
)
def test_classification_and_segmentation(
    client: shmserve.Client, package: Any, turned: bool, form: str, text: str
) -> None:
    image = drawn(text, (30, 12), turned)
    file = io.BytesIO()
    image.save(file, form)
    from PIL import Image

    bgr = np.ascontiguousarray(np.asarray(Image.open(file))[:, :, ::-1])
    _, [[label, score]], _ = package.text_cls([bgr])
    given = {"IMAGE": np.array([file.getvalue()], object)}
    result = client.infer("scan", given)
    chances, mask = result["DIRECTION"].copy(), result["MASK"].copy()
    named = client.infer("scan", given, outputs={"DIRECTION": shmserve.TopK(1)})["DIRECTION"]
    assert int(chances.argmax()) == int(turned) == int(label == "180")
    np.testing.assert_allclose(chances.max(), score, atol=1e-4)
    assert named.reshape(-1)[0].decode().rpartition(":")[2] == ("upside down" if turned else "upright")

    detector = package.text_det
    prepared = detector.get_preprocess(0)
    prepared.limit_side_len = 192
    expected = detector.infer(prepared(bgr))[0][0]
    assert mask.shape == expected.shape == (1, 192, 1088)
    np.testing.assert_allclose(mask, expected, atol=1e-3)
    rows, columns = np.nonzero(np.asarray(image.convert("L").resize((1088, 192))) < 128)
    inside = np.zeros((192, 1088), bool)
    inside[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1] = True
    assert (mask[0] > 0.3)[inside].mean() > 0.25  # the network finds the middle of lines of text
    assert (mask[0] > 0.3)[~inside].mean() < 0.02


# ------------------------------------------------------------------------------------------------------------- lanes


def road(lines: list[float | None], seed: int) -> Array:
    """The view of a straight road: lane lines from these columns in the lowest row to the middle of the horizon."""
    image = np.random.default_rng(seed).normal(0.35, 0.02, (3, HEIGHT, WIDTH))
    image[:, :HORIZON] = 0.7
    for row in range(HORIZON + 2, HEIGHT):
        depth = (row - HORIZON) / (HEIGHT - 1 - HORIZON)
        for line in lines:
            if line is not None:
                middle = WIDTH / 2 + (line - WIDTH / 2) * depth
                image[:, row, np.abs(np.arange(WIDTH) - middle) <= 1.5 + 1.5 * depth] = 0.9
    return image.clip(0, 1).astype(np.float16)


ROADS: list[list[float | None]] = [
    [20, 140, 260, 380],
    [30, 152, None, 370],
    [None, 135, 255, None],
    [None, None, None, None],
]


def columns_of(image: Array) -> tuple[Array, Array, Array]:
    """Computes the network's result with numpy in double precision."""
    made = runpy.run_path(str(samples.EXAMPLES / "make_models.py"))
    brightness = np.tensordot([0.299, 0.587, 0.114], image.astype(np.float64), 1)
    padded = np.pad(brightness, ((0, 0), (6, 6)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 13, 1)
    ridges = windows[..., 4:9].mean(-1) - (windows[..., :4].sum(-1) + windows[..., 9:].sum(-1)) / 8
    mask = 1 / (1 + np.exp(-24 * (ridges - 0.3)))
    strips = mask.reshape(36, 4, WIDTH).max(1)
    expected = made["expected_columns"]().astype(np.float64)
    tolerance = 6 + 14 * (expected[-1] - 200) / 200
    away = (np.arange(WIDTH) - expected[:, :, None]) / tolerance[:, None]
    powers = np.exp(10 * strips - np.minimum(away**2, 30))
    chances = powers / powers.sum(-1, keepdims=True)
    return (chances * np.arange(WIDTH)).sum(-1) / (WIDTH - 1), (chances * strips).sum(-1), mask[None]


def test_lanes_are_found_where_they_were_drawn(client: shmserve.Client) -> None:
    pytest.importorskip("onnx")  # for make_models.py
    images = [road(lines, seed) for seed, lines in enumerate(ROADS)]
    together = client.infer("lanes", {"IMAGE": np.stack(images)})
    futures = [client.submit("lanes", {"IMAGE": image[None]}) for image in images]
    alone = [{name: value[0].copy() for name, value in future.result().items()} for future in futures]
    near = STRIPS >= 72  # closer than that, lines are further apart than the network's receptive field
    depth = (STRIPS - HORIZON) / (HEIGHT - 1 - HORIZON)
    for index, (image, lines) in enumerate(zip(images, ROADS, strict=True)):
        expected = dict(zip(("COLUMN", "PRESENT", "MASK"), columns_of(image), strict=True))
        for name, value in expected.items():
            found = together[name][index]
            assert found.dtype == np.float16
            assert found.shape == value.shape
            np.testing.assert_allclose(found, value, atol=4e-3)
            np.testing.assert_allclose(alone[index][name], value, atol=4e-3)
        for line, column, present in zip(lines, together["COLUMN"][index], together["PRESENT"][index], strict=True):
            if line is None:
                assert present[near].max() < 0.5
            else:
                assert present[near].min() > 0.5
                drawn_at = WIDTH / 2 + (line - WIDTH / 2) * depth
                assert np.abs(column * np.float32(WIDTH - 1) - drawn_at)[near].max() < 2

"""The samples `scan` and `lanes`: an image for two networks in one ensemble, and a dense output in FP16.

The oracles are the package that the networks of `scan` come from, and the pictures themselves: text and lane lines must
be where the test has drawn them.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import shmserve

for module in ("onnxruntime", "cv2", "PIL"):
    pytest.importorskip(module)

pytestmark = pytest.mark.process
SAMPLES = ("lanes", "scan")
HEIGHT, WIDTH, HORIZON = 144, 400, 44
STRIPS = np.arange(36) * 4 + 1.5
Array = NDArray[Any]


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


def test_lanes_are_found_where_they_were_drawn(client: shmserve.Client) -> None:
    images = np.stack([road(lines, seed) for seed, lines in enumerate(ROADS)])
    together = client.infer("lanes", {"IMAGE": images})
    futures = [client.submit("lanes", {"IMAGE": image[None]}) for image in images]
    for name, shape in {"COLUMN": (4, 36), "PRESENT": (4, 36), "MASK": (1, HEIGHT, WIDTH)}.items():
        alone = np.concatenate([future.result()[name] for future in futures])
        assert alone.dtype == np.float16
        assert alone.shape == (len(ROADS), *shape)
        np.testing.assert_allclose(together[name], alone, atol=4e-3)
    near = STRIPS >= 72  # closer than that, lines are further apart than the network's receptive field
    depth = (STRIPS - HORIZON) / (HEIGHT - 1 - HORIZON)
    for index, lines in enumerate(ROADS):
        for line, column, present in zip(lines, together["COLUMN"][index], together["PRESENT"][index], strict=True):
            if line is None:
                assert present[near].max() < 0.5
                continue
            assert present[near].min() > 0.5
            drawn_at = WIDTH / 2 + (line - WIDTH / 2) * depth
            assert np.abs(column * np.float32(WIDTH - 1) - drawn_at)[near].max() < 2
            rows, columns = STRIPS[near].astype(int), drawn_at[near].round().astype(int)
            assert together["MASK"][index, 0, rows, columns].mean() > 0.5 > together["MASK"][index].mean()

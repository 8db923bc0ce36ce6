"""The OCR samples find the same lines, in the same order, as the package that their networks come from.

The oracle is that package's own pipeline on the same bytes. Without it these tests are skipped.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

import shmserve
from shmserve.repo import ocr, samples
from tests.support.living import until
from tests.support.stopped import stopped, succeeded

for module in ("onnxruntime", "cv2", "pyclipper", "PIL", "shapely", "yaml", "rapidocr_onnxruntime"):
    pytest.importorskip(module)

pytestmark = pytest.mark.process

SAMPLES = ("ocr",)
PAPER, INK = (250, 248, 240), (20, 20, 60)
LINES = ["Invoice 2024-117", "Three boxes of tea", "Total: 42.50 EUR", "Thank you for your order"]
COLUMNS = ["Name", "Ada Lovelace", "Born", "10.12.1815"]


@dataclass
class Page:
    """Drawn for the first test that needs it."""

    draw: Callable[[], bytes]
    lines: int

    @cached_property
    def data(self) -> bytes:
        return self.draw()


class Found(NamedTuple):
    texts: list[str]
    scores: NDArray[Any]
    boxes: NDArray[Any]


Oracle = Callable[[bytes], Found]


def drawn(texts: list[tuple[int, int, str]], size: tuple[int, int], form: str = "PNG", **changes: Any) -> bytes:
    """A picture with texts at these positions. `turn`: rotation in degrees; `mode`: pixel mode of the file; `letters`:
    height of the letters."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", size, PAPER)
    font = ImageFont.load_default(size=changes.get("letters", 26))
    for x, y, text in texts:
        ImageDraw.Draw(image).text((x, y), text, fill=INK, font=font)
    image = image.rotate(changes.get("turn", 0), Image.Resampling.BICUBIC, expand=True, fillcolor=PAPER)
    file = io.BytesIO()
    image.convert(changes.get("mode", "RGB")).save(file, form)
    return file.getvalue()


def pages() -> dict[str, Page]:
    column = [(20, 20 + 50 * row, text) for row, text in enumerate(LINES)]
    table = [
        (20 + 170 * (index % 2), 30 + 3 * (index % 2) + 60 * (index // 2), text) for index, text in enumerate(COLUMNS)
    ]
    return {
        "one line": Page(partial(drawn, [(40, 180, "One line of text")], (400, 400)), 1),
        "many lines": Page(partial(drawn, column, (400, 240)), 4),
        "two columns, JPEG": Page(partial(drawn, table, (380, 240), "JPEG"), 4),
        "nothing": Page(partial(drawn, [], (320, 320)), 0),
        "turned, grey": Page(
            partial(drawn, [(30, 60, "Turned by"), (60, 160, "ten degrees")], (300, 300), turn=10, mode="L"), 2
        ),
        "downwards": Page(partial(drawn, [(20, 120, "From above to below")], (300, 300), turn=-90), 1),
        "a long strip": Page((samples.EXAMPLES / "picture.png").read_bytes, 2),
        "too small": Page(partial(drawn, [(1, 0, "tiny")], (50, 20), letters=14), 1),
        "too large": Page(partial(drawn, [(200, 100, "Large letters")], (2100, 900), letters=200), 1),
    }


PAGES = pages()


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    """The unchanged package. It reads up to 6 lines together; the sample reads all lines of a picture, padded to the
    widest."""
    import cv2
    from rapidocr_onnxruntime import RapidOCR

    cv2.setNumThreads(1)
    package = RapidOCR(intra_op_num_threads=1, rec_batch_num=1000)

    @cache
    def expected(data: bytes) -> Found:
        results = package(data, use_cls=False)[0] or []
        boxes = np.array([box for box, _, _ in results], np.float32).reshape(-1, 4, 2)
        return Found([text for _, text, _ in results], np.array([score for *_, score in results], np.float32), boxes)

    return expected


def step_by_step(client: shmserve.Client, data: bytes) -> Found:
    """Performs the steps of the ensemble from a client."""
    prepared = client.infer("ocr_prepare", {"IMAGE": np.array([data], object)})
    found = client.infer("ocr_det", {"x": prepared["X"][None]})["sigmoid_0.tmp_0"][0]
    cut = client.infer("ocr_boxes", {"MAP": found, "PICTURE": prepared["PICTURE"], "PLACE": prepared["PLACE"]})
    futures = [client.submit(ocr.MODEL, {ocr.INPUT: crop[None]}) for crop in cut["CROPS"]]
    steps = [future.result()[ocr.OUTPUT] for future in futures]
    read = np.concatenate(steps or [np.zeros((0, 0, 6625), np.float32)])
    answer = client.infer("ocr_text", {"STEPS": read, "BOXES": cut["BOXES"]})
    return Found([text.decode() for text in answer["TEXT"]], answer["SCORE"].copy(), answer["BOX"].copy())


def assert_same(found: Found, wanted: Found, lines: int) -> None:
    assert found.texts == wanted.texts
    assert len(found.texts) == lines
    np.testing.assert_allclose(found.scores, wanted.scores, atol=2e-3)
    np.testing.assert_allclose(found.boxes, wanted.boxes, atol=1e-2)


@pytest.mark.parametrize("name", ["many lines", "nothing", "turned, grey", "downwards", "too small"])
def test_step_by_step(client: shmserve.Client, oracle: Oracle, name: str) -> None:
    page = PAGES[name]
    found = step_by_step(client, page.data)
    assert_same(found, oracle(page.data), page.lines)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (lambda: b"", "its 0 bytes are not a PNG or JPEG file"),
        (lambda: b"GIF89a" + bytes(20), "its 26 bytes are not a PNG or JPEG file"),
        (lambda: PAGES["nothing"].data[:100], "IMAGE cannot be read: "),
        (lambda: drawn([], (4000, 4)), "4000 x 4 pixels is too small for text"),
        (lambda: drawn([], (8000, 6251), mode="1"), "8000 x 6251 pixels; the limit is 50000000"),
    ],
    ids=["nothing", "GIF", "cut off", "narrow", "huge"],
)
def test_invalid_images_are_refused(client: shmserve.Client, data: Callable[[], bytes], text: str) -> None:
    with pytest.raises(shmserve.ServeError, match=text) as failed:
        client.infer("ocr_prepare", {"IMAGE": np.array([data()], object)})
    assert "0x" not in str(failed.value)


def test_transparent_pixels_become_white(client: shmserve.Client) -> None:
    from PIL import Image

    image = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    image.paste((200, 100, 50, 255), (0, 0, 32, 64))
    file = io.BytesIO()
    image.save(file, "PNG")
    prepared = client.infer("ocr_prepare", {"IMAGE": np.array([file.getvalue()], object)})
    assert prepared["PICTURE"][5, 60].tolist() == [255, 255, 255]
    assert prepared["PICTURE"][5, 5].tolist() == [50, 100, 200]
    assert prepared["PLACE"].tolist() == [1, 1, 0, 64, 64]
    assert prepared["X"].shape == (3, 736, 736)
    assert prepared["X"].max() == 1


def read(result: shmserve.Result) -> Found:
    return Found([text.decode() for text in result["TEXT"]], result["SCORE"].copy(), result["BOX"].copy())


@pytest.mark.parametrize("name", PAGES)
def test_the_ensemble(client: shmserve.Client, oracle: Oracle, name: str) -> None:
    page = PAGES[name]
    found = read(client.infer("ocr", {"IMAGE": np.array([page.data], object)}))
    assert_same(found, oracle(page.data), page.lines)


def test_concurrent_pages_share_batches(client: shmserve.Client, oracle: Oracle) -> None:
    """Lines of several pages are batched, each line runs once, and each page gets its own lines."""
    names = ["turned, grey", "nothing", "many lines", "downwards", "turned, grey"]
    lines = sum(PAGES[name].lines for name in names)
    before, cut = counts(client), succeeded(client, "ocr_boxes")
    with stopped(client, ocr.MODEL):
        futures = [client.submit("ocr", {"IMAGE": np.array([PAGES[name].data], object)}) for name in names]
        until(client, lambda: succeeded(client, "ocr_boxes") == cut + len(names), "all lines wait")
    for name, future in zip(names, futures, strict=True):
        assert_same(read(future.result()), oracle(PAGES[name].data), PAGES[name].lines)
    rows, batches = (after - was for after, was in zip(counts(client), before, strict=True))
    assert rows == lines
    assert batches < lines


def counts(client: shmserve.Client) -> tuple[int, int]:
    (found,) = client.statistics(ocr.MODEL)["model_stats"]
    return int(found["inference_count"]), int(found["execution_count"])


def test_an_error_of_a_step_names_the_ensemble(client: shmserve.Client) -> None:
    with pytest.raises(shmserve.ServeError, match=r"in ensemble 'ocr', .*IMAGE cannot be read"):
        client.infer("ocr", {"IMAGE": np.array([b"nothing"], object)})

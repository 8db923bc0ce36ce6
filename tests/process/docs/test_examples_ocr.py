"""The OCR samples find the same lines, in the same order, as the package that their networks come from.

The oracle is that package's own pipeline on the same bytes. Without it these tests are skipped.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

import shmserve
from shmserve.repo import ocr, samples
from shmserve.testing import Server
from tests.support.cases import cases
from tests.support.shared_server import SharedServer
from tests.support.stopped import stopped

for module in ("onnxruntime", "cv2", "pyclipper", "PIL", "shapely", "yaml", "rapidocr_onnxruntime"):
    pytest.importorskip(module)

pytestmark = pytest.mark.process

PAPER, INK = (250, 248, 240), (20, 20, 60)


class Found(NamedTuple):
    texts: list[str]
    scores: NDArray[Any]
    boxes: NDArray[Any]


def drawn(*texts: tuple[int, int, str], size: tuple[int, int], form: str = "PNG", **changes: Any) -> bytes:
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


COLUMN = ((20, 20, "Invoice 2024-117"), (20, 70, "Three boxes of tea"), (20, 120, "Total: 42.50 EUR"), (20, 170, "Bye"))
TABLE = ((20, 30, "Name"), (190, 33, "Ada Lovelace"), (20, 90, "Born"), (190, 93, "10.12.1815"))
TURNED = ((30, 60, "Turned by"), (60, 160, "ten degrees"))
PAGES: dict[str, tuple[int, Callable[[], bytes]]] = {
    "one line": (1, lambda: drawn((40, 180, "One line of text"), size=(400, 400))),
    "many lines": (4, lambda: drawn(*COLUMN, size=(400, 240))),
    "two columns, JPEG": (4, lambda: drawn(*TABLE, size=(380, 240), form="JPEG")),
    "nothing": (0, lambda: drawn(size=(320, 320))),
    "turned, grey": (2, lambda: drawn(*TURNED, size=(300, 300), turn=10, mode="L")),
    "downwards": (1, lambda: drawn((20, 120, "From above to below"), size=(300, 300), turn=-90)),
    "a long strip": (2, (samples.EXAMPLES / "picture.png").read_bytes),
    "too small": (1, lambda: drawn((1, 0, "tiny"), size=(50, 20), letters=14)),
    "too large": (1, lambda: drawn((200, 100, "Large letters"), size=(2100, 900), letters=200)),
}
"""Name -> the number of lines, and what draws the page."""


@pytest.fixture(scope="module")
def server(shared_server: SharedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("samples")
    built = samples.build(folder, lambda text: None, ["ocr"])
    with shared_server.serving(folder, *built) as running:
        yield running


@pytest.fixture(scope="module")
def oracle() -> Callable[[bytes], Found]:
    """The unchanged package. It reads up to 6 lines together; the sample reads all lines of a picture, padded to the
    widest."""
    import cv2
    from rapidocr_onnxruntime import RapidOCR

    cv2.setNumThreads(1)
    package = RapidOCR(intra_op_num_threads=1, rec_batch_num=1000)

    def expected(data: bytes) -> Found:
        results = package(data, use_cls=False)[0] or []
        boxes = np.array([box for box, _, _ in results], np.float32).reshape(-1, 4, 2)
        return Found([text for _, text, _ in results], np.array([score for *_, score in results], np.float32), boxes)

    return expected


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


def test_concurrent_pages_share_batches_not_lines(client: shmserve.Client, oracle: Callable[[bytes], Found]) -> None:
    pages = [(lines, draw()) for lines, draw in PAGES.values()]
    before = counts(client)
    with stopped(client, ocr.MODEL, 2):
        futures = [client.submit("ocr", {"IMAGE": np.array([data], object)}) for _, data in pages]
    for (lines, data), future in zip(pages, futures, strict=True):
        found, wanted = future.result(), oracle(data)
        assert [text.decode() for text in found["TEXT"]] == wanted.texts
        assert len(wanted.texts) == lines
        np.testing.assert_allclose(found["SCORE"], wanted.scores, atol=2e-3)
        np.testing.assert_allclose(found["BOX"], wanted.boxes, atol=1e-2)
    rows, batches = (after - was for after, was in zip(counts(client), before, strict=True))
    assert rows == sum(lines for lines, _ in pages), "each line runs once"
    assert batches < rows


def counts(client: shmserve.Client) -> tuple[int, int]:
    (found,) = client.statistics(ocr.MODEL)["model_stats"]
    return int(found["inference_count"]), int(found["execution_count"])


@cases(
    (lambda: b"", "its 0 bytes are not a PNG or JPEG file"),
    (lambda: b"GIF89a" + bytes(20), "its 26 bytes are not a PNG or JPEG file"),
    (lambda: PAGES["nothing"][1]()[:100], "IMAGE cannot be read: "),
    (lambda: drawn(size=(4000, 4)), "4000 x 4 pixels is too small for text"),
    (lambda: drawn(size=(8000, 6251), mode="1"), "8000 x 6251 pixels; the limit is 50000000"),
    ids=["nothing", "GIF", "cut off", "narrow", "huge"],
)
def test_invalid_images_are_refused(data: Callable[[], bytes], text: str, client: shmserve.Client) -> None:
    with pytest.raises(shmserve.ServeError, match=rf"in ensemble 'ocr', .*{text}") as failed:
        client.infer("ocr", {"IMAGE": np.array([data()], object)})
    assert "0x" not in str(failed.value)

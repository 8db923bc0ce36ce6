"""The page on transformers: its files are written, its commands run, and its ensemble compared with the bare engine."""

from __future__ import annotations

import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve import Client
from shmserve.clients.cli import main
from shmserve.testing import Server
from tests.support.docs import pages
from tests.support.shared_server import SharedServer

NEAR = 1e-5
pytestmark = pytest.mark.process

pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("page")
    files = pages.write_files(pages.page("transformers"), place)
    assert len(files) == 7, files
    (place / "texts/texts/1").mkdir()
    subprocess.run([sys.executable, "make_encoder.py"], cwd=place, check=True)
    return place


@pytest.fixture(scope="module")
def server(folder: Path, shared_server: SharedServer) -> Iterator[Server]:
    with shared_server.serving(folder / "texts") as server:
        yield server


def ids_of(texts: list[str]) -> tuple[Any, Any]:
    words = [[zlib.crc32(word.encode()) % 1000 for word in text.lower().split()] for text in texts]
    ids = np.zeros((len(texts), max(map(len, words))), np.int64)
    for row, found in enumerate(words):
        ids[row, : len(found)] = found
    mask = np.array([[1] * len(found) + [0] * (ids.shape[1] - len(found)) for found in words], np.int64)
    return ids, mask


def test_padded_batches_give_the_same_results_as_single_requests(folder: Path, server: Server) -> None:
    engine = ort.InferenceSession(str(folder / "texts/encoder/1/model.onnx"), providers=["CPUExecutionProvider"])
    random = np.random.default_rng(1)
    requests = [
        [" ".join(f"word{random.integers(1000)}" for _ in range(random.integers(1, 129))) for _ in range(rows)]
        for rows in [1] * 60 + [2, 3]
    ]
    with Client(server.url) as client:
        given = [ids_of(texts) for texts in requests]
        inputs = [{"input_ids": ids, "attention_mask": mask} for ids, mask in given]
        encoded = [client.submit("encoder", feed) for feed in inputs]
        embedded = [
            client.submit("texts", {"TEXT": np.array([[text] for text in texts], object)}) for texts in requests
        ]
        for feed, tokens, vector in zip(inputs, encoded, embedded, strict=True):
            (right,) = engine.run(["tokens"], feed)
            assert tokens.result()["tokens"].shape == right.shape
            assert np.abs(tokens.result()["tokens"] - right).max() < NEAR
            mask = feed["attention_mask"][:, :, None]
            mean = (right * mask).sum(1) / mask.sum(1)
            assert np.abs(vector.result()["EMBEDDING"] - mean).max() < NEAR
        counted = {entry["name"]: entry for entry in client.statistics()["model_stats"]}
        seen = client.metrics()
    for name in ("encoder", "pooling"):
        entry = counted[name]
        assert 0 < entry["padded_elements"] < entry["elements"]
        assert entry["execution_count"] < entry["inference_stats"]["success"]["count"], "they shared batches"
        assert f'shmserve_batch_elements_total{{model="{name}",version="1"}} {entry["elements"]}' in seen
    assert counted["tokenizer"]["elements"] == 0


def test_stats_reports_the_share_of_padding(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["stats", "encoder", "--url", server.url]) == 0
    said = capsys.readouterr().out
    assert re.search(r"encoder version 1: [\d.]+% of [\d,]+ elements \(rows x padded length\) were padding", said), said

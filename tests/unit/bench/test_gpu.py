"""The frame of the measures on a GPU: limits, skipped and failed measures, and the counter of copies."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu import __main__ as main
from bench.gpu.recorder import sitecustomize
from bench.gpu.setting import GpuSetting, Skipped
from bench.lib.table import Row
from tests import ROOT, STANDINS

COPY = """
import importlib
runtime = importlib.import_module("cupy.cuda.runtime")
device, host = runtime.malloc(8), runtime.hostAlloc(8, 0)
for target, source, kind in ((device, host, 1), (host, device, 2), (device, device, 3), (device, device, 3)):
    runtime.memcpyAsync(target, source, 8, kind, 0)
runtime.streamSynchronize(0)
"""


def good(setting: GpuSetting) -> list[Row]:
    return [Row("good", 1.0, "x", at_least=0.5)]


def low(setting: GpuSetting) -> list[Row]:
    return [Row("low", 0.1, "x", at_least=0.5)]


def absent(setting: GpuSetting) -> list[Row]:
    raise Skipped("no GPU")


def broken(setting: GpuSetting) -> list[Row]:
    raise ValueError("a broken\nmeasure")


def hanging(setting: GpuSetting) -> list[Row]:
    select.select([], [], [])
    raise AssertionError


@pytest.fixture
def taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs these measures; the exit code and, by measure, the rows that were written."""

    def run(*measures: main.Measure, seconds: float = 100) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(main, "MEASURES", {one.take.__name__: one for one in measures})
        code = main.main(["--out", str(tmp_path / "out"), "--seconds", str(seconds)])
        record = json.loads((tmp_path / "out" / "results.json").read_text())
        assert str(tmp_path) not in json.dumps(record)
        return code, {row["measure"]: row for row in record["rows"]}

    return run


def test_a_skipped_or_missed_measure_is_no_failure(taken: Callable[..., Any]) -> None:
    code, rows = taken(*(main.Measure(take, 0, 50) for take in (good, low, absent)))
    assert code == 0
    assert {name: row["verdict"] for name, row in rows.items()} == {"good": "ok", "low": "missed", "absent": "skipped"}
    assert rows["absent"]["skipped"] == "no GPU"


def test_after_a_failed_measure_the_others_are_taken(taken: Callable[..., Any]) -> None:
    code, rows = taken(*(main.Measure(take, 0, 50) for take in (broken, good)))
    assert code == 1
    assert rows["broken"]["failed"] == "ValueError: a broken"
    assert rows["good"]["verdict"] == "ok"


def test_a_measure_that_hangs_ends_at_its_limit(taken: Callable[..., Any]) -> None:
    code, rows = taken(main.Measure(hanging, 0, 0.2), main.Measure(good, 0, 50))
    assert code == 1
    assert rows["hanging"]["failed"].startswith("TooSlow: it took more than")
    assert rows["good"]["verdict"] == "ok"


def test_a_measure_without_enough_time_is_skipped(taken: Callable[..., Any]) -> None:
    code, rows = taken(main.Measure(good, 60, 90), seconds=30)
    assert (code, rows["good"]["skipped"]) == (0, "30 s left, it needs 60")


def test_results_are_written_after_each_measure(tmp_path: Path, taken: Callable[..., Any]) -> None:
    def looking(setting: GpuSetting) -> list[Row]:
        rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
        return [Row("looking", len(rows), "")]

    assert taken(main.Measure(good, 0, 50), main.Measure(looking, 0, 50))[1]["looking"]["value"] == 1


@pytest.mark.process
def test_copies_of_the_runtime_are_counted(tmp_path: Path) -> None:
    recorder = ROOT / "bench" / "gpu" / "recorder"
    path = os.pathsep.join(map(str, (recorder, STANDINS)))
    environment = os.environ | {"PYTHONPATH": path, "SHMSERVE_MODEL_COPIES": str(tmp_path)}
    subprocess.run([sys.executable, "-c", COPY], env=environment, check=True)
    (file,) = tmp_path.iterdir()
    assert file.read_text().split("\n")[:-1] == ["1 cuda", "2 cuda", "3 cuda", "3 cuda"]


def test_copies_of_torch_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sitecustomize, "FOLDER", str(tmp_path))

    class Tensor:
        def __init__(self, device: str, address: int = 0) -> None:
            self.device = SimpleNamespace(type=device)
            self.address = address

        def data_ptr(self) -> int:
            return self.address

        def copy_(self, source: Tensor) -> Tensor:
            return self

        def to(self, device: str) -> Tensor:
            return self if device == self.device.type else Tensor(device, 2)

        def cpu(self) -> Tensor:
            return Tensor("cpu", 3)

        def clone(self) -> Tensor:
            return Tensor(self.device.type, 4)

    sitecustomize.watch_torch(SimpleNamespace(Tensor=Tensor))
    host, device = Tensor("cpu"), Tensor("cuda")
    host.to("cuda"), device.to("cuda"), device.cpu(), device.clone(), host.clone()
    device.copy_(device), device.copy_(host), host.copy_(host)
    (file,) = tmp_path.iterdir()
    assert [line.split()[0] for line in file.read_text().splitlines()] == ["1", "2", "3", "3", "1"]


def test_the_network_has_the_size_of_resnet_50() -> None:
    torch = pytest.importorskip("torch")
    from bench.gpu.resnet import network

    with torch.device("meta"):
        assert sum(weights.numel() for weights in network().parameters()) == 25_557_032

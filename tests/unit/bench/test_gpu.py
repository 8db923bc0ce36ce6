"""The frame of the measures on a GPU: limits, skipped and failed measures, and the counter of copies."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import __main__ as main
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


def test_measures_are_taken_whatever_others_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def looking(setting: GpuSetting) -> list[Row]:
        return [Row("looking", len(json.loads((tmp_path / "results.json").read_text())["rows"]), "")]

    def long(setting: GpuSetting) -> list[Row]:
        raise AssertionError

    def taken(*measures: main.Measure) -> tuple[int, dict[str, Any]]:
        """The exit code and, by measure, the rows that were written."""
        monkeypatch.setattr(main, "MEASURES", {one.take.__name__: one for one in measures})
        code = main.main(["--out", str(tmp_path), "--seconds", "100"])
        record = json.loads((tmp_path / "results.json").read_text())
        assert str(tmp_path) not in json.dumps(record)
        return code, {row["measure"]: row for row in record["rows"]}

    code, rows = taken(*(main.Measure(take, 0, 50) for take in (good, low, absent)), main.Measure(long, 600, 900))
    assert (code, [row["verdict"] for row in rows.values()]) == (0, ["ok", "missed", "skipped", "skipped"])
    assert rows["absent"]["skipped"] == "no GPU"
    assert rows["long"]["skipped"].endswith(" s left, it needs 600")
    code, rows = taken(main.Measure(broken, 0, 50), main.Measure(hanging, 0, 0.2), main.Measure(looking, 0, 50))
    assert code == 1
    assert rows["broken"]["failed"] == "ValueError: a broken"
    assert rows["hanging"]["failed"].startswith("TooSlow: it took more than")
    assert rows["looking"]["value"] == 2, "results are written after each measure"


@pytest.mark.process
def test_copies_of_the_runtime_are_counted(tmp_path: Path) -> None:
    recorder = ROOT / "bench" / "gpu" / "recorder"
    path = os.pathsep.join(map(str, (recorder, STANDINS)))
    environment = os.environ | {"PYTHONPATH": path, "SHMSERVE_MODEL_COPIES": str(tmp_path)}
    subprocess.run([sys.executable, "-c", COPY], env=environment, check=True)
    (file,) = tmp_path.iterdir()
    assert file.read_text().split("\n")[:-1] == ["1 cuda", "2 cuda", "3 cuda", "3 cuda"]

"""What could make a run pass wrongly: how outcomes are recorded. A run itself shows the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.triton_qa import workplace
from tests.triton_qa.catalog import Suite
from tests.triton_qa.runner import read

TESTS = """
import os, unittest
class Some(unittest.TestCase):
    def test_good(self): pass
    def test_bad(self): self.assertEqual(1, 2)
    def test_parts(self):
        for part in (1, 2):
            with self.subTest(part=part): self.assertEqual(part, 1)
    def test_skip(self): self.skipTest("not today")
    def test_undone(self): os._exit(3)
unittest.main()
"""


@pytest.mark.parametrize(("folder", "prefix"), [("recorder", "TRITON_QA"), ("server", "SHMSERVE_MODEL_QA")])
def test_every_unit_test_is_recorded_once(tmp_path: Path, folder: str, prefix: str) -> None:
    script, results = tmp_path / "some_test.py", tmp_path / "results"
    script.write_text(TESTS)
    recorder = {
        "PYTHONPATH": str(workplace.HERE / folder),
        f"{prefix}_RESULTS": str(results),
        f"{prefix}_STARTS": str(tmp_path / "starts"),
    }
    done = subprocess.run([sys.executable, str(script)], env=os.environ | recorder, capture_output=True, check=False)
    assert done.returncode == 3
    found = {one.test: (one.outcome, one.reason) for one in read("L0_some", results)}
    assert found == {
        "Some.test_bad": ("failed", "AssertionError: 1 != 2 (line 5)"),
        "Some.test_good": ("passed", ""),
        "Some.test_parts": ("failed", "AssertionError: 2 != 1 (line 8)"),
        "Some.test_skip": ("skipped", "not today"),
        "Some.test_undone": ("failed", "has not ended"),
    }


def test_a_script_continues_after_a_failure_and_uses_local_paths(tmp_path: Path) -> None:
    suite = tmp_path / "checkout" / "qa" / "L0_some"
    suite.mkdir(parents=True)
    lines = ["#!/bin/bash", "set -e", "kill 0", "false", "if true; then", "    exit 1", "fi"]
    lines += ["ls /data/inferenceserver/${REPO_VERSION}/model /opt/tritonserver/bin/tritonserver"]
    lines += ["RET=1", "if [ $RET -eq 1 ]; then", "    # stop", "    echo stopped", "    exit $RET", "fi", "echo end"]
    (suite / "test.sh").write_text("\n".join(lines))
    data = tmp_path / "data"
    (data / "model").mkdir(parents=True)
    place = workplace.prepare(tmp_path / "work", tmp_path / "checkout", Suite("L0_some"), data, Path(sys.executable))
    command = ["bash", "test.sh"]
    done = subprocess.run(command, cwd=place.qa / "L0_some", capture_output=True, text=True, check=True)
    assert done.stdout == f"{place.folder}/opt/tritonserver/bin/tritonserver\n\n{data}/model:\nend\n"
    assert (suite / "test.sh").read_text() == "\n".join(lines)

"""Tests of the harness itself, without a checkout: its records, its changes to scripts, and what counts as a pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shmserve.core.batching import dispatch
from shmserve.core.policy import BatchPolicy, ModelPolicy, SequencePolicy, TensorSpec
from shmserve.core.sequences import scheduler
from shmserve.protocol.messages import Infer, Options, Tensor
from tests.support.core.world import World
from tests.triton_qa import known, report, tritonserver, workplace
from tests.triton_qa.catalog import LEFT_OUT, SUITES, Suite
from tests.triton_qa.runner import Result, read
from tests.triton_qa.server import delayed

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


def result(test: str, outcome: str) -> Result:
    return Result("L0_some", "some_test.py", test, 1, outcome, "", 0.0)


@pytest.mark.parametrize(
    ("folder", "variables"),
    [
        ("recorder", ("TRITON_QA_RESULTS", "TRITON_QA_STARTS")),
        ("server", ("SHMSERVE_MODEL_QA_RESULTS", "SHMSERVE_MODEL_QA_STARTS")),
    ],
)
def test_every_unit_test_is_recorded_once(tmp_path: Path, folder: str, variables: tuple[str, str]) -> None:
    script, results = tmp_path / "some_test.py", tmp_path / "results"
    script.write_text(TESTS)
    files = dict(zip(variables, (str(results), str(tmp_path / "starts")), strict=True))
    recorder = {"PYTHONPATH": str(workplace.HERE / folder), **files}
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


def test_packages_of_the_script_take_precedence_over_those_of_the_server(tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text("")
    (tmp_path / "unittest.py").write_text("raise AssertionError")
    variables = {"PYTHONPATH": str(workplace.HERE / "recorder"), "TRITON_QA_MORE": str(tmp_path)}
    command = [sys.executable, "-c", "import only_here, unittest"]
    subprocess.run(command, env=os.environ | variables, check=True)


def test_a_failed_subtest_also_fails_its_test_in_pytest(tmp_path: Path) -> None:
    script, results = tmp_path / "some_test.py", tmp_path / "results"
    script.write_text("\n".join(TESTS.split("\n")[:-2]).replace("os._exit(3)", "self.fail('so')"))
    recorder = {"PYTHONPATH": str(workplace.HERE / "recorder"), "TRITON_QA_RESULTS": str(results)}
    words = [sys.executable, "-m", "pytest", "-p", "qa_pytest", "-p", "no:xdist", "-p", "no:cacheprovider", str(script)]
    subprocess.run(words, env=os.environ | recorder, capture_output=True, cwd=tmp_path, check=False)
    found = {one.test: (one.outcome, one.reason) for one in read("L0_some", results)}
    assert found["Some.test_parts"] == ("failed", "AssertionError: 2 != 1")
    assert found["Some.test_good"] == ("passed", "")
    assert [outcome for outcome, _ in found.values()].count("failed") == 3


def test_a_model_version_can_be_copied_under_another_number(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "qa" / "L0_some" / "models" / "simple").mkdir(parents=True)
    (checkout / "qa" / "L0_some" / "models" / "simple" / "config.pbtxt").write_text("own")
    (checkout / workplace.EXAMPLES / "simple" / "1").mkdir(parents=True)
    (checkout / workplace.EXAMPLES / "simple" / "config.pbtxt").write_text("example")
    suite = Suite("L0_some", layout={"models": ("simple/1", "simple/1 as simple/2")})
    place = workplace.prepare(tmp_path / "work", checkout, suite, tmp_path, Path(sys.executable))
    found = place.qa / "L0_some" / "models" / "simple"
    assert sorted(path.name for path in found.iterdir()) == ["1", "2", "config.pbtxt"]
    assert (found / "config.pbtxt").read_text() == "own"


def test_a_script_continues_after_a_failure_and_uses_local_paths(tmp_path: Path) -> None:
    suite = tmp_path / "checkout" / "qa" / "L0_some"
    suite.mkdir(parents=True)
    lines = ["#!/bin/bash", "set -e", "kill 0", "false", "if true; then", "    exit 1", "fi"]
    lines += ["ls /data/inferenceserver/${REPO_VERSION}/model /opt/tritonserver/bin/tritonserver", "python -V"]
    lines += ["RET=1", "if [ $RET -eq 1 ]; then", "    # stop", "    echo stopped", "    exit $RET", "fi"]
    lines += ["mkdir version", "mkdir version && echo made"]
    (suite / "test.sh").write_text("\n".join(lines))
    data = tmp_path / "data"
    (data / "model").mkdir(parents=True)
    place = workplace.prepare(tmp_path / "work", tmp_path / "checkout", Suite("L0_some"), data, Path(sys.executable))
    path = f"{place.shims}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "test.sh"],
        cwd=place.qa / "L0_some",
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[:2] == [f"{place.folder}/opt/tritonserver/bin/tritonserver", ""]
    assert "Python 3" in done.stdout
    assert "stopped" not in done.stdout
    assert done.stdout.endswith("made\n")
    assert (suite / "test.sh").read_text() == "\n".join(lines)


@pytest.mark.parametrize("given", [[], ["--backend-directory=other"]])
def test_backends_given_by_the_script_take_precedence(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tritonserver.BACKENDS, "stand-ins")
    found = tritonserver.flags(["--model-repository=m", *given])
    assert found[0] == "--triton-compatible"
    assert [word for word in found if "backend" in word] == (given or ["--backend-directory=stand-ins"])


@pytest.mark.parametrize("kind", ["batches", "sequences", "alone"])
def test_a_scheduler_can_be_delayed_until_requests_are_queued(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "dispatch", dispatch.dispatch)
    monkeypatch.setattr(scheduler, "_run", scheduler._run)
    delayed.install({delayed.REQUESTS: "2", delayed.BACKLOG: "1" if kind == "sequences" else ""})
    sequence = SequencePolicy(True, 2, 10**9) if kind == "sequences" else None
    batching = BatchPolicy() if kind == "batches" else None
    x, y = TensorSpec("x", "FP32", (1,)), TensorSpec("y", "FP32", (1,))
    world = World()
    world.deploy(ModelPolicy("m", 1, 4, (x,), (y,), batching, sequence=sequence))
    client, worker = world.connect("a"), world.worker("m_0")

    def send(number: int) -> int:
        """Number of requests that the worker has."""
        client.sends(number)
        options = Options(sequence=number, sequence_start=True, sequence_end=True) if sequence else None
        tensors = (Tensor("x", "FP32", (1, 1), bytes(4)),)
        world.turn([(client.peer, Infer(number, "m", 0, tensors, options=options))])
        running = worker.running
        return len(running.works) if running else 0

    counts = [send(number) for number in (1, 2, 3)]
    assert counts == {"batches": [0, 2, 2], "sequences": [0, 0, 2], "alone": [1, 1, 1]}[kind]


def test_known_differences_do_not_fail_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = known.Known("L0_some", "Some.test_known", "as designed")
    monkeypatch.setattr(known, "KNOWN", (entry,))
    known.known.cache_clear()
    results = [
        result("Some.test_good", "passed"),
        result("Some.test_known", "failed"),
        result("Some.test_bad", "failed"),
    ]
    found = report.tally("L0_some", results)
    assert found.counts == {"passed": 1, "known": 1, "failed": 1, "unexpected": 0, "elsewhere": 0, "skipped": 0}
    assert report.judge(result("Some.test_known", "passed")) == "unexpected"
    assert list(report.table([found]))[-1] == "| total | 1 | 1 | 1 | 33.3 | 0 |"
    assert json.loads(report.as_json([found], results))["tests"][1]["verdict"] == "known"
    known.known.cache_clear()


def test_no_suite_is_in_both_lists() -> None:
    names = [suite.name for suite in SUITES]
    assert len(set(names)) == len(names)
    assert not set(names) & set(LEFT_OUT)

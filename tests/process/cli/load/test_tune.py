"""`shmserve tune` from a user's view: the commands of its page, what they write, and that they leave nothing behind.

The model waits for 5 ms, and the target is 200 ms, so that a busy machine does not affect the result.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import COMMAND
from tests.support.docs import pages
from tests.support.ensemble_models import config_text, ensemble
from tests.support.model_files import parameters, write_model
from tests.support.workers.models import gguf_models

pytestmark = pytest.mark.process

END_S = 240
CONFIG = """# Waits for five milliseconds.
backend: "python"
max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]  # one
"""
MODEL = """import select

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        select.select([], [], [], 0.005)
        given = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]) for x in given]
"""
BATCHES = "max_batch_size: 4"
QUICK = "--p99 200ms --seconds 0.1 --instances 1-2 --confirm 1 --simulated 200 --json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with models/mlp, the model of the page."""
    write_model(tmp_path / "models", "mlp", CONFIG, MODEL)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"TMPDIR": str(folder / "tmp")}


def ran(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=END_S
    )


def commands_of_the_page() -> list[str]:
    return [line for line in pages.commands("sizing") if line.startswith("shmserve tune ")]


def test_the_commands_of_the_page(folder: Path) -> None:
    lines = commands_of_the_page()[:-1]
    assert len(lines) == 3
    file = folder / "models/mlp/config.pbtxt"
    for line in lines:
        words = [*shlex.split(line)[1:], *QUICK.split()]
        if "--apply" not in words:  # each instance more takes as long again
            words += ["--instances", "1"]
        done = ran(folder, *words)
        assert done.returncode in (0, 1), done.stderr
        found = json.loads(done.stdout)
        assert found["holds"] == (done.returncode == 0)
        assert found["chosen"]["instances"] in (1, 2) if found["chosen"] else not found["holds"]
        assert {entry["instances"] for entry in found["service_times"]} >= {1}
        assert found["confirmed"][0]["points"]
        assert os.listdir(folder / "tmp") == []
        if "--rate" in words:
            assert found["confirmed"][0]["points"][0]["rate"] == 500
        if "--apply" not in words or not found["holds"]:
            assert file.read_text() == CONFIG
    before, after = CONFIG.splitlines(), file.read_text().splitlines()
    changed = [line[1:] for line in found["diff"].splitlines()[2:] if line.startswith("+")]
    if found["holds"]:  # a busy machine may exceed the target
        assert [line for line in after if line not in before] == changed
    assert before[0] in after
    assert found["chosen"] in (None, found["present"]) or changed
    assert "<svg" in (folder / "report.html").read_text()


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed")
def test_a_language_model(folder: Path) -> None:
    """Which setting is best depends on the machine."""
    write_model(folder / "models", "chat", 'backend: "llamacpp"\n' + parameters(context_length="256", slots="2"))
    gguf_models.write(folder / "models/chat/1/model.gguf", context=256)
    words = "tune models/chat --slo e2e=60s --prompt-tokens 20 --output-tokens 4 --seconds 0.1 --json --apply"
    done = ran(folder, *shlex.split(words))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    tried = [(trial["slots"], trial["prompt_batch"]) for trial in found["trials"]]
    assert tried[:2] == [(2, 512), (1, 512)]
    assert {size for _, size in tried} == {64, 128, 256, 512}
    assert all(trial["tokens_per_s"] > 0 and not trial["error"] and trial["memory"] for trial in found["trials"])
    text = (folder / "models/chat/config.pbtxt").read_text()
    assert f'"{found["chosen"]["slots"]}"' in text
    for option in ("--p99=20ms", "--compare=earlier.json"):
        done = ran(folder, "tune", "models/chat", "--slo", "ttft=1s", option)
        assert (done.returncode, "a language model is tuned for --slo" in done.stderr) == (2, True)


def test_apply_changes_nothing_if_no_setting_meets_the_target(folder: Path) -> None:
    file = folder / "models/mlp/config.pbtxt"
    done = ran(folder, *f"tune {file.parent} --p99 1ms --seconds 0.1 --instances 1 --simulated 200 --apply".split())
    assert done.returncode == 1
    assert "models/mlp/config.pbtxt is not changed: no setting that was measured held a p99 of 1 ms" in done.stderr
    assert "No setting holds a p99 of 1 ms" in done.stdout
    assert file.read_text() == CONFIG
    for words, text in (
        ("nowhere", "nowhere is not a directory"),
        ("models/mlp --rows 8", "requests of 8 rows: the largest batch of 'mlp' is 4"),
        ("models/mlp --input x=1,2,3", "does not fit"),
    ):
        done = ran(folder, "tune", *words.split(), "--p99", "20ms")
        assert done.returncode in (1, 2)
        assert text in done.stderr
    assert os.listdir(folder / "tmp") == []


def test_the_results_are_printed_before_a_report_that_cannot_be_written(folder: Path) -> None:
    done = ran(folder, "tune", "models/mlp", *QUICK.split(), "--instances", "1", "--html", "none/report.html")
    assert json.loads(done.stdout)["service_times"]
    assert (done.returncode, "cannot write none/report.html: No such file" in done.stderr) == (1, True), done.stderr


def test_an_interrupt_prints_the_results_so_far(folder: Path) -> None:
    words = ["tune", "models/mlp", *QUICK.split(), "--instances", "1", "--seconds", "2", "--rate", "50"]
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*COMMAND, *words], cwd=folder, env=environment(folder), **piped) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "confirming" in line:
                break
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=END_S)
    assert process.returncode == 130, error
    found = json.loads(out)
    assert found["interrupted"] == "confirm"
    assert found["service_times"]
    assert "Traceback" not in error
    assert os.listdir(folder / "tmp") == []


def test_a_model_with_sequences(folder: Path) -> None:
    text = CONFIG + "sequence_batching { oldest { max_candidate_sequences: 1 } }  # two\n"
    write_model(folder / "models", "talk", text, MODEL)
    words = "tune models/talk --p99 200ms --seconds 0.1 --instances 1 --sequence-length 4 --apply"
    ended = ran(folder, *words.split())
    assert ended.returncode == 0, ended.stderr
    assert "requests/s of" in ended.stdout
    changed = (folder / "models/talk/config.pbtxt").read_text()
    (count,) = re.findall(r"max_candidate_sequences: (\d+) [^#]*# two", changed)
    assert int(count) > 1, "a batch of four takes as long as one request"
    refused = ran(folder, *words.split(), "--rate", "50")
    assert "a model with sequences is tuned for --p99: leave out --rate" in refused.stderr


def test_the_steps_of_an_ensemble_are_tuned_together(folder: Path) -> None:
    models, (x, y) = folder / "models", ("x:FP32:[2]", "y:FP32:[2]")
    write_model(models, "quick", config_text("identity", x, y, BATCHES))
    ensemble(models, "both", x, y, "quick(x:x)->(y:m)", "mlp(x:m)->(y:y)", more=BATCHES)
    ended = ran(folder, "tune", "models/both", *QUICK.split(), "--instances", "1")
    found = json.loads(ended.stdout)
    assert [step["model"] for step in found["steps"]] == ["quick", "mlp"]
    assert (ended.returncode == 0) is found["holds"], ended.stderr
    assert found["best"]["both"]["rate"] > 0


def test_models_that_share_the_machine_are_tuned_together(folder: Path) -> None:
    models, (x, y) = folder / "models", ("x:FP32:[2]", "y:FP32:[2]")
    write_model(models, "cnn", config_text("identity", x, y, BATCHES))
    before = (models / "cnn/config.pbtxt").read_text()
    words = f"{commands_of_the_page()[-1]} {QUICK} --rate mlp=40"
    ended = ran(folder, *words.split()[1:])
    found = json.loads(ended.stdout)
    assert found["targets"] == {"mlp": {"p99_ms": 200.0, "rate": 40.0}, "cnn": {"p99_ms": 80.0, "rate": 20.0}}
    assert {name: each["rate"] for name, each in found["best"].items()} == {"mlp": 40.0, "cnn": 20.0}
    assert all(step["memory_bytes"] for step in found["steps"])
    assert (ended.returncode == 0) is found["holds"], ended.stderr
    (folder / "before.json").write_text(ended.stdout)
    ended = ran(folder, *words.replace("--json", "--apply --compare before.json --instances 1-1").split()[1:])
    assert "mlp: requests/s" in ended.stdout, ended.stderr
    assert ("no configuration is changed" in ended.stderr) is (ended.returncode == 1)
    assert (models / "cnn/config.pbtxt").read_text() == before, "one instance without batches holds the target"

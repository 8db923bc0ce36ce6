"""Files that a configuration refers to."""

from __future__ import annotations

from pathlib import Path

from shmserve.repo.config.support import NOT_SUPPORTED
from shmserve.repo.load import ModelContext, examine
from tests.support.repo.texts import BACKENDS

FILE = "m/config.pbtxt"
TEXT = """backend: "identity"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 3 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 3 ]
label_filename: "labels.txt" }
model_warmup { name: "s" batch_size: 1
inputs { key: "x" value { data_type: TYPE_FP32 dims: 3 input_data_file: "ones" } } }
sequence_batching { state { input_name: 'i' output_name: 'o' dims: 2 data_type: TYPE_FP32
initial_state { name: 'n' dims: 2 data_type: TYPE_FP32 data_file: 'first' } } }
"""


def test_files_must_exist_with_the_expected_size(tmp_path: Path) -> None:
    def problems() -> list[str]:
        found = examine(TEXT, FILE, ModelContext("m", BACKENDS, folder=tmp_path)).problems
        return [str(problem) for problem in found if NOT_SUPPORTED not in problem.text]

    missing = "cannot be read: no such file in the model's directory"
    assert problems() == [
        f"{FILE}:5:1: output[0].label_filename: label file 'labels.txt' {missing}",
        f"{FILE}:7:56: model_warmup[0].inputs[\"x\"].input_data_file: warm-up data 'warmup/ones' {missing}",
        f"{FILE}:9:56: sequence_batching.state[0].initial_state[0].data_file: "
        f"initial state 'initial_state/first' {missing}",
    ]
    (tmp_path / "label.txt").write_text("a")
    assert problems()[0].endswith('directory; did you mean "label.txt"?')
    (tmp_path / "labels.txt").mkdir()
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "ones").symlink_to("/etc/passwd")
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "first").write_bytes(bytes(7))
    label, sample, state = problems()
    assert "label file 'labels.txt' is not a regular file" in label
    assert "warm-up data 'warmup/ones' is a link to a path outside the model's directory" in sample
    assert "initial state 'initial_state/first' has 7 bytes, expected 8" in state
    (tmp_path / "labels.txt").rmdir()
    (tmp_path / "labels.txt").write_text("a\nb\nc")
    (tmp_path / "warmup" / "ones").unlink()
    (tmp_path / "warmup" / "ones").write_bytes(bytes(12))
    (tmp_path / "initial_state" / "first").write_bytes(bytes(8))
    assert problems() == []

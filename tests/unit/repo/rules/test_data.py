"""The rules of the data that comes with a model: warm-up samples, and files that are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from shmserve.repo.config.support import NOT_SUPPORTED
from tests.unit.repo.rules.test_schedulers import FILE, HEAD, INPUT, MODEL, problems


def warmup(inputs: str, rest: str = "batch_size: 1", head: str = MODEL) -> str:
    return head + f'model_warmup {{ name: "s" {rest}\n{inputs} }}'


def sample(rest: str, key: str = "x") -> str:
    return f'inputs {{ key: "{key}" value {{ {rest} }} }}'


GOOD = sample("data_type: TYPE_FP32 dims: 3 zero_data: true")
UNBATCHED = MODEL.replace("max_batch_size: 8", "max_batch_size: 0")


@pytest.mark.parametrize(
    "text",
    [
        warmup(GOOD),
        warmup(GOOD, "batch_size: 8 count: 100"),
        warmup("", "batch_size: 0"),
        warmup(GOOD, "batch_size: 1", UNBATCHED),
        warmup(sample("data_type: TYPE_FP32 dims: 3 random_data: true")),
        warmup(GOOD, head=MODEL + 'input { name: "z" data_type: TYPE_INT8 dims: 1 optional: true }\n'),
        warmup(sample("data_type: TYPE_FP32 dims: 7 zero_data: true"), head=MODEL.replace("[ 3 ]", "[ -1 ]")),
        # The model has yet to say what its inputs are, and how large its batches may be.
        warmup(sample("data_type: TYPE_INT8 dims: 7 zero_data: true"), "batch_size: 4", 'backend: "onnxruntime"\n'),
    ],
)
def test_warmup_samples_as_they_should_be(text: str) -> None:
    assert problems(text) == []


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            warmup("", "batch_size: 1"),
            '5:14: model_warmup[0].inputs: "x" is missing; a sample needs every input that is',
        ),
        (
            warmup(GOOD, "\nbatch_size: 9"),
            "6:1: model_warmup[0].batch_size: found 9, expected at most max_batch_size (8",
        ),
        (warmup(GOOD, "\nbatch_size: 2", UNBATCHED), "6:1: model_warmup[0].batch_size: found 2, expected 1: the model"),
        (
            warmup(GOOD + sample("data_type: TYPE_FP32 dims: 3 zero_data: true", "xx")),
            '.inputs["xx"]: "xx" is not an input; did you mean "x"?',
        ),
        (warmup(sample("dims: 3 zero_data: true")), '6:8: model_warmup[0].inputs["x"].data_type: not given'),
        (
            warmup(sample("data_type: TYPE_FP64 dims: 3 zero_data: true")),
            '6:27: model_warmup[0].inputs["x"].data_type: found TYPE_FP64, expected TYPE_FP32, as for the input',
        ),
        (warmup(sample("data_type: TYPE_FP32 zero_data: true")), '6:8: model_warmup[0].inputs["x"].dims: not given'),
        (
            warmup(sample("data_type: TYPE_FP32 dims: 4 zero_data: true")),
            '6:54: model_warmup[0].inputs["x"].dims[0]: found 4, expected 3, as for the input',
        ),
        (
            warmup(sample("data_type: TYPE_FP32 dims: [ 1, 3 ] zero_data: true")),
            '6:48: model_warmup[0].inputs["x"].dims: found [1, 3], expected 1 dim(s), as for the input: [3]',
        ),
        (
            warmup(sample("data_type: TYPE_FP32 dims: -1 zero_data: true")),
            '6:54: model_warmup[0].inputs["x"].dims[0]: found -1, expected 1 or more: data needs a fixed size',
        ),
        (
            warmup(sample("data_type: TYPE_FP32 dims: 3")),
            "no data; expected one of zero_data, random_data, input_data_f",
        ),
        (
            warmup(sample('data_type: TYPE_FP32 dims: 3 input_data_file: "../w"')),
            '6:56: model_warmup[0].inputs["x"].input_data_file: found "../w", expected a file in the model',
        ),
        (warmup(sample('data_type: TYPE_FP32 dims: 3 input_data_file: ""')), "input_data_file: empty; expected a file"),
    ],
)
def test_a_wrong_warmup_sample(text: str, wanted: str) -> None:
    found = problems(text)
    assert len(found) == 1, found
    assert wanted in found[0]


def test_samples_of_a_sequence_model_have_its_controls() -> None:
    control = 'sequence_batching { control_input { name: "S" control { int32_false_true: [ 0, 1 ] } } }\n'
    found = [text for text in problems(warmup(GOOD, head=MODEL + control)) if "model_warmup" in text]
    assert len(found) == 1
    assert '"S" is missing' in found[0]
    both = GOOD + sample("data_type: TYPE_INT32 dims: 1 zero_data: true", "S")
    assert not [text for text in problems(warmup(both, head=MODEL + control)) if "model_warmup" in text]


# ---------------------------------------------------------------------------------------------------------- files


def test_files_that_are_named_are_there(tmp_path: Path) -> None:
    text = (
        HEAD
        + INPUT
        + 'output { name: "y" data_type: TYPE_FP32 dims: [ 3 ]\nlabel_filename: "labels.txt" }\n'
        + warmup(sample('data_type: TYPE_FP32 dims: 3 input_data_file: "ones"'), head="")
        + "\nsequence_batching { state { input_name: 'i' output_name: 'o' dims: 2 data_type: TYPE_FP32\n"
        + "initial_state { name: 'n' dims: 2 data_type: TYPE_FP32 data_file: 'first' } } }"
    )

    def files() -> list[str]:
        return [problem for problem in problems(text, tmp_path) if NOT_SUPPORTED not in problem]

    assert files() == [
        f"{FILE}:5:1: output[0].label_filename: label file 'labels.txt' cannot be read: no such file in the model's "
        f"directory",
        f"{FILE}:7:56: model_warmup[0].inputs[\"x\"].input_data_file: warm-up data 'warmup/ones' cannot be read: no "
        f"such file in the model's directory",
        f"{FILE}:9:56: sequence_batching.state[0].initial_state[0].data_file: initial state 'initial_state/first' "
        "cannot be read: no such file in the model's directory",
    ]
    (tmp_path / "label.txt").write_text("a")
    assert files()[0].endswith('directory; did you mean "label.txt"?')
    (tmp_path / "labels.txt").mkdir()
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "ones").symlink_to("/etc/passwd")
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "first").write_bytes(bytes(7))
    found = files()
    assert "label file 'labels.txt' is not a regular file" in found[0]
    assert "warm-up data 'warmup/ones' is a link to a path outside the model's directory" in found[1]
    assert "initial state 'initial_state/first' has 7 bytes, expected 8" in found[2]
    (tmp_path / "labels.txt").rmdir()
    (tmp_path / "labels.txt").write_text("a\nb\nc")
    (tmp_path / "warmup" / "ones").unlink()
    (tmp_path / "warmup" / "ones").write_bytes(bytes(12))
    (tmp_path / "initial_state" / "first").write_bytes(bytes(8))
    assert files() == []

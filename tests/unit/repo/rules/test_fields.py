"""Rules that depend on more than a short text: names of models, limits, files, what a model completes, and templates.

The texts of the other rules are in `broken`; see test_broken.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from shmserve.repo.config.complete import complete
from shmserve.repo.config.problems import ConfigError
from shmserve.repo.config.support import NOT_SUPPORTED
from shmserve.repo.load import ModelContext, examine, parse
from shmserve.repo.rules.fields import verify_completed
from shmserve.repo.rules.optimization import setting_problems
from tests.support.cases import cases
from tests.support.model_files import parameters
from tests.support.repo.texts import BACKENDS, SMALL

INPUT = 'input { name: "x" data_type: TYPE_FP32 dims: [ 3 ] }\n'
OUTPUT = 'output { name: "y" data_type: TYPE_FP32 dims: [ 3 ] }\n'
GROUP = "instance_group { %s }"


def problems(text: str, name: str = "m", gpus: tuple[int, ...] = ()) -> list[str]:
    found = examine(text, "", ModelContext(name, BACKENDS, gpus=gpus)).problems
    return [f"{problem.path}: {problem.text}" for problem in found]


def test_names_of_models() -> None:
    for name in ("", ".hidden", "a/b", "..", " a", "a ", "x" * 129, "\u00fc", "a\n", "a\x00"):
        assert any(problem.startswith("name: found ") for problem in problems(SMALL, name)), name
    for name in ("m", "a.b-c_1", "x" * 128, "1", "-", "_", "a,b", "simple (v2)", "user@host:8000"):
        assert problems(SMALL, name) == []


def test_names_of_python_models() -> None:
    text = 'backend: "python" ' + INPUT + OUTPUT
    assert not problems(text, "a b,c-d_e.f@g+h=i^j%k:l")
    for character in ";|&$`<>()[]{}\"'*?~#!":
        name = f"a{character}b"
        (problem,) = problems(text, name)
        assert problem.startswith(f'name: found "{name}"; Invalid stub name: contains invalid characters: ')
        assert not problems(SMALL, name)


@cases(
    (INPUT.replace("x", "x" * 129), "input[1].name: found 129 characters, expected at most 128"),
    ("".join(INPUT.replace("x", f"x{n}") for n in range(256)), "input: found 257, expected at most 256"),
    (
        GROUP % f'name: "{"g" * 121}"',
        "instance_group[0].name: found 121 characters, expected printable ones, at most 120",
    ),
    (GROUP % "count: 600 kind: KIND_GPU", "instance_group: 1200 instances, each a process; expected at most 1024"),
    (GROUP % "kind: KIND_GPU gpus: [ 0, 2 ]", "instance_group[0].gpus[1]: no GPU 2; this machine has [0, 1]"),
)
def test_limits(text: str, expected: str) -> None:
    assert problems(SMALL + text, gpus=(0, 1)) == [expected]


def test_preferred_sizes_are_checked_once_the_model_has_completed_its_configuration() -> None:
    config = complete(parse('backend: "onnxruntime" dynamic_batching { preferred_batch_size: [ 4 ] }'), "m")
    verify_completed(config, backends=BACKENDS)
    tensors = parse(INPUT + OUTPUT)
    with pytest.raises(ConfigError, match=r"preferred_batch_size\[0\]: found 4, expected at most max_batch_size"):
        verify_completed(replace(config, input=tensors.input, output=tensors.output), backends=BACKENDS)


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


def test_templates_that_jinja_cannot_compile() -> None:
    """llama.cpp ignores a tag for training; for the others, the gateway renders the template and does not know it."""
    pytest.importorskip("jinja2")
    training = "{% generation %}{{ messages }}{%- endgeneration -%}"
    nested = "{% for m in messages %}" * 25 + "{% endfor %}" * 25
    for backend, template, expected in (
        ("llamacpp", training, ""),
        ("python", training, "not a Jinja template: line 1: Encountered unknown tag 'generation'."),
        ("python", nested, "not a template that Jinja can run: too many statically nested blocks"),
        ("python", "{% break %}", "not a template that Jinja can run: 'break' outside loop"),
    ):
        text = f'backend: "{backend}" {parameters(chat_template=template)}'
        problems = [(problem.path, problem.text) for problem in setting_problems(complete(parse(text), "m"))]
        assert problems == ([('parameters["chat_template"]', expected)] if expected else [])


def test_graphs_of_a_model_that_completes_its_batch_are_not_checked_yet() -> None:
    text = 'backend: "tensorrt" optimization { cuda { graphs: true graph_spec { batch_size: 1 } } }'
    assert list(setting_problems(complete(parse(text), "m", gpus=(0,)))) == []

"""`check` reports each mistake of a repository with its place, alone and together with all others.

`broken/repository.expected` has the findings of all mistakes; each mistake has its own model. Set SHMSERVE_REWRITE=1 to
write it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from shmserve.broker.models.catalog import Catalog
from shmserve.broker.models.repositories import Repositories
from shmserve.repo.check import Checked
from shmserve.repo.compile import CoreSet
from shmserve.repo.onnx.protobuf import wrapped
from shmserve.repo.storage.layout import WARNING
from tests.support.repo.golden import assert_golden
from tests.support.repo.models import ENSEMBLE, GOOD, PYTHON, SOURCE, TENSOR, line_of, model, network, run

Mistake = Callable[[Path], object]

WARM = """model_warmup [ {
  name: "w" batch_size: 1
  inputs { key: "x" value {
    data_type: TYPE_FP32 dims: [ 3 ] input_data_file: "x.raw" } } } ]
"""
LABELS = GOOD.removesuffix(" } ]\n") + '\n  label_filename: "labels.txt" } ]\n'
ONNX = GOOD.replace("identity", "onnxruntime")
PADDLE = GOOD.replace("identity", "paddle")
SEVERAL = """backend: "identity"
max_batch_size: -1
input [ { name: "x" data_type: TYPE_FP32 dims: [ -2 ] } ]
output [ { name: "" data_type: TYPE_FP32 dims: [ 3 ] label_filename: "labels" } ]
dynamic_batching { preferred_batch_size: [ 4 ] }
metric_tags { key: "a" value: "b" }
"""
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
GPU_ACCELERATOR = 'optimization { execution_accelerators { gpu_execution_accelerator: [ { name: "tensorrt" } ] } }'


ACCELERATORS = """optimization { execution_accelerators {
  cpu_execution_accelerator [ { name: "openvino" }, { name: "tensorrt" }, { name: "OpenVINO" } ] } }
"""
CPU_GROUP = "instance_group [ { kind: KIND_CPU } ]\n"
LIBRARIES = 'model_operations { op_library_filename: [ "ours.so", "all.so", "theirs.so" ] }\n'


def template(text: str) -> str:
    return f'parameters {{ key: "chat_template" value {{ string_value: "{text}" }} }}\n'


def gguf(template: str) -> bytes:
    """The header of a file with this chat template."""
    key, text = b"tokenizer.chat_template", template.encode()
    start = struct.pack(f"<4sIQQQ{len(key)}s", b"GGUF", 3, 0, 1, len(key), key)
    return start + struct.pack(f"<IQ{len(text)}s", 8, len(text), text)


def without_config(root: Path, name: str, files: dict[str, str | bytes]) -> None:
    (model(root, name, files=files) / "config.pbtxt").unlink()


def ensemble(name: str, old: str, new: str) -> Mistake:
    assert ENSEMBLE.count(old) == 1
    return lambda root: model(root, name, ENSEMBLE.replace(old, new))


def one_version_of_two_without_a_model_file(root: Path) -> None:
    folder = model(root, "half", PYTHON + "version_policy { all { } }", {"1/model.py": SOURCE})
    (folder / "2").mkdir()


MISTAKES: list[Mistake] = [
    # directories and files
    lambda root: (root / "notes.txt").write_text(""),
    lambda root: (root / "gone").symlink_to("elsewhere/model"),
    lambda root: model(root, "my model "),
    lambda root: model(root, "renamed", 'name: "before"\n' + GOOD),
    lambda root: model(root, "unversioned", version="configs"),
    lambda root: (model(root, "worded") / "latest").mkdir(),
    lambda root: (model(root, "flat") / "2").write_text("x"),
    lambda root: model(root, "picky", GOOD + "version_policy { specific { versions: [ 1, 4 ] } }"),
    lambda root: model(root, "hollow", PYTHON),
    one_version_of_two_without_a_model_file,
    lambda root: model(root, "misspelt", PYTHON, {"1/modle.py": SOURCE}),
    lambda root: model(root, "beside", PYTHON, {"model.py": SOURCE, "1/model.py": SOURCE}),
    lambda root: model(root, "deep", files={"1/config.pbtxt": GOOD}),
    lambda root: without_config(root, "unnamed", {"1/model.onnx": network(), "config.pbtx": GOOD}),
    lambda root: without_config(root, "pbtext", {"1/model.py": SOURCE, "config.pbtext": GOOD}),
    lambda root: model(root, "nothing", 'backend: "onnxruntime"', {"1/model.onnx": b""}),
    lambda root: model(root, "pointer", 'backend: "onnxruntime"', {"1/model.onnx": POINTER}),
    lambda root: (model(root, "linked") / "1" / "weights").symlink_to("../../shared/weights"),
    # Python
    lambda root: model(root, "broken", PYTHON, {"1/model.py": "import os\nclass :\n"}),
    lambda root: model(root, "classless", PYTHON, {"1/model.py": "class Model:\n    pass\n"}),
    lambda root: model(root, "idle", PYTHON, {"1/model.py": "\nclass TritonPythonModel:\n    def run(self): pass\n"}),
    # the configuration
    lambda root: model(root, "typo", GOOD.replace("backend", "backnd")),
    lambda root: model(root, "cached", GOOD + "metric_tags { key: 'a' value: 'b' }\n"),
    lambda root: model(root, "several", SEVERAL, version="configs"),
    lambda root: model(root, "latin", files={"config.pbtxt": b"# caf\xe9\n"}),
    lambda root: model(root, "bare", 'backend: "python"', {"1/model.py": SOURCE}),
    lambda root: model(root, "asleep", GOOD + "instance_group [ { count: 1 passive: true } ]"),
    lambda root: model(root, "slow", ONNX + GPU_ACCELERATOR, {"1/model.onnx": network()}),
    lambda root: model(root, "speedy", ONNX + CPU_GROUP + ACCELERATORS, {"1/model.onnx": network()}),
    lambda root: model(root, "paddled", PADDLE + GPU_ACCELERATOR, {"1/model.pdmodel": "x"}),
    lambda root: model(root, "levelled", ONNX + "optimization { graph { level: 3 } }", {"1/model.onnx": network()}),
    lambda root: model(root, "custom", ONNX + LIBRARIES, {"1/model.onnx": network(), "1/ours.so": "", "all.so": ""}),
    lambda root: model(root, "chatty", GOOD + template("{% for m in messages %}\\n{{ m.role }}{% endif %}")),
    lambda root: model(root, "gguf", 'backend: "llamacpp"\n', {"1/model.gguf": gguf("{% for m in messages %}")}),
    lambda root: model(root, "filtered", GOOD + template("{{ messages | shout }}")),
    # files that the configuration refers to
    lambda root: model(root, "unlabelled", LABELS),
    lambda root: model(root, "few", LABELS, {"labels.txt": "cat\ndog\n"}),
    lambda root: model(root, "many", LABELS, {"labels.txt": "background\ncat\ndog\ncow\n"}),
    lambda root: model(root, "binary", LABELS, {"labels.txt": b"cat\n\xff\n"}),
    lambda root: model(root, "cold", GOOD + WARM),
    lambda root: model(root, "tepid", GOOD + WARM, {"warmup/x.raw": struct.pack("2f", 1, 2)}),
    # ONNX files
    lambda root: model(root, "cut_off", ONNX, {"1/model.onnx": network()[:-5]}),
    lambda root: model(root, "page", ONNX, {"1/model.onnx": b"<!DOCTYPE html>"}),
    lambda root: model(
        root,
        "others",
        ONNX.replace('"x"', '"inp"').replace(f'"y" {TENSOR}', '"y" data_type: TYPE_FP64 dims: [ 4 ]'),
        {"1/model.onnx": network()},
    ),
    lambda root: model(
        root,
        "fewer",
        ONNX.replace('"x"', '"w"').replace("max_batch_size: 8", ""),
        {"1/model.onnx": wrapped(b"\x3a\x00", [], [], {"v": (3,), "w": (3,)}, {"y": (3,)}, {})},
    ),
    lambda root: model(root, "single", ONNX, {"1/model.onnx": network(1)}),
    # ensembles
    ensemble("e1", '"good"', '"god"'),
    ensemble("e2", "model_version: -1", "model_version: 3"),
    ensemble("e3", 'key: "x"', 'key: "X"'),
    ensemble("e4", 'value: "OUT"', 'value: "OUTPUT"'),
    ensemble("e5", f'"OUT" {TENSOR}', '"OUT" data_type: TYPE_FP64 dims: [ 3 ]'),
    ensemble("e6", '"good"', '"e6"'),
]


def lines(checked: Checked) -> list[str]:
    return [line_of(finding) + (f" [{finding.hint}]" if finding.hint else "") for finding in checked.all()]


def test_each_error_is_reported_alone(tmp_path: Path) -> None:
    found: list[str] = []
    for number, mistake in enumerate(MISTAKES):
        root = tmp_path / str(number)
        model(root, "good")
        mistake(root)
        found += lines(run(root))
    assert_golden(Path(__file__).with_name("broken") / "repository.expected", found)


def test_all_errors_are_reported_together_and_the_server_logs_every_warning_once(tmp_path: Path) -> None:
    """Errors for which it does not serve a model are not logged, as they are the result of the load."""
    model(tmp_path, "good")
    for mistake in MISTAKES:
        mistake(tmp_path)
    checked = run(tmp_path)
    expected = (Path(__file__).with_name("broken") / "repository.expected").read_text().splitlines()
    assert sorted(lines(checked)) == sorted(expected)
    assert [entry.name for entry in checked.models if entry.ok and not entry.findings] == ["good"]
    assert checked.count("error") + checked.count("warning") == len(expected)
    catalog = Catalog(Repositories([tmp_path]), {}, CoreSet((0,)))
    readings = {reading.scanned.name: reading for reading in catalog.repositories.read_all()}
    for entry in checked.models:
        logged = [text for text, _ in catalog.warnings(readings[entry.name])]
        assert len(logged) == len(set(logged))
        assert not [text for text in logged if text in "; ".join(readings[entry.name].scanned.problem_texts)]
        assert {finding.relative for finding in entry.findings if finding.severity == WARNING} <= set(logged)

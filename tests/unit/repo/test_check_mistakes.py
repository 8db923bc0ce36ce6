"""`check` names every mistake with its file and line, in whatever company; the repository is built here, a model a
mistake."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from shmserve.broker.models.catalog import Catalog, why_not
from shmserve.repo.compile import CoreSet
from shmserve.repo.onnx.protobuf import wrapped
from shmserve.repo.storage.layout import WARNING
from tests.support.repo.models import ENSEMBLE, GOOD, PYTHON, SOURCE, STEP, TENSOR, lines, model, network, run


class Mistake(NamedTuple):
    """`make(root)` puts a model, or a file, into a repository; then exactly `expected` is told."""

    make: Callable[[Path], object]
    expected: tuple[str, ...]


WARM = """model_warmup [ {
  name: "w" batch_size: 1
  inputs { key: "x" value {
    data_type: TYPE_FP32 dims: [ 3 ] input_data_file: "x.raw" } } } ]
"""
LABELS = GOOD.replace("dims: [ 3 ] } ]\n", 'dims: [ 3 ]\n  label_filename: "labels.txt" } ]\n').replace(
    '[ 3 ]\n  label_filename: "labels.txt" } ]\noutput', "[ 3 ] } ]\noutput"
)


NOTHING = (
    "the model has no inputs or outputs: its configuration has no `input` or `output`, and there is no "
    "auto_complete_config in its model.py"
)
ONNX = GOOD.replace("identity", "onnxruntime")


def _accelerated(kind: str, name: str) -> str:
    return f'optimization {{ execution_accelerators {{ {kind}_execution_accelerator: [ {{ name: "{name}" }} ] }} }}'


def in_ensemble(old: str, new: str, name: str) -> Callable[[Path], object]:
    assert ENSEMBLE.count(old) == 1
    return lambda root: model(root, name, ENSEMBLE.replace(old, new))


def link_to_nowhere(root: Path) -> None:
    (root / "gone").symlink_to("elsewhere/model")


def link_in_version(root: Path) -> None:
    (model(root, "linked") / "1" / "weights").symlink_to("../../shared/weights")


def version_is_a_file(root: Path) -> None:
    folder = model(root, "flat")
    (folder / "2").write_text("x")


MISTAKES = {
    "stray file": Mistake(
        lambda root: (root / "notes.txt").write_text(""), ("warning: notes.txt: not a directory, ignored",)
    ),
    "link to no model": Mistake(link_to_nowhere, ("error: gone: broken link: elsewhere/model",)),
    "name": Mistake(
        lambda root: model(root, "my model "),
        (
            "error: my model : a model cannot have this name; expected 1 to 128 printable ASCII characters, without / "
            "and \\, no leading dot, no leading or trailing space",
        ),
    ),
    "other name in the config": Mistake(
        lambda root: model(root, "renamed", 'name: "before"\n' + GOOD),
        (
            'error: renamed/config.pbtxt:1: name: unexpected directory name "renamed" for model "before": the two must '
            "be equal",
        ),
    ),
    "no version": Mistake(
        lambda root: model(root, "unversioned", version="configs"),
        (
            "error: unversioned: at least one version must be available under the version policy of model "
            "'unversioned'; there is no version directory, such as 1",
        ),
    ),
    "version that is no number": Mistake(
        lambda root: (model(root, "worded") / "latest").mkdir(),
        ("warning: worded/latest: not a version directory, ignored: its name is not an integer",),
    ),
    "version that is a file": Mistake(
        version_is_a_file, ("warning: flat/2: a file with the name of a version, ignored",)
    ),
    "version of the policy not there": Mistake(
        lambda root: model(root, "picky", GOOD + "version_policy { specific { versions: [ 1, 4 ] } }"),
        ("warning: picky: version 4 is in the version policy, but has no directory",),
    ),
    "empty version": Mistake(
        lambda root: model(root, "hollow", PYTHON),
        ("error: hollow/1: has no file 'model.py': the directory is empty",),
    ),
    "one of two versions empty": Mistake(
        lambda root: (model(root, "half", PYTHON + "version_policy { all { } }", {"1/model.py": SOURCE}) / "2").mkdir(),
        ("error: half/2: not served: has no file 'model.py': the directory is empty",),
    ),
    "misspelt model file": Mistake(
        lambda root: model(root, "misspelt", PYTHON, {"1/modle.py": SOURCE}),
        ("error: misspelt/1: has no file 'model.py'; did you mean 'modle.py'?",),
    ),
    "model file beside the version": Mistake(
        lambda root: model(root, "beside", PYTHON, {"model.py": SOURCE, "1/model.py": SOURCE}),
        ("warning: beside/model.py: not read here",),
    ),
    "config in the version": Mistake(
        lambda root: model(root, "deep", files={"1/config.pbtxt": GOOD}),
        ("warning: deep/1/config.pbtxt: not read: versions have no configuration of their own",),
    ),
    "misspelt config": Mistake(
        lambda root: (
            model(root, "unnamed", files={"1/model.onnx": network(), "config.pbtx": GOOD}) / "config.pbtxt"
        ).unlink(),
        ("warning: unnamed/config.pbtx: not read",),
    ),
    "empty model file": Mistake(
        lambda root: model(root, "nothing", 'backend: "onnxruntime"', {"1/model.onnx": b""}),
        ("error: nothing/1/model.onnx: an empty file",),
    ),
    "pointer instead of the file": Mistake(
        lambda root: model(
            root,
            "pointer",
            'backend: "onnxruntime"',
            {"1/model.onnx": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"},
        ),
        ("error: pointer/1/model.onnx: is a Git LFS pointer; the file itself was not downloaded",),
    ),
    "dangling link in a version": Mistake(
        link_in_version, ("error: linked/1/weights: broken link: ../../shared/weights",)
    ),
    "not Python": Mistake(
        lambda root: model(root, "broken", PYTHON, {"1/model.py": "import os\nclass :\n"}),
        ("error: broken/1/model.py:2: not Python: invalid syntax",),
    ),
    "no class": Mistake(
        lambda root: model(root, "classless", PYTHON, {"1/model.py": "class Model:\n    pass\n"}),
        ("error: classless/1/model.py: has no class TritonPythonModel",),
    ),
    "no execute": Mistake(
        lambda root: model(
            root, "idle", PYTHON, {"1/model.py": "\nclass TritonPythonModel:\n    def run(self): pass\n"}
        ),
        ("error: idle/1/model.py:2: class TritonPythonModel has no execute method",),
    ),
    "misspelt field": Mistake(
        lambda root: model(root, "typo", GOOD.replace("backend", "backnd")),
        ('error: typo/config.pbtxt:1: backnd: ModelConfig has no such field; did you mean "backend"?',),
    ),
    "misspelt enum": Mistake(
        lambda root: model(root, "enum", GOOD.replace('"y" data_type: TYPE_FP32', '"y" data_type: TYPE_FP23')),
        (
            "error: enum/config.pbtxt:4: output[0].data_type: found TYPE_FP23, not a DataType; did you mean "
            '"TYPE_FP32"?',
        ),
    ),
    "dims": Mistake(
        lambda root: model(
            root, "zero", GOOD.replace('x" data_type: TYPE_FP32 dims: [ 3', 'x" data_type: TYPE_FP32 dims: [ 0')
        ),
        ("error: zero/config.pbtxt:3: input[0].dims[0]: found 0, expected 1 or more, or -1 for any size",),
    ),
    "backend": Mistake(
        lambda root: model(root, "engine", GOOD.replace("identity", "identiti")),
        (
            'error: engine/config.pbtxt:1: backend: found "identiti", which this server does not have; did you mean '
            '"identity"?',
        ),
    ),
    "no effect": Mistake(
        lambda root: model(root, "cached", GOOD + "metric_tags { key: 'a' value: 'b' }\n"),
        ("warning: cached/config.pbtxt:5: metric_tags: has no effect: metrics do not have model-specific labels yet",),
    ),
    "not text": Mistake(
        lambda root: model(root, "latin", files={"config.pbtxt": b"# caf\xe9\n"}),
        ("error: latin/config.pbtxt:1: not UTF-8 text",),
    ),
    "labels not there": Mistake(
        lambda root: model(root, "unlabelled", LABELS),
        (
            "error: unlabelled/config.pbtxt:5: output[0].label_filename: label file 'labels.txt' cannot be read: no "
            "such file in the model's directory",
        ),
    ),
    "too few labels": Mistake(
        lambda root: model(root, "few", LABELS, {"labels.txt": "cat\ndog\n"}),
        (
            "warning: few/config.pbtxt:5: output[0].label_filename: label file 'labels.txt' has 2 labels, but output "
            '"y" has 3 classes',
        ),
    ),
    "too many labels": Mistake(
        lambda root: model(root, "many", LABELS, {"labels.txt": "background\ncat\ndog\ncow\n"}),
        (
            "warning: many/config.pbtxt:5: output[0].label_filename: label file 'labels.txt' has 4 labels, but output "
            '"y" has 3 classes',
        ),
    ),
    "labels not text": Mistake(
        lambda root: model(root, "binary", LABELS, {"labels.txt": b"cat\n\xff\n"}),
        (
            "error: binary/config.pbtxt:5: output[0].label_filename: label file 'labels.txt': line 2 is not UTF-8: "
            "invalid start byte",
        ),
    ),
    "warm-up data not there": Mistake(
        lambda root: model(root, "cold", GOOD + WARM),
        (
            "error: cold/config.pbtxt:8: model_warmup[0].inputs[\"x\"].input_data_file: warm-up data 'warmup/x.raw' "
            "cannot be read: no such file in the model's directory",
        ),
    ),
    "warm-up data too short": Mistake(
        lambda root: model(root, "tepid", GOOD + WARM, {"warmup/x.raw": struct.pack("2f", 1, 2)}),
        (
            "error: tepid/config.pbtxt:8: model_warmup[0].inputs[\"x\"].input_data_file: warm-up data 'warmup/x.raw' "
            "has 8 bytes, expected 12: TYPE_FP32 and dims [3] of one row",
        ),
    ),
    "step of an unknown model": Mistake(
        in_ensemble('"good"', '"god"', "e1"),
        (
            f'error: e1/config.pbtxt:8: {STEP}.model_name: found "god", not a model of the repository; did you mean '
            '"good"?',
        ),
    ),
    "step of an unknown version": Mistake(
        in_ensemble("model_version: -1", "model_version: 3", "e2"),
        (
            f'error: e2/config.pbtxt:9: {STEP}.model_version: found 3, but the versions of model "good" that are '
            "served are 1",
        ),
    ),
    "step with an unknown input": Mistake(
        in_ensemble('key: "x"', 'key: "X"', "e3"),
        (
            f'error: e3/config.pbtxt:10: {STEP}.input_map: input "x" of model "good" is not mapped, and it is not '
            "optional",
            f'error: e3/config.pbtxt:10: {STEP}.input_map["X"]: model "good" has no input "X"; did you mean "x"?',
        ),
    ),
    "tensor not made by any step": Mistake(
        in_ensemble('value: "OUT"', 'value: "OUTPUT"', "e4"),
        (
            'error: e4/config.pbtxt:4: output[0]: ensemble output "OUT" is not produced by any step',
            f'error: e4/config.pbtxt:11: {STEP}.output_map["y"]: ensemble tensor "OUTPUT" is not used by any step',
        ),
    ),
    "ensemble with another type": Mistake(
        in_ensemble(f'"OUT" {TENSOR}', '"OUT" data_type: TYPE_FP64 dims: [ 3 ]', "e5"),
        (
            'error: e5/config.pbtxt:4: output[0].data_type: output "OUT" of the ensemble is TYPE_FP64, but ensemble '
            'tensor "OUT" (output "y" of step 0, model "good") is TYPE_FP32',
        ),
    ),
    "config.pbtext": Mistake(
        lambda root: (
            model(root, "pbtext", files={"config.pbtext": GOOD, "1/model.py": SOURCE}).joinpath("config.pbtxt").unlink()
        ),
        (f"warning: pbtext: {NOTHING}", "warning: pbtext/config.pbtext: not read"),
    ),
    "no inputs or outputs": Mistake(
        lambda root: model(root, "bare", 'backend: "python"', {"1/model.py": SOURCE}),
        (f"warning: bare: {NOTHING}",),
    ),
    "only passive instances": Mistake(
        lambda root: model(root, "asleep", GOOD + "instance_group [ { count: 1 passive: true } ]"),
        ("warning: asleep/config.pbtxt:5: instance_group: all its instances are passive: it cannot process requests",),
    ),
    "an accelerator of GPUs on a CPU": Mistake(
        lambda root: model(root, "slow", ONNX + _accelerated("gpu", "tensorrt"), {"1/model.onnx": network()}),
        (
            "warning: slow/config.pbtxt:5: optimization.execution_accelerators.gpu_execution_accelerator[0]: "
            'accelerator "tensorrt" has no effect: no instance of the model runs on a GPU',
        ),
    ),
    "ONNX file that is cut off": Mistake(
        lambda root: model(root, "cut_off", ONNX, {"1/model.onnx": network()[:-5]}),
        (
            f"error: cut_off/1/model.onnx: truncated, or not an ONNX file: {len(network()) - 5} bytes, expected at "
            f"least {len(network())}",
        ),
    ),
    "something else than ONNX": Mistake(
        lambda root: model(root, "page", ONNX, {"1/model.onnx": b"<!DOCTYPE html>"}),
        ("error: page/1/model.onnx: not an ONNX file: wire type 4 at byte 1",),
    ),
    "other tensors than the ONNX file": Mistake(
        lambda root: model(
            root,
            "others",
            ONNX.replace('"x"', '"inp"').replace(
                '"y" data_type: TYPE_FP32 dims: [ 3 ]', '"y" data_type: TYPE_FP64 dims: [ 4 ]'
            ),
            {"1/model.onnx": network()},
        ),
        (
            'error: others/config.pbtxt:3: input[0].name: the model has no input "inp"; it has "x"',
            'error: others/config.pbtxt:4: output[0].data_type: TYPE_FP64, but output "y" of the model is TYPE_FP32',
            'error: others/config.pbtxt:4: output[0].dims: [ 4 ], but output "y" of the model has [ 3 ] after the '
            "batch dimension",
        ),
    ),
    "an input that the ONNX file needs": Mistake(
        lambda root: model(
            root,
            "fewer",
            ONNX.replace('"x"', '"w"').replace("max_batch_size: 8", ""),
            {"1/model.onnx": wrapped(b"\x3a\x00", [], [], {"v": (3,), "w": (3,)}, {"y": (3,)}, {})},
        ),
        ('error: fewer/config.pbtxt:3: input: the model also needs input "v"',),
    ),
    "an ONNX file that cannot batch": Mistake(
        lambda root: model(root, "single", ONNX, {"1/model.onnx": network(1)}),
        (
            "error: single/config.pbtxt:2: max_batch_size: a batch needs a dynamic first dimension; that of input "
            '"x" is 1',
        ),
    ),
    "ensemble in itself": Mistake(
        in_ensemble('"good"', '"e6"', "e6"),
        (f'error: e6/config.pbtxt:8: {STEP}.model_name: model "e6" depends on this ensemble: e6 -> e6',),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_its_place(name: str, tmp_path: Path) -> None:
    model(tmp_path, "good")
    MISTAKES[name].make(tmp_path)
    assert lines(run(tmp_path)) == list(MISTAKES[name].expected)


def test_none_is_lost_when_all_are_together(tmp_path: Path) -> None:
    model(tmp_path, "good")
    for mistake in MISTAKES.values():
        mistake.make(tmp_path)
    checked = run(tmp_path)
    expected = [line for mistake in MISTAKES.values() for line in mistake.expected]
    assert sorted(lines(checked)) == sorted(expected)
    assert [entry.name for entry in checked.models if entry.ok and not entry.findings] == ["good"]
    assert checked.count("error") + checked.count("warning") == len(expected)


def test_a_server_logs_every_warning(tmp_path: Path) -> None:
    """Once, and without the reasons for which it does not serve a model: those are the failure of the load."""
    model(tmp_path, "good")
    for mistake in MISTAKES.values():
        mistake.make(tmp_path)
    catalog = Catalog([tmp_path], {}, CoreSet((0,)))
    readings = {reading.found.name: reading for reading in catalog.read_all()}
    count = 0
    for checked in run(tmp_path).models:
        logged = [text for text, _ in catalog.warnings(readings[checked.name])]
        assert len(logged) == len(set(logged))
        assert not [text for text in logged if text in why_not(readings[checked.name].found)]
        expected = [finding.relative for finding in checked.findings if finding.severity == WARNING]
        assert set(expected) <= set(logged)
        count += len(expected)
    assert count > 10


def test_what_to_write_instead(tmp_path: Path) -> None:
    for name, mistake in MISTAKES.items():
        if "ONNX file" in name and "cut off" not in name:
            mistake.make(tmp_path)
    assert [finding.hint for finding in run(tmp_path).all()] == [
        'write { name: "v" data_type: TYPE_FP32 dims: [ 3 ] }',
        'write name: "x"',
        "write data_type: TYPE_FP32",
        "write dims: [ 3 ]",
        "write max_batch_size: 0, and the dims of all tensors as in the model, here [ 1, 3 ]",
    ]


def test_all_of_one_file_are_told_and_in_its_order(tmp_path: Path) -> None:
    text = """backend: "identity"
max_batch_size: -1
input [ { name: "x" data_type: TYPE_FP32 dims: [ -2 ] } ]
output [ { name: "" data_type: TYPE_FP32 dims: [ 3 ] label_filename: "labels" } ]
dynamic_batching { preferred_batch_size: [ 4 ] }
metric_tags { key: "a" value: "b" }
"""
    model(tmp_path, "many", text)
    (tmp_path / "many" / "1").rmdir()
    found = [(finding.line, finding.path) for finding in run(tmp_path).all()]
    assert found == [
        (0, ""),
        (2, "max_batch_size"),
        (3, "input[0].dims[0]"),
        (4, "output[0].name"),
        (4, "output[0].label_filename"),
        (5, "dynamic_batching.preferred_batch_size[0]"),
        (6, "metric_tags"),
    ]

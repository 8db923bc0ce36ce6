"""`check` of repositories without mistakes, of unreadable files and of ensembles, its JSON, and each mistake with its
place, alone and together with all others.

`broken/repository.expected` has the findings of all mistakes; each mistake has its own model. Set SHMSERVE_REWRITE=1 to
write it.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from shmserve.broker.models.catalog import Catalog
from shmserve.broker.models.repositories import Repositories
from shmserve.errors import InvalidRequest
from shmserve.repo.backends import installed
from shmserve.repo.check import Checked, as_json, check
from shmserve.repo.compile import CoreSet
from shmserve.repo.load import parse
from shmserve.repo.onnx.protobuf import wrapped
from shmserve.repo.storage.layout import WARNING
from tests import ROOT
from tests.support.cases import cases
from tests.support.repo.golden import assert_golden
from tests.support.repo.models import (
    BACKENDS,
    ENSEMBLE,
    GOOD,
    PYTHON,
    SOURCE,
    STEP,
    TENSOR,
    line_of,
    lines,
    model,
    network,
    run,
)
from tests.support.workers.native_backends import compiled

UNKNOWN = ROOT / "tests" / "process" / "worker" / "native" / "unknown.c"


def test_a_repository_without_errors(tmp_path: Path) -> None:
    model(tmp_path, "good")
    model(tmp_path, "ensemble", ENSEMBLE)
    model(tmp_path, "python", PYTHON, {"1/model.py": SOURCE})
    (tmp_path / "README.md").write_text("")
    (tmp_path / ".git").mkdir()
    checked = run(tmp_path)
    assert lines(checked) == []
    assert [(entry.name, entry.ok, entry.ensemble, entry.versions, entry.groups) for entry in checked.models] == [
        ("ensemble", True, True, (1,), ()),
        ("good", True, False, (1,), ("good_0",)),
        ("python", True, False, (1,), ("python_0",)),
    ]


def test_the_library_of_a_model_is_read(tmp_path: Path) -> None:
    extension = Path(str(import_module("numpy.linalg._umath_linalg").__file__))
    config = GOOD.replace('"identity"', '"mine"')
    assert '"mine"' in config
    model(tmp_path, "text", config, {"1/libtriton_mine.so": "text"})
    model(tmp_path, "other", config)
    shutil.copy(extension, tmp_path / "other" / "libtriton_mine.so")
    assert lines(run(tmp_path)) == [
        "error: other/libtriton_mine.so: is not a backend: it does not define TRITONBACKEND_ModelInstanceExecute",
        "error: text/1/libtriton_mine.so: is not a shared library",
    ]


def test_what_a_library_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linked, directory = tmp_path / "linked", tmp_path / "backends"
    for name in ("gone", "beside", "told"):
        compiled(UNKNOWN, linked / f"lib{name}.so", f"-Wl,-soname,lib{name}.so")
    flags = [f"-L{linked}", "-Wl,--no-as-needed,-rpath,$ORIGIN/more", "-lgone", "-lbeside", "-ltold", "-lm"]
    library = compiled(UNKNOWN, directory / "mine" / "libtriton_mine.so", *flags)
    for name, folder in (("beside", library.parent / "more"), ("told", tmp_path / "told")):
        folder.mkdir()
        shutil.move(linked / f"lib{name}.so", folder)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "told"))
    config = GOOD.replace('"identity"', '"mine"')
    model(tmp_path / "models", "good", config)
    model(tmp_path / "models", "own", config)
    compiled(UNKNOWN, tmp_path / "models" / "own" / "1" / "libtriton_mine.so", "-DUNKNOWN")
    checked = check([tmp_path / "models"], backends=installed(directory), directory=directory)
    function = "TRITONBACKEND_ModelInstanceImagine"
    assert lines(checked) == [
        f"warning: {library}: needs libgone.so, which this machine does not have",
        f"error: own/1/libtriton_mine.so: needs functions that this server does not have: {function}",
    ]


def test_host_policies_that_the_server_lacks_are_named(tmp_path: Path) -> None:
    group = 'instance_group { kind: KIND_CPU host_policy: "%s" }'
    for name in ("fast", "slow"):
        model(tmp_path, name, GOOD.replace('"good"', f'"{name}"') + group % name)
    assert lines(check([tmp_path], backends=["identity"])) == []
    (line,) = lines(check([tmp_path], backends=["identity"], policies=["fast"]))
    assert line.endswith("instance_group: unknown host policy 'slow': its instances use all cores")


def test_a_model_in_two_repositories(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    model(one, "same")
    model(two, "same", GOOD.replace("max_batch_size", "max_batch"))
    model(two, "other")
    checked = run(one, two, one)
    text = "error: same: model appears in two or more repositories: 'same' is also in"
    allowed = check([one, two], backends=["identity"], namespacing=True)
    assert not any(text in line for line in lines(allowed))
    assert lines(checked) == [
        f"{text} {two}",
        f"{text} {one}",
        'error: same/config.pbtxt:2: max_batch: ModelConfig has no such field; did you mean "max_batch_size"?',
    ], "and the problems of each"
    assert [(entry.name, entry.repository) for entry in checked.models] == [
        ("other", two),
        ("same", one),
        ("same", two),
    ]
    assert [finding.where for finding in checked.all()][-1] == f"{two}/same/config.pbtxt:2:1"


def test_a_model_directory_is_not_a_repository(tmp_path: Path) -> None:
    for root in (model(tmp_path, "good"), tmp_path / "bare"):
        (root / "1").mkdir(parents=True, exist_ok=True)
        (root / "1" / "model.onnx").write_bytes(b"x")
        checked = run(root)
        assert (lines(checked), checked.models) == (
            ["error: this is a model directory; a repository is its parent"],
            (),
        )
        assert checked.findings[0].hint == f"check its parent: {tmp_path}"


def test_a_file_instead_of_a_repository(tmp_path: Path) -> None:
    folder = model(tmp_path, "net")
    (folder / "1").mkdir(exist_ok=True)
    takes = "is not a directory; `shmserve check` takes model repositories, with a directory for each model"
    repository = f"The repository of this model: shmserve check {tmp_path}"
    alone, other = tmp_path / "alone.onnx", tmp_path / "notes.md"
    serve = f"`shmserve serve {alone}` serves a file, and says what is wrong with it"
    for file in (folder / "1" / "model.onnx", alone, other):
        file.write_bytes(b"x")
    for root, text in {
        folder / "config.pbtxt": f"{takes}. {repository}",
        folder / "1" / "model.onnx": f"{takes}. {repository}",
        alone: f"{takes}. {serve}",
        other: takes,
        tmp_path / "nowhere": takes,
    }.items():
        with pytest.raises(InvalidRequest) as refused:
            check([root])
        assert str(refused.value) == f"{root} {text}"
    with pytest.raises(InvalidRequest, match="model-config-name"):
        run(tmp_path, config_name="../x")


def test_a_source_directory_is_one_error(tmp_path: Path) -> None:
    """As soon as one directory resembles a model, each gets its own findings."""
    assert lines(run(tmp_path)) == ["warning: it contains no models"]
    for name in ("docs", "src", "tests"):
        (tmp_path / name / "more").mkdir(parents=True)
    (tmp_path / "setup.cfg").touch()
    checked = run(tmp_path)
    text = "error: not a model repository: none of its 3 directories has a config.pbtxt or a version directory"
    assert lines(checked) == [text]
    assert checked.models == ()
    (tmp_path / "src" / "1").mkdir()
    assert len(run(tmp_path).models) == 3


def test_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may run as root, which may read everything, so os.access is replaced."""
    folder = model(tmp_path, "locked", files={"1/weights": "x", "notes": "x"})
    (folder / "2").mkdir()
    closed = {str(folder / "1" / "weights"), str(folder / "notes"), str(folder / "2")}
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, *args, **kw: str(path) not in closed and allowed(path, *args, **kw))
    found = run(tmp_path).all()
    assert [line_of(finding) for finding in found] == [
        "warning: locked/1/weights: cannot be read: Permission denied",
        "error: locked/2: cannot be read: Permission denied",
        "warning: locked/notes: cannot be read: Permission denied",
    ], "version 2 is the one that is served"
    assert "chmod u+rx" in found[1].hint
    monkeypatch.undo()
    (model(tmp_path, "open", PYTHON, {"1/model.py": SOURCE}) / "1" / "model.py").chmod(0o666)
    assert lines(run(tmp_path)) == ["warning: open/1/model.py: is writable by every user of this machine"]


@cases(
    "from helper import TritonPythonModel\n",
    "from helper import *\n",
    "from base import Base\nclass TritonPythonModel(Base):\n    pass\n",
    "def make():\n    pass\nTritonPythonModel = make()\n",
    "if True:\n    class TritonPythonModel:\n        async def execute(self, requests): pass\n",
    "class TritonPythonModel:\n    async def stream(self, request): yield None\n",
    "class TritonPythonModel:\n    execute = lambda self, requests: []\n",
    "class TritonPythonModel:\n    from helper import execute\n",
    "class TritonPythonModel:\n    pattern = '\\d'\n    def execute(self, requests): pass\n",
)
def test_python_that_may_be_valid_is_accepted(source: str, tmp_path: Path) -> None:
    model(tmp_path, "python", PYTHON, {"1/model.py": source})
    assert lines(run(tmp_path)) == []


def test_links_are_followed_and_circles_end(tmp_path: Path) -> None:
    real, root = model(tmp_path / "store", "real"), tmp_path / "root"
    (real / "1" / "again").symlink_to("..")
    root.mkdir()
    (root / "linked").symlink_to(real)
    assert lines(run(root)) == []
    for circle in (root / "around", real / "3", real / "1" / "around"):
        circle.symlink_to(circle.name)
    assert lines(run(root)) == [
        "error: around: broken link: around",
        "error: linked/1/around: broken link: around",
        "warning: linked/3: broken link: 3",
    ]


def test_models_that_complete_their_configurations(tmp_path: Path) -> None:
    """Some mistakes can be found once a model is loaded."""
    model(tmp_path, "good", GOOD + "max_queue: 1\n")
    model(tmp_path, "e", ENSEMBLE)
    text = f'error: e/config.pbtxt:8: {STEP}.model_name: model "good" cannot be served: it has 1 problem itself'
    found = lines(run(tmp_path))
    assert (text in found, len(found)) == (True, 2)
    source = SOURCE + "    @staticmethod\n    def auto_complete_config(config):\n        return config\n"
    (tmp_path / "good" / "config.pbtxt").write_text('backend: "python"')
    (tmp_path / "good" / "1" / "model.py").write_text(source)
    model(tmp_path, "net", 'backend: "onnxruntime"\n', {"1/model.onnx": network()})
    assert lines(run(tmp_path)) == []
    completed = {
        "good": parse(f'name: "good" max_batch_size: 8 {GOOD[GOOD.index("input") :].replace("x", "z")}'),
        "net": parse(f'name: "net" {GOOD.replace("identity", "onnxruntime")} dynamic_batching {{ }}'),
    }
    found = lines(check([tmp_path], backends=BACKENDS, completed=completed))
    assert any('"good" has no input "x"' in line for line in found)
    text = "warning: net/config.pbtxt: max_batch_size: max_batch_size was not given, or 0; the model"
    assert any(line.startswith(text) for line in found)


def test_json(tmp_path: Path) -> None:
    model(tmp_path, "good", GOOD + "metric_tags { key: 'a' value: 'b' }\n")
    (tmp_path / "notes.txt").write_text("")
    common = {"repository": str(tmp_path), "severity": "warning", "log": []}
    tags = common | {"model": "good", "file": "good/config.pbtxt", "line": 5, "column": 1, "path": "metric_tags"}
    tags |= {"text": "has no effect: metrics do not have model-specific labels yet", "hint": ""}
    notes = common | {"model": "", "file": "notes.txt", "line": 0, "column": 0, "path": ""}
    notes |= {"text": "not a directory, ignored", "hint": "a model is a directory: NAME/config.pbtxt and NAME/1/"}
    good = {"name": "good", "repository": str(tmp_path), "ok": True, "versions": [1], "problems": [tags]}
    assert as_json(run(tmp_path)) == {"models": [good], "problems": [notes], "errors": 0, "warnings": 2}


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
    ensemble("e7", 'key: "y"', 'key: "yy"'),
    ensemble("e8", "max_batch_size: 4", "max_batch_size: 16"),
    ensemble("e9", f'"OUT" {TENSOR}', '"OUT" data_type: TYPE_FP32 dims: [ 9 ]'),
    ensemble("ea", f'"IN" {TENSOR}', '"IN" data_type: TYPE_UINT8 dims: [ 3 ]'),
]


def hinted(checked: Checked) -> list[str]:
    return [line_of(finding) + (f" [{finding.hint}]" if finding.hint else "") for finding in checked.all()]


def test_each_error_is_reported_alone(tmp_path: Path) -> None:
    found: list[str] = []
    for number, mistake in enumerate(MISTAKES):
        root = tmp_path / str(number)
        model(root, "good")
        mistake(root)
        found += hinted(run(root))
    assert_golden(Path(__file__).with_name("broken") / "repository.expected", found)


def test_all_errors_are_reported_together_and_the_server_logs_every_warning_once(tmp_path: Path) -> None:
    """Errors for which it does not serve a model are not logged, as they are the result of the load."""
    model(tmp_path, "good")
    for mistake in MISTAKES:
        mistake(tmp_path)
    checked = run(tmp_path)
    expected = (Path(__file__).with_name("broken") / "repository.expected").read_text().splitlines()
    assert sorted(hinted(checked)) == sorted(expected)
    assert [entry.name for entry in checked.models if entry.ok and not entry.findings] == ["good"]
    assert checked.count("error") + checked.count("warning") == len(expected)
    catalog = Catalog(Repositories([tmp_path]), {}, CoreSet((0,)))
    readings = {reading.scanned.name: reading for reading in catalog.repositories.read_all()}
    for entry in checked.models:
        logged = [text for text, _ in catalog.warnings(readings[entry.name])]
        assert len(logged) == len(set(logged))
        assert not [text for text in logged if text in "; ".join(readings[entry.name].scanned.problem_texts)]
        assert {finding.relative for finding in entry.findings if finding.severity == WARNING} <= set(logged)

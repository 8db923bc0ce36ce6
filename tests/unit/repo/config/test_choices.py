"""Which configuration and which versions of a model count, and the names to load by."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shmserve.errors import InvalidRequest, NotFound
from shmserve.repo.load import parse
from shmserve.repo.storage.store import Found, check_config_name, find_model, model_names, scan, scan_model
from tests.support.repo.texts import BACKENDS, ENSEMBLE, SMALL

PYTHON = SMALL.replace("identity", "python")
ALL_VERSIONS = "version_policy { all { } }"


def put(path: Path, config: str | None = SMALL, versions: tuple[str, ...] = ("1",), file: str = "") -> Path:
    for version in versions:
        (path / version).mkdir(parents=True)
        if file:
            (path / version / file).write_bytes(b"")
    if config is not None:
        (path / "config.pbtxt").write_text(config)
    return path


def look(path: Path, config_name: str = "") -> Found:
    return scan_model(path, backends=BACKENDS, config_name=config_name)


# -------------------------------------------------------------------------------------------- alternative configs


def test_an_alternative_is_taken_where_there_is_one(tmp_path: Path) -> None:
    path = put(tmp_path / "m")
    put(tmp_path / "n")
    (path / "configs").mkdir()
    (path / "configs" / "small.pbtxt").write_text(SMALL.replace("8", "2"))
    found = {model.name: model for model in scan([tmp_path], backends=BACKENDS, config_name="small")}
    assert [(model.file, model.config and model.config.max_batch_size) for model in found.values()] == [
        ("configs/small.pbtxt", 2),
        ("config.pbtxt", 8),
    ]
    assert look(path).file == "config.pbtxt"
    assert look(path, "large").file == "config.pbtxt"


def test_problems_name_the_file_that_was_used(tmp_path: Path) -> None:
    path = put(tmp_path / "m")
    (path / "configs").mkdir()
    (path / "configs" / "bad.pbtxt").write_text("backnd: 1")
    (path / "configs" / "huge.pbtxt").write_bytes(b"#" * (1024 * 1024 + 1))
    (path / "configs" / "folder.pbtxt").mkdir()
    assert look(path, "bad").problems == (
        'm/configs/bad.pbtxt:1:1: backnd: ModelConfig has no such field; did you mean "backend"?',
    )
    assert look(path, "huge").problems == ("m/configs/huge.pbtxt: 1048577 bytes, expected at most 1048576",)
    assert look(path, "folder").problems == ("m/configs/folder.pbtxt: not a regular file",)
    assert [fault.file for fault in look(path, "bad").faults] == ["m/configs/bad.pbtxt"]


@pytest.mark.parametrize("name", ["../config", "a/b", ".", "..", " ", "x" * 129, "a\0b"])
def test_names_that_no_alternative_can_have(tmp_path: Path, name: str) -> None:
    put(tmp_path / "m")
    for call in (lambda: scan([tmp_path], config_name=name), lambda: look(tmp_path / "m", name)):
        with pytest.raises(InvalidRequest, match="--model-config-name: found"):
            call()
    assert check_config_name("a-b.c_1") == "a-b.c_1"


# ------------------------------------------------------------------------------------------------ what was given


def test_what_is_given_is_kept_apart_from_what_is_filled_in(tmp_path: Path) -> None:
    found = look(put(tmp_path / "m"))
    assert found.given == parse(SMALL)
    assert found.config is not None
    assert found.config.version_policy is not None
    assert found.places["input[0].dims"] == (4, 42)


def test_no_file_is_nothing_given(tmp_path: Path) -> None:
    found = look(put(tmp_path / "m", None, file="model.onnx"))
    assert (found.file, found.given, found.problems) == ("", parse(""), ())


def test_a_file_that_cannot_be_read_is_not_given(tmp_path: Path) -> None:
    found = look(put(tmp_path / "m", "input {"))
    assert found.given is None
    assert found.config is None
    assert len(found.problems) == 1


def test_an_ensemble(tmp_path: Path) -> None:
    found = look(put(tmp_path / "m", ENSEMBLE))
    assert found.config is not None
    assert found.given == parse(ENSEMBLE)
    assert found.problems == ()
    assert found.versions == (1,)


def test_problems_and_warnings_have_their_places(tmp_path: Path) -> None:
    text = SMALL + 'metric_tags { key: "a" value: "b" }\nversion_policy { specific { versions: [ 1, 2 ] } }'
    found = look(put(tmp_path / "m", text))
    assert found.warnings == tuple(str(remark) for remark in found.remarks)
    assert [(remark.file, remark.line, remark.path) for remark in found.remarks] == [
        ("m/config.pbtxt", 6, "metric_tags"),
        ("m", 0, ""),
    ]


# ---------------------------------------------------------------------------------------------- versions' files


def test_a_version_without_its_file_is_not_served(tmp_path: Path) -> None:
    path = put(tmp_path / "m", PYTHON + ALL_VERSIONS, ("1", "2", "3", "4"))
    for version in ("1", "4"):
        (path / version / "model.py").write_text("")
    (path / "3" / "modle.py").write_text("")
    found = look(path)
    assert found.versions == (1, 4)
    assert found.missing == {
        2: "has no file 'model.py': the directory is empty",
        3: "has no file 'model.py'; did you mean 'modle.py'?",
    }
    assert found.problems == ()
    assert found.warnings == tuple(f"m/{number}: not served: {why}" for number, why in found.missing.items())


def test_the_only_version_without_its_file_is_the_models_problem(tmp_path: Path) -> None:
    path = put(tmp_path / "m", PYTHON, ("1", "2"))
    (path / "1" / "model.py").write_text("")
    found = look(path)
    assert found.config is None
    assert found.versions == ()
    assert found.missing == {2: "has no file 'model.py': the directory is empty"}
    assert found.problems == ("m/2: has no file 'model.py': the directory is empty",)


@pytest.mark.parametrize(
    ("config", "file", "kind", "missing"),
    [
        (PYTHON, "model.py", "file", ""),
        (PYTHON, "model.py", "directory", "'model.py' is a directory, expected a file"),
        (PYTHON, "model.py", "nowhere", "'model.py' is a broken link"),
        (PYTHON, "model.py", "link", ""),
        (PYTHON + 'default_model_filename: "other.py"', "other.py", "file", ""),
        (PYTHON + 'default_model_filename: "other.py"', "model.py", "file", "has no file 'other.py'"),
        ('backend: "onnxruntime"', "model.onnx", "file", ""),
        (
            'backend: "onnxruntime"',
            "model.onnx",
            "directory",
            "'model.onnx' is a directory, but has no file 'model.onn",
        ),
        ('backend: "onnxruntime"', "model.onnx", "with external data", ""),
        (SMALL, "x", "file", ""),
        (SMALL + 'default_model_filename: "weights"', "x", "file", "has no file 'weights'"),
    ],
)
def test_what_a_version_has_to_have(tmp_path: Path, config: str, file: str, kind: str, missing: str) -> None:
    path = put(tmp_path / "m", config)
    here = path / "1" / file
    if kind == "file":
        here.write_bytes(b"")
    elif kind == "link":
        (path / "real").write_bytes(b"")
        here.symlink_to(path / "real")
    elif kind == "nowhere":
        here.symlink_to(path / "none")
    else:
        here.mkdir()
        if kind == "with external data":
            (here / "model.onnx").write_bytes(b"")
            (here / "weights.bin").write_bytes(b"")
    found = look(path)
    assert found.versions == (() if missing else (1,)), found.problems
    assert found.missing.get(1, "").startswith(missing)
    assert bool(found.missing) is bool(missing)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_version_that_may_not_be_read_hurts_no_other(tmp_path: Path) -> None:
    path = put(tmp_path / "m", PYTHON + ALL_VERSIONS, ("1", "2"), "model.py")
    (path / "1").chmod(0)
    found = look(path)
    (path / "1").chmod(0o700)
    assert found.versions == (2,)
    assert found.missing == {1: "cannot be read: Permission denied"}


def test_a_model_of_a_backend_that_is_not_here_lacks_nothing_else(tmp_path: Path) -> None:
    found = look(put(tmp_path / "m", 'platform: "tensorrt_plan"'))
    assert len(found.problems) == 1
    assert found.missing == {}


# ------------------------------------------------------------------------------------------------- names to load by


def test_the_names_of_models(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one / "b", one / "a", two / "a", two / "__pycache__", two / ".git", two / "no model"):
        path.mkdir(parents=True)
    (one / "README.md").write_text("")
    (one / "bad").mkdir()
    (one / "bad" / "config.pbtxt").write_text("nothing of this is read")
    assert model_names([one, two, one]) == {
        "a": [one / "a", two / "a"],
        "b": [one / "b"],
        "bad": [one / "bad"],
        "no model": [two / "no model"],
    }
    assert [model.name for model in scan([one, two])] == ["a", "b", "bad", "no model"]
    with pytest.raises(InvalidRequest, match="check --model-repository"):
        model_names([tmp_path / "none"])


def test_a_model_is_found_by_its_name(tmp_path: Path) -> None:
    put(tmp_path / "one" / "a")
    put(tmp_path / "two" / "b")
    (tmp_path / "two" / "link").symlink_to(tmp_path / "one" / "a")
    roots = [tmp_path / "one", tmp_path / "two"]
    assert find_model(roots, "a") == tmp_path / "one" / "a"
    assert find_model(roots, "b") == tmp_path / "two" / "b"
    assert find_model(roots, "link") == tmp_path / "two" / "link"


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("", InvalidRequest, "Model name cannot be empty. Please enter a valid name to deploy."),
        (" \t", InvalidRequest, "Model name cannot be empty. Please enter a valid name to deploy."),
        ("../one/a", InvalidRequest, "model name must not contain path traversal characters; found '../one/a'"),
        ("a/1", InvalidRequest, "model name must not contain path traversal characters; found 'a/1'"),
        ("..", InvalidRequest, "model name must not contain path traversal characters; found '..'"),
        ("/etc", InvalidRequest, "model name must not contain path traversal characters; found '/etc'"),
        (
            ".hidden",
            NotFound,
            "failed to load '.hidden', failed to poll from model repository: a model cannot have thi",
        ),
        ("__pycache__", NotFound, "failed to load '__pycache__', failed to poll from model repository: a model cannot"),
        ("a\0", NotFound, "failed to load 'a\\x00', failed to poll from model repository: a model cannot have this na"),
        ("file", NotFound, "failed to load 'file', failed to poll from model repository: no model repository has it"),
        ("resnt", NotFound, "failed to poll from model repository: no model repository has it; did you mean 'resnet'?"),
        (
            "both",
            InvalidRequest,
            "failed to load 'both', failed to poll from model repository: model appears in two or more repositories: "
            "'both' is in 2 of them; keep one",
        ),
    ],
)
def test_names_that_find_nothing(tmp_path: Path, name: str, error: type[Exception], text: str) -> None:
    for model in ("a", "both", "resnet", ".hidden", "__pycache__"):
        (tmp_path / "one" / model).mkdir(parents=True)
    (tmp_path / "two" / "both").mkdir(parents=True)
    (tmp_path / "one" / "file").write_text("")
    with pytest.raises(error) as caught:
        find_model([tmp_path / "one", tmp_path / "two"], name)
    assert str(caught.value).startswith(text) or str(caught.value).endswith(text)
    assert str(tmp_path) not in str(caught.value)

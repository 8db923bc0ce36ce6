"""Repositories on disk: what is a model, what is a version, and that a bad model hurts nobody else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shmserve.errors import InvalidRequest
from shmserve.repo.config.problems import CONFIG_BYTES
from shmserve.repo.load import parse
from shmserve.repo.storage.store import Found, find_model, scan, select_versions
from tests import ROOT
from tests.support.repo.texts import BACKENDS, DYNAMIC, SMALL


def put(root: Path, model: str, config: str | bytes | None = SMALL, versions: tuple[str, ...] = ("1",)) -> Path:
    path = root / model
    path.mkdir(parents=True)
    for version in versions:
        (path / version).mkdir()
    if config is not None:
        (path / "config.pbtxt").write_bytes(config.encode() if isinstance(config, str) else config)
    return path


def scanned(*roots: Path) -> dict[str, Found]:
    found = scan(roots, backends=BACKENDS)
    names = [model.name for model in found]
    assert names == sorted(set(names))
    for model in found:
        assert (model.config is None) is bool(model.problems)
        for text in (*model.problems, *model.warnings):
            assert str(roots[0].parent) not in text
            assert text.replace("\n", "").isprintable()
    return {model.name: model for model in found}


def only(*roots: Path) -> Found:
    (found,) = scanned(*roots).values()
    return found


def test_an_empty_repository(tmp_path: Path) -> None:
    assert scanned(tmp_path) == {}


def test_models_versions_and_other_files(tmp_path: Path) -> None:
    put(tmp_path, "b", versions=("1", "2", "10"))
    path = put(tmp_path, "a")
    (path / "labels.txt").write_text("x")
    (path / "configs").mkdir()
    (path / "warmup").mkdir()
    (path / "initial_state").mkdir()
    (path / "__pycache__").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "README.md").write_text("not a model")
    found = scanned(tmp_path)
    assert list(found) == ["a", "b"]
    assert found["a"].versions == (1,)
    assert found["b"].versions == (10,)
    assert found["a"].warnings == ()
    assert found["a"].path == path.resolve()
    config = found["a"].config
    assert config is not None
    assert config.name == "a"


def test_a_bad_model_hurts_nobody(tmp_path: Path) -> None:
    put(tmp_path, "good")
    put(tmp_path, "typo", SMALL.replace("max_batch_size", "max_batch"))
    put(tmp_path, "bytes", b"\xff\xfe")
    put(tmp_path, "empty", None, ())
    put(tmp_path, "huge", "#" * (CONFIG_BYTES + 1))
    put(tmp_path, "everything", DYNAMIC)
    put(tmp_path, "tensorrt", SMALL.replace("identity", "tensorrt"))
    found = scanned(tmp_path)
    assert [name for name, model in found.items() if not model.problems] == ["good"]
    assert found["typo"].problems == (
        'typo/config.pbtxt:3:1: max_batch: ModelConfig has no such field; did you mean "max_batch_size"?',
    )
    assert found["bytes"].problems == ("bytes/config.pbtxt:1:1: not UTF-8 text",)
    assert found["huge"].problems == (f"huge/config.pbtxt: {CONFIG_BYTES + 1} bytes, expected at most {CONFIG_BYTES}",)
    assert len(found["everything"].problems) > 5
    assert found["tensorrt"].problems == (
        'tensorrt/config.pbtxt:2:1: backend: found "tensorrt", which this server does not have; '
        "it has identity, onnxruntime, python",
    )
    assert len(found["empty"].problems) == 2


def test_the_directory_is_the_name(tmp_path: Path) -> None:
    put(tmp_path, "m", SMALL + 'name: "other"')
    assert only(tmp_path).problems == (
        'm/config.pbtxt:6:1: name: unexpected directory name "m" for model "other": the two must be equal',
    )


# ------------------------------------------------------------------------------------------------------- versions


def test_directories_that_are_no_versions(tmp_path: Path) -> None:
    names = ("1", "01", "007", "0", "-1", "+2", "1.0", "1_0", "\u0663", "latest", "9223372036854775808", "9" * 60)
    put(tmp_path, "m", versions=names)
    (tmp_path / "m" / "3").write_text("a file is no version")
    found = only(tmp_path)
    assert found.versions == (1,)
    assert len(found.warnings) == len(names) - 1
    text = "\n".join(found.warnings)
    assert "m/01: not a version directory, ignored: its name has leading zeros" in text
    assert "m/latest: not a version directory, ignored: its name is not an integer" in text
    assert "m/0: not a version directory, ignored: 0 means the default version" in text
    assert "m/9223372036854775808: not a version directory, ignored: above 9223372036854775807" in text


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        ("", (7,)),
        ("version_policy { latest { num_versions: 2 } }", (3, 7)),
        ("version_policy { latest { num_versions: 9 } }", (1, 2, 3, 7)),
        ("version_policy { all { } }", (1, 2, 3, 7)),
        ("version_policy { specific { versions: [ 3, 1, 3 ] } }", (1, 3)),
    ],
)
def test_version_policies(tmp_path: Path, policy: str, wanted: tuple[int, ...]) -> None:
    put(tmp_path, "m", SMALL + policy, ("1", "2", "3", "7"))
    assert only(tmp_path).versions == wanted
    given = parse(policy).version_policy
    if given is not None:
        assert select_versions(given, [7, 1, 3, 2]) == wanted


def test_a_listed_version_without_directory(tmp_path: Path) -> None:
    put(tmp_path, "m", SMALL + "version_policy { specific { versions: [ 1, 5 ] } }")
    found = only(tmp_path)
    assert found.versions == (1,)
    assert found.warnings == ("m: version 5 is in the version policy, but has no directory",)


@pytest.mark.parametrize(
    ("policy", "versions", "there"),
    [
        ("", (), "there is no version directory, such as 1"),
        ("", ("01", "x"), "there is no version directory, such as 1"),
        ("version_policy { specific { versions: 5 } }", ("1", "2"), "there are 1, 2"),
        ("version_policy { specific { } }", ("1",), "there are 1"),
    ],
)
def test_no_version_left(tmp_path: Path, policy: str, versions: tuple[str, ...], there: str) -> None:
    put(tmp_path, "m", SMALL + policy, versions)
    text = "m: at least one version must be available under the version policy of model 'm'; "
    assert only(tmp_path).problems == (text + there,)


# --------------------------------------------------------------------------------------------- without a config


@pytest.mark.parametrize(
    ("model", "file", "backend"),
    [("m", "model.onnx", "onnxruntime"), ("m", "model.py", "python"), ("m.python", "model.py", "python")],
)
def test_a_model_without_config(tmp_path: Path, model: str, file: str, backend: str) -> None:
    path = put(tmp_path, model, None, ("2", "3", "10"))
    (path / "3" / file).write_bytes(b"")
    (path / "10" / file).write_bytes(b"")
    config = only(tmp_path).config
    assert config is not None
    assert config.backend == backend
    assert config.default_model_filename == {"onnxruntime": "model.onnx", "python": "model.py"}[backend]


def test_a_backend_that_cannot_be_told(tmp_path: Path) -> None:
    put(tmp_path, "m", None)
    (problem,) = only(tmp_path).problems
    assert problem.startswith(
        "m (no config.pbtxt): backend: not given, and no file in the version directory determines it"
    )
    assert "identity, onnxruntime, python" in problem
    assert "model.onnx, model.py" in problem


def test_a_file_of_a_backend_that_is_not_here(tmp_path: Path) -> None:
    path = put(tmp_path, "m", None)
    (path / "1" / "model.plan").write_bytes(b"")
    (problem,) = only(tmp_path).problems
    assert 'found "tensorrt", which this server does not have' in problem


# ---------------------------------------------------------------------------------------------- names and places


@pytest.mark.parametrize("name", ["a,b", "simple (v2)", "user@host:8000", "-"])
def test_names_that_a_model_can_have(tmp_path: Path, name: str) -> None:
    put(tmp_path, name)
    assert only(tmp_path).name == name
    assert not only(tmp_path).problems
    assert find_model([tmp_path], name) == tmp_path / name


@pytest.mark.parametrize("name", [" a", "a ", "x" * 129, "\u00fcber", "new\nline", "\x1b[31m", "a\\b"])
def test_names_that_no_model_can_have(tmp_path: Path, name: str) -> None:
    put(tmp_path, name)
    put(tmp_path, "good")
    found = [model for model in scanned(tmp_path).values() if model.name != "good"]
    assert len(found) == 1
    assert "a model cannot have this name; expected 1 to 128 printable" in found[0].problems[0]


def test_a_name_that_is_not_text(tmp_path: Path) -> None:
    os.mkdir(os.fsencode(tmp_path) + b"/bad\xff")
    assert only(tmp_path).name == "bad\\xff"


def test_several_repositories(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    put(one, "a")
    put(one, "both")
    put(two, "both", SMALL.replace("identity", "python"))
    put(two, "b")
    found = scanned(one, two)
    assert list(found) == ["a", "b", "both"]
    assert [name for name, model in found.items() if model.problems] == ["both"]
    assert found["both"].problems == ("model appears in two or more repositories: 'both' is in 2 of them; keep one",)


def test_the_same_repository_twice_is_once(tmp_path: Path) -> None:
    put(tmp_path / "one", "a")
    (tmp_path / "link").symlink_to(tmp_path / "one")
    assert not scanned(tmp_path / "one", tmp_path / "one", tmp_path / "link")["a"].problems


def test_links_are_followed(tmp_path: Path) -> None:
    real = put(tmp_path / "elsewhere", "real")
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "m").symlink_to(real)
    (tmp_path / "repository" / "nowhere").symlink_to(tmp_path / "none")
    found = only(tmp_path / "repository")
    assert found.name == "m"
    assert found.versions == (1,)


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_repository_that_is_none(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "repository"
    if kind == "file":
        root.write_text("")
    with pytest.raises(InvalidRequest, match="check --model-repository"):
        scan([root], backends=BACKENDS)


def test_a_config_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(put(tmp_path, "fifo", None) / "config.pbtxt")
    (put(tmp_path, "directory", None) / "config.pbtxt").mkdir()
    (put(tmp_path, "loop", None) / "config.pbtxt").symlink_to("config.pbtxt")
    found = scanned(tmp_path)
    assert found["fifo"].problems == ("fifo/config.pbtxt: not a regular file",)
    assert found["directory"].problems == ("directory/config.pbtxt: not a regular file",)
    assert found["loop"].problems == ("loop: cannot be read: Too many levels of symbolic links",)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read(tmp_path: Path) -> None:
    path = put(tmp_path, "m")
    (path / "config.pbtxt").chmod(0)
    assert only(tmp_path).problems == ("m: cannot be read: Permission denied",)


def test_the_sample_repository() -> None:
    examples = ROOT / "repo" / "examples"
    found = scan([examples], backends=BACKENDS)
    assert {"add_sub", "mlp", "sentiment"} <= {model.name for model in found}
    for model in found:
        # A sample whose file is fetched at set-up has no version before that.
        assert not model.problems or "at least one version must be available" in model.problems[0], model
        assert not model.warnings

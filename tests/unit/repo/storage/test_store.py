"""Scans of repositories on disk: models, versions, configurations, and the names of models."""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest

from shmserve.errors import InvalidRequest, NotFound
from shmserve.repo.config.problems import CONFIG_BYTES
from shmserve.repo.load import parse
from shmserve.repo.storage.store import find_model, model_names, scan_model, select_versions
from tests.support.cases import cases
from tests.support.repo.texts import BACKENDS, DYNAMIC, ENSEMBLE, SMALL

PYTHON = SMALL.replace("identity", "python")
ONNX = 'backend: "onnxruntime"'
ALL_VERSIONS = "version_policy { all { } }"


def put(
    path: Path, config: str | bytes | None = SMALL, versions: tuple[str, ...] = ("1",), file: str | None = None
) -> Path:
    """A model. `file` is the name of an empty file in each version."""
    path.mkdir(parents=True)
    for version in versions:
        (path / version).mkdir()
        if file is not None:
            (path / version / file).touch()
    if config is not None:
        (path / "config.pbtxt").write_bytes(config.encode() if isinstance(config, str) else config)
    return path


def scanned(*roots: Path) -> dict[str, Any]:
    found = [scan_model(path, backends=BACKENDS) for (path,) in model_names(roots).values()]
    names = [model.name for model in found]
    assert names == sorted(set(names))
    for model in found:
        assert (model.config is None) is bool(model.problem_texts)
        for text in (*model.problem_texts, *model.warning_texts):
            assert str(roots[0].parent) not in text
            assert text.replace("\n", "").isprintable()
    return {model.name: model for model in found}


@cases(
    (("data.pkl",), None, ["m/1: 'model.pt' holds no program: save it with torch.jit.save"]),
    (("data.pkl", "constants.pkl"), None, ["input: not given.* `shmserve init NAME --from FILE`", "output: not"]),
    ((), None, ["m/1: 'model.pt' holds no program"]),
    (("constants.pk\u0142",), (6, 0x63), ["'model.pt' is not a file of PyTorch"]),
    (("constants.pk\u0142",), (46, 0xFF), ["'model.pt' is not a file of PyTorch"]),
    ids=["weights", "program", "empty", "damaged version", "damaged name"],
)
def test_files_of_pytorch_without_a_configuration(
    members: tuple[str, ...], damage: tuple[int, int] | None, texts: list[str], tmp_path: Path
) -> None:
    folder = put(tmp_path / "m", config=None, file="model.pt")
    path = folder / "1" / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for name in members:
            archive.writestr(f"net/{name}", b"")
    if damage is not None:
        data = bytearray(path.read_bytes())
        data[data.rindex(b"PK\1\2") + damage[0]] = damage[1]
        path.write_bytes(data)
    found = scan_model(folder).problem_texts
    assert len(found) == len(texts)
    assert all(re.search(text, reason) for text, reason in zip(texts, found, strict=True)), found


def only(*roots: Path) -> Any:
    (found,) = scanned(*roots).values()
    return found


def look(path: Path, config_name: str = "") -> Any:
    return scan_model(path, backends=BACKENDS, config_name=config_name)


def test_models_versions_and_other_files(tmp_path: Path) -> None:
    put(tmp_path / "b", versions=("1", "2", "10"))
    path = put(tmp_path / "a", versions=("1", "configs", "warmup", "initial_state", "__pycache__"))
    (path / "labels.txt").write_text("x")
    (tmp_path / ".git").mkdir()
    (tmp_path / "README.md").write_text("not a model")
    found = scanned(tmp_path)
    assert list(found) == ["a", "b"]
    assert found["a"].versions == (1,)
    assert found["b"].versions == (10,)
    assert found["a"].warning_texts == ()
    assert found["a"].path == path.resolve()
    assert found["a"].config.name == "a"


def test_a_broken_model_does_not_affect_others(tmp_path: Path) -> None:
    put(tmp_path / "good")
    put(tmp_path / "bytes", b"\xff\xfe")
    put(tmp_path / "empty", None, ())
    put(tmp_path / "huge", "#" * (CONFIG_BYTES + 1))
    put(tmp_path / "everything", DYNAMIC)
    os.mkfifo(put(tmp_path / "fifo", None) / "config.pbtxt")
    (put(tmp_path / "directory", None) / "config.pbtxt").mkdir()
    (put(tmp_path / "loop", None) / "config.pbtxt").symlink_to("config.pbtxt")
    texts = {name: model.problem_texts for name, model in scanned(tmp_path).items()}
    assert len(texts.pop("everything")) > 5
    assert len(texts.pop("empty")) == 2
    assert texts == {
        "good": (),
        "bytes": ("bytes/config.pbtxt:1:1: not UTF-8 text",),
        "huge": (f"huge/config.pbtxt: {CONFIG_BYTES + 1} bytes, expected at most {CONFIG_BYTES}",),
        "fifo": ("fifo/config.pbtxt: not a regular file",),
        "directory": ("directory/config.pbtxt: not a regular file",),
        "loop": ("loop: cannot be read: Too many levels of symbolic links",),
    }


def test_links_and_repeated_repositories_are_followed_once(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "m").symlink_to(put(tmp_path / "elsewhere" / "real"))
    (tmp_path / "one" / "nowhere").symlink_to(tmp_path / "none")
    (tmp_path / "link").symlink_to(tmp_path / "one")
    found = only(tmp_path / "one", tmp_path / "one", tmp_path / "link")
    assert (found.name, found.versions, found.problem_texts) == ("m", (1,), ())
    os.mkdir(os.fsencode(tmp_path) + b"/other\xff")
    os.mkdir(os.fsencode(tmp_path) + b"/other\xff/bad\xff")
    assert only(Path(os.fsdecode(os.fsencode(tmp_path) + b"/other\xff"))).name == "bad\\xff"


def test_a_repository_that_is_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("missing", "file"):
        with pytest.raises(InvalidRequest, match="check --model-repository"):
            model_names([tmp_path / name])


@pytest.mark.parametrize("text", [SMALL, ENSEMBLE])
def test_the_given_configuration_is_kept_beside_the_completed_one(tmp_path: Path, text: str) -> None:
    found = look(put(tmp_path / "m", text))
    assert found.written == parse(text)
    assert found.config.version_policy is not None
    assert (found.problem_texts, found.versions) == ((), (1,))
    assert found.places["input[0].dims"][0] == 4


def test_an_alternative_configuration_is_used_if_it_exists(tmp_path: Path) -> None:
    path = put(tmp_path / "m", versions=("1", "configs"))
    (path / "configs" / "a-b.c_1.pbtxt").write_text(SMALL.replace("8", "2"))
    (path / "configs" / "bad.pbtxt").write_text("backnd: 1")
    (path / "configs" / "folder.pbtxt").mkdir()
    for name, file, size in (("a-b.c_1", "configs/a-b.c_1", 2), ("", "config", 8), ("large", "config", 8)):
        found = look(path, name)
        assert (found.file, found.config and found.config.max_batch_size) == (f"{file}.pbtxt", size)
    assert look(path, "bad").problem_texts == (
        'm/configs/bad.pbtxt:1:1: backnd: ModelConfig has no such field; did you mean "backend"?',
    )
    assert look(path, "folder").problem_texts == ("m/configs/folder.pbtxt: not a regular file",)
    for name in ("../config", "a/b", ".", "..", " ", "x" * 129, "a\0b"):
        with pytest.raises(InvalidRequest, match="--model-config-name: found"):
            look(path, name)


def test_a_model_without_config_or_backend(tmp_path: Path) -> None:
    put(tmp_path / "m", None)
    put(tmp_path / "n", None, file="model.plan")
    (first,), (second,) = (model.problem_texts for model in scanned(tmp_path).values())
    assert first.startswith("m (no config.pbtxt): backend: not given, and no file in the version directory determines")
    assert second.startswith('n (no config.pbtxt): backend: found "tensorrt", which this server does not have; ')


def test_directories_that_are_not_versions(tmp_path: Path) -> None:
    names = ("1", "01", "007", "0", "-1", "+2", "1.0", "1_0", "\u0663", "latest", "9223372036854775808", "9" * 60)
    path = put(tmp_path / "m", versions=names)
    (path / "3").write_text("")
    found = only(tmp_path)
    assert found.versions == (1,)
    assert len(found.warning_texts) == len(names) - 1
    text = "\n".join(found.warning_texts)
    assert "m/01: not a version directory, ignored: its name has leading zeros" in text
    assert "m/latest: not a version directory, ignored: its name is not an integer" in text
    assert "m/0: not a version directory, ignored: 0 means the default version" in text
    assert "m/9223372036854775808: not a version directory, ignored: above 9223372036854775807" in text


@cases(
    ("", (7,)),
    ("version_policy { latest { num_versions: 2 } }", (3, 7)),
    ("version_policy { latest { num_versions: 9 } }", (1, 2, 3, 7)),
    (ALL_VERSIONS, (1, 2, 3, 7)),
    ("version_policy { specific { versions: [ 3, 1, 3, 5 ] } }", (1, 3)),
)
def test_version_policies(policy: str, expected: tuple[int, ...], tmp_path: Path) -> None:
    put(tmp_path / "m", SMALL + policy, ("1", "2", "3", "7"))
    assert only(tmp_path).versions == expected
    given = parse(policy).version_policy
    if given is not None:
        assert select_versions(given, [7, 1, 3, 2]) == expected


@cases(
    ("", (), "there is no version directory, such as 1"),
    ("", ("01", "x"), "there is no version directory, such as 1"),
    ("specific { versions: 5 }", ("1", "2"), "it selects 5, but the version directories are 1, 2"),
    ("specific { }", ("1",), "it selects none, but the version directories are 1"),
)
def test_no_version_available(policy: str, versions: tuple[str, ...], available: str, tmp_path: Path) -> None:
    put(tmp_path / "m", SMALL + (f"version_policy {{ {policy} }}" if policy else ""), versions)
    text = "m: at least one version must be available under the version policy of model 'm'; "
    assert only(tmp_path).problem_texts == (text + available,)


@cases(
    (PYTHON, "model.py", "file", ""),
    (PYTHON, "model.py", "directory", "'model.py' is a directory, expected a file"),
    (PYTHON, "model.py", "broken link", "'model.py' is a broken link"),
    (PYTHON, "model.py", "link", ""),
    (PYTHON + 'default_model_filename: "other.py"', "other.py", "file", ""),
    (PYTHON + 'default_model_filename: "other.py"', "model.py", "file", "has no file 'other.py'"),
    (ONNX, "model.onnx", "file", ""),
    (ONNX, "model.onnx", "directory", "'model.onnx' is a directory, but has no file 'model.onnx'"),
    (ONNX, "model.onnx", "with external data", ""),
    (SMALL, "x", "file", ""),
    (SMALL + 'default_model_filename: "weights"', "x", "file", "has no file 'weights'"),
)
def test_model_files(config: str, file: str, kind: str, missing: str, tmp_path: Path) -> None:
    path = put(tmp_path / "m", config)
    model_file = path / "1" / file
    if kind == "file":
        model_file.touch()
    elif kind in ("link", "broken link"):
        model_file.symlink_to(path / "real")
        if kind == "link":
            (path / "real").touch()
    else:
        model_file.mkdir()
        if kind == "with external data":
            (model_file / "model.onnx").touch()
            (model_file / "weights.bin").touch()
    found = look(path)
    assert found.versions == (() if missing else (1,)), found.problem_texts
    assert found.missing.get(1, "").startswith(missing)
    assert bool(found.missing) is bool(missing)


def test_invalid_names(tmp_path: Path) -> None:
    put(tmp_path / "good")
    for name in (" a", "a ", "x" * 129, "\u00fcber", "new\nline", "\x1b[31m", "a\\b"):
        put(tmp_path / name)
    found = [model.problem_texts for model in scanned(tmp_path).values() if model.name != "good"]
    assert len(found) == 7
    assert all("a model cannot have this name; expected 1 to 128 printable" in texts[0] for texts in found)


def test_names_of_models(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one / "b", one / "a", two / "a", two / "__pycache__", two / ".git", two / "no model"):
        path.mkdir(parents=True)
    (one / "README.md").write_text("")
    put(one / "bad", "not parsed")
    assert model_names([one, two, one]) == {
        "a": [one / "a", two / "a"],
        "b": [one / "b"],
        "bad": [one / "bad"],
        "no model": [two / "no model"],
    }


NO_NAME = "Model name cannot be empty. Please enter a valid name to deploy."
TRAVERSAL = "model name must not contain path traversal characters; found "
POLL = "failed to poll from model repository: "
INVALID_NAME = POLL + "a model cannot have this name"


@cases(
    ("", InvalidRequest, NO_NAME),
    (" \t", InvalidRequest, NO_NAME),
    ("../one/a", InvalidRequest, TRAVERSAL + "'../one/a'"),
    ("a/1", InvalidRequest, TRAVERSAL + "'a/1'"),
    ("..", InvalidRequest, TRAVERSAL + "'..'"),
    ("/etc", InvalidRequest, TRAVERSAL + "'/etc'"),
    (".hidden", NotFound, "failed to load '.hidden', " + INVALID_NAME),
    ("__pycache__", NotFound, "failed to load '__pycache__', " + INVALID_NAME),
    ("a\0", NotFound, "failed to load 'a\\x00', " + INVALID_NAME),
    ("file", NotFound, "failed to load 'file', failed to poll from model repository: no model repository has it"),
    ("a..b", NotFound, "failed to load 'a..b', failed to poll from model repository: no model repository has it"),
    ("resnt", NotFound, "failed to poll from model repository: no model repository has it; did you mean 'resnet'?"),
    ("both", InvalidRequest, POLL + "model appears in two or more repositories: 'both' is in 2 of them; keep one"),
)
def test_names_without_a_model(name: str, error: type[Exception], text: str, tmp_path: Path) -> None:
    for model in ("a", "both", "resnet", ".hidden", "__pycache__"):
        (tmp_path / "one" / model).mkdir(parents=True)
    (tmp_path / "two" / "both").mkdir(parents=True)
    (tmp_path / "one" / "file").write_text("")
    with pytest.raises(error) as caught:
        find_model([tmp_path / "one", tmp_path / "two"], name)
    assert text in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_and_versions_without_permission(tmp_path: Path) -> None:
    path = put(tmp_path / "m", PYTHON + ALL_VERSIONS, ("1", "2"), "model.py")
    (path / "1").chmod(0)
    found = look(path)
    (path / "1").chmod(0o700)
    assert (found.versions, found.missing) == ((2,), {1: "cannot be read: Permission denied"})
    (path / "config.pbtxt").chmod(0)
    assert only(tmp_path).problem_texts == ("m: cannot be read: Permission denied",)

"""The packages of extras, and the command that installs an extra, from a source directory and from elsewhere."""

from __future__ import annotations

import configparser
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shmserve import extras
from shmserve.extras import install_command
from tests import ROOT
from tests.support.cases import cases

CLIENT = {"msgspec", "numpy", "posix_ipc", "pyzmq"}


def names(text: str) -> set[str]:
    return {re.split(r"[<>=;\[ ]", line.strip())[0] for line in text.splitlines() if line.strip()}


def with_included(extra: str) -> tuple[set[str], set[str]]:
    """The packages of an extra, and the extras that it includes."""
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    text = setup["options.extras_require"][extra]
    packages, included = names(text) - {"shmserve"}, {extra}
    for found in re.findall(r"shmserve\[(.*?)\]", text):
        for name in found.split(","):
            more = with_included(name)
            packages |= more[0]
            included |= more[1]
    return packages, included


def test_without_extras_only_the_client_is_installed() -> None:
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    assert names(setup["options"]["install_requires"]) == CLIENT


def test_the_extras_of_commands_have_the_modules() -> None:
    packages = {extras.PACKAGES.get(module, module) for module in extras.MODULES}
    assert packages <= with_included("convert")[0]
    for extra in extras.EXTRAS.values():
        assert {"hdrhistogram", "uvloop"} <= with_included(extra)[0]
    assert set(extras.NEEDED) <= extras.MODULES


def test_engines_come_with_the_server() -> None:
    for extra in ("gpu", "torch", "openvino", "llm", "trees", "tensorflow", "tflite", "paddle", "dali", "vllm"):
        assert "runtime" in with_included(extra)[1], extra


def test_all_has_every_extra_that_can_be_combined() -> None:
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    assert with_included("all")[1] == set(setup["options.extras_require"]) - {"gpu", "vllm", "samples", "dev"}
    assert "onnxruntime" not in with_included("gpu")[0]  # the same module as onnxruntime-gpu


def test_a_missing_package() -> None:
    assert extras.missing("serve") is None
    assert extras.missing_text("no_such_module", "serve") is None
    assert extras.missing_text(None, "serve") is None
    text = "the package protobuf is not installed: "
    assert extras.missing_text("google.protobuf", "check") == text + install_command("server")
    assert extras.missing_text("google.protobuf", "bench") == text + install_command("bench")


WITHOUT = """
import sys

class Hiding:
    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in {missing!r}
        return None if hidden else self._finder.find_spec(name, path, target)

sys.meta_path[:] = map(Hiding, sys.meta_path)
from shmserve.clients.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@cases(
    (("serve", "model.onnx"), "protobuf", "server"),
    (("gateway",), "uvloop", "server"),
    (("check", "."), "protobuf", "server"),
    (("bench", "mlp"), "uvloop", "bench"),
)
def test_a_command_names_the_extra_that_it_needs(arguments: tuple[str, ...], package: str, extra: str) -> None:
    """Tested in the state after `pip install shmserve` alone."""
    code = WITHOUT.format(missing={*extras.MODULES, "argcomplete"})
    command = [sys.executable, "-c", code, *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    text = f"the package {package} is not installed: {install_command(extra)}"
    assert ended.stderr == f"shmserve {arguments[0]}: {text}\n"


def test_the_install_command_in_a_source_directory(tmp_path: Path) -> None:
    (tmp_path / "setup.cfg").touch()
    (tmp_path / "shmserve").mkdir()
    package = tmp_path / "shmserve"
    assert install_command("gpu", package, "/usr") == "pip install -e '.[gpu]' in the source directory"
    own = install_command("gpu", package, str(tmp_path / ".venv"))
    assert own == ".venv/bin/pip install -e '.[gpu]' in the source directory"


METADATA = """Metadata-Version: 2.4
Name: shmserve
Requires-Dist: numpy>=1.26
Provides-Extra: cli
Requires-Dist: rich>=13.7; extra == "cli"
Provides-Extra: runtime
Requires-Dist: shmserve[cli]; extra == "runtime"
Requires-Dist: jinja2>=3.1; extra == "runtime"
Requires-Dist: newer>=2; python_version < "3.1" and extra == "runtime"
"""
WHEEL = {"archive_info": {}, "url": "file:///src/dist/shmserve-0.1.0%2Bx-py3-none-any.whl"}


def installed(root: Path, origin: Mapping[str, Any] | None) -> Path:
    """The directory of a package that pip has installed from there."""
    metadata = root / "shmserve-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(METADATA)
    if origin is not None:
        (metadata / "direct_url.json").write_text(json.dumps(origin))
    return root / "shmserve"


@cases(
    (
        {"dir_info": {}, "url": "file:///src/shmserve"},
        "pip install '.[runtime]' in the source directory",
        "make install-systemd EXTRAS=runtime",
    ),
    (
        WHEEL,
        "pip install './shmserve-0.1.0+x-py3-none-any.whl[runtime]' in the directory of that file",
        "make install-systemd PACKAGE='shmserve-0.1.0+x-py3-none-any.whl[runtime]'",
    ),
    (
        {"vcs_info": {"vcs": "git", "commit_id": "1"}, "url": "https://host/shmserve.git"},
        "pip install 'shmserve[runtime] @ URL' with the URL that shmserve was installed from",
        "make install-systemd EXTRAS=runtime",
    ),
    (None, "pip install 'rich>=13.7' 'jinja2>=3.1'", "make install-systemd EXTRAS=runtime"),
)
def test_the_install_command_in_packages(
    origin: Mapping[str, Any] | None, command: str, service: str, tmp_path: Path
) -> None:
    package = installed(tmp_path, origin)
    assert install_command("runtime", package) == command
    (tmp_path / "prefix" / "share" / "doc" / "shmserve").mkdir(parents=True)
    found = install_command("runtime", package, str(tmp_path / "prefix"))
    assert found == f"{service} and the PREFIX of this installation, as root in the source directory"


def test_packages_of_an_extra_that_are_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "setup.cfg").write_text("[options.extras_require]\ns3 =\n    s3fs>=2024.6\n    some.thing>=2,<3\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "nowhere"), str(tmp_path)])
    assert extras.outdated("s3", root=tmp_path) == ""
    for version, fits in (("2024.6.1", True), ("2024.06", True), ("0.4.2", False), ("2024.5.0rc1", False)):
        info = tmp_path / f"s3fs-{version}.dist-info"
        info.mkdir()
        text = f"s3fs {version} is installed, and >=2024.6 is needed: {install_command('s3')}"
        assert extras.outdated("s3", root=tmp_path) == ("" if fits else text)
        assert extras.outdated("s3", ["some.thing"], root=tmp_path) == ""
        info.rmdir()
    (tmp_path / "some_thing-3.0.egg-info").mkdir()
    assert "some.thing 3.0 is installed, and >=2,<3 is needed" in extras.outdated("s3", root=tmp_path)
    package = installed(tmp_path / "site", None)
    (tmp_path / "jinja2-3.0.dist-info").mkdir()
    assert "jinja2 3.0 is installed, and >=3.1 is needed" in extras.outdated("runtime", root=package.parent)


def test_all_texts_use_the_install_command() -> None:
    """No text names an index package that is not published, and every named extra exists."""
    extras = set(re.findall(r"^(\w+) =$", (ROOT / "setup.cfg").read_text().split("[options.extras_require]")[1], re.M))
    for folder in ("shmserve", "workers", "repo", "clients"):
        for file in (ROOT / folder).rglob("*.py"):
            source = file.read_text()
            if file != ROOT / "shmserve" / "extras.py":
                assert "pip install 'shmserve[" not in source, file
            assert set(re.findall(r"install_command\(\"(\w+)\"", source)) <= extras


def test_pages_install_from_the_source_directory() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        assert "pip install 'shmserve[" not in page.read_text(), page

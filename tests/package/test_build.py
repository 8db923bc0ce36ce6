"""The output of `deploy.release.build` is complete and reproducible."""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from deploy.release.platform_wheel import SHIM
from shmserve.repo.files.elf import shared_library
from tests import ROOT
from tests.package import pythons
from tests.package.conftest import TOOLS, run

NOT_IN_SDIST = (".github/", ".gitignore", ".pre-commit-config.yaml", ".editorconfig")
LINKS = {"shmserve/workers", "shmserve/repo", "shmserve/clients"}
"""Links for tools in a checkout; `package_dir` in setup.cfg names the folders."""


def test_builds_are_reproducible(packages: Path, tmp_path: Path) -> None:
    """The second build is in another folder, with other file modes and times."""
    run("git", "clone", "--quiet", ROOT.as_uri(), tmp_path / "clone", cwd=tmp_path, umask=0o077)
    run(TOOLS, "-m", "deploy.release.build", tmp_path / "dist", cwd=tmp_path / "clone", umask=0o077)
    first, second = (
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (packages, tmp_path / "dist")
    )
    assert (len(first), first) == (4, second)


def test_sha256sums_match_the_files(packages: Path) -> None:
    lines = (line.split() for line in (packages / "SHA256SUMS").read_text().splitlines())
    files = {path.name: path for path in packages.iterdir() if path.name != "SHA256SUMS"}
    assert {name: digest for digest, name in lines} == {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()
    }


def test_a_build_into_a_folder_that_is_not_empty_is_refused(packages: Path) -> None:
    command = [str(TOOLS), "-m", "deploy.release.build", str(packages)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "is not empty" in done.stderr


def test_the_sdist_has_every_file(packages: Path) -> None:
    (sdist,) = packages.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    tracked = set(run("git", "ls-tree", "-r", "--name-only", "HEAD", cwd=ROOT).splitlines())
    assert {name for name in tracked - packed if not name.startswith(NOT_IN_SDIST)} == LINKS


def test_the_wheel_for_a_platform_has_the_shim_of_native_backends(packages: Path, wheel: Path) -> None:
    (other,) = packages.glob("*manylinux*.whl")
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(other) as compiled:
        assert set(compiled.namelist()) - set(archive.namelist()) == {SHIM}
        found = shared_library(compiled.read(SHIM), "shim.so")
    assert "TRITONBACKEND_ResponseSend" in found.defined
    assert {name for name in found.needed if not name.startswith(("libc.", "ld-"))} == set()


def test_the_metadata_of_the_wheel(packages: Path, wheel: Path) -> None:
    run(TOOLS, "-m", "twine", "check", "--strict", *packages.glob("shmserve-*"), cwd=packages)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        found = HeaderParser().parsestr(archive.read(name).decode())
    versions = [line.rpartition(" ")[2] for line in found.get_all("Classifier", []) if " :: 3." in line]
    assert tuple(versions) == pythons.VERSIONS
    assert found["Requires-Python"] == f">={pythons.VERSIONS[0]}"
    assert (found["License-Expression"], found["License-File"]) == ("Apache-2.0", "LICENSE")
    assert found["Description-Content-Type"] == "text/markdown"

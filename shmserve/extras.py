"""Maps packages that are missing or too old to the extra that installs them, and to the command for it.

Without extras, only the client is installed. Metadata is read without importlib.metadata: importing it takes as long as
a worker needs to start.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ENVIRONMENT = ".venv"
"""The environment that `make` creates in a source directory."""

EXTRAS: Mapping[str, str] = {
    "bench": "bench",
    "convert": "convert",
    "describe": "convert",
    "quantize": "convert",
    "tune": "bench",
}
"""Command -> the extra that it needs; `server` for commands that are not listed."""
MODULES = frozenset(
    (
        "google",
        "hdrh",
        "hpack",
        "httptools",
        "jinja2",
        "onnx",
        "onnxruntime",
        "onnxscript",
        "re2",
        "rich",
        "skl2onnx",
        "tf2onnx",
        "tomli",
        "uvloop",
    )
)
"""Top-level modules of these extras that commands import without checking for them."""
PACKAGES: Mapping[str, str] = {"google": "protobuf", "hdrh": "hdrhistogram", "re2": "google-re2"}
"""Module -> its package, if the names differ."""
NEEDED = ("google", "uvloop")
"""Modules that every server needs."""
GATEWAY = ("hpack", "httptools")
"""Modules that network endpoints need."""
_SERVICE_MARK = "share/doc/shmserve"
"""What `make install-systemd` leaves in the environment that it creates, and that environment by default."""
_SERVICE_PREFIX = "/opt/shmserve"
_DISTRIBUTION = re.compile(r"(.+?)-([^-]+)\.(?:dist|egg)-info")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*([^;\[]*)(?:;(.*))?")
_PYTHON = re.compile(r"""python_version (<|>=) ["'](\d+)\.(\d+)["']""")


def missing(command: str) -> str | None:
    """The text for the first module of NEEDED that is not installed, or is too old; None if there is none."""
    absent = next((missing_text(name, command) for name in NEEDED if find_spec(name) is None), None)
    return absent or outdated("runtime") or None


def missing_text(module: str | None, command: str) -> str | None:
    """The text for a module that a command cannot import; None if no extra contains it, which is an internal error."""
    name = (module or "").partition(".")[0]
    extra = EXTRAS.get(command, "server")
    package = PACKAGES.get(name, name)
    return f"the package {package} is not installed: {install_command(extra)}" if name in MODULES else None


def install_command(extra: str, package: Path | None = None, prefix: str = sys.prefix) -> str:
    """The command that installs an extra of this copy of the package, from where that came. It never leads to an index,
    where the name may belong to others. Callers may see it, so it contains no path of this machine. `package`: the
    directory of this module. `prefix`: that of the interpreter.
    """
    root = (package or Path(__file__).parent).resolve().parent
    if (root / "setup.cfg").is_file():
        pip = f"{ENVIRONMENT}/bin/pip" if Path(prefix).resolve() == root / ENVIRONMENT else "pip"
        return f"{pip} install -e '.[{extra}]' in the source directory"
    origin = _origin(root)
    address = urlsplit(origin.get("url", ""))
    is_file = "archive_info" in origin and address.scheme == "file"
    file = unquote(address.path).rpartition("/")[2]
    if (Path(prefix) / _SERVICE_MARK).is_dir():
        choice = f"PACKAGE='{file}[{extra}]'" if is_file else f"EXTRAS={extra}"
        place = "" if prefix == _SERVICE_PREFIX else " and the PREFIX of this installation"
        return f"make install-systemd {choice}{place}, as root in the source directory"
    if is_file:
        return f"pip install './{file}[{extra}]' in the directory of that file"
    if "dir_info" in origin:
        return f"pip install '.[{extra}]' in the source directory"
    if address.scheme:
        return f"pip install 'shmserve[{extra}] @ URL' with the URL that shmserve was installed from"
    packages = " ".join(f"'{name}{versions}'" for name, versions in _with_nested(extra, root))
    return f"pip install {packages}" if packages else f"install the extra '{extra}' as shmserve itself was installed"


def outdated(extra: str, only: Collection[str] = (), root: Path | None = None) -> str:
    """The text for the first package of an extra that is installed, but in a version that is too old or too new; "" if
    there is none. Packages of nested extras do not count. `only`: the names to look at, instead of all. `root`: the
    directory with this package.
    """
    wanted = dict(_required(extra, root or Path(__file__).parent.resolve().parent))
    versions = _installed({name for name in wanted if not only or name in only})
    for name, version in versions.items():
        if not _fits(version, wanted[name]):
            return f"{name} {version} is installed, and {wanted[name]} is needed: {install_command(extra)}"
    return ""


def _installed(names: Collection[str]) -> dict[str, str]:
    """The versions of those of these packages that are installed; the first on the path counts."""
    by_key = {_key(name): name for name in names}
    versions: dict[str, str] = {}
    for folder in sys.path if by_key else ():
        with suppress(OSError):
            for entry in os.listdir(folder or "."):
                match = _DISTRIBUTION.fullmatch(entry)
                if match is not None and (name := by_key.get(_key(match[1]))) is not None:
                    versions.setdefault(name, match[2])
    return versions


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _fits(version: str, wanted: str) -> bool:
    """Whether a version is in a range like >=1.2,<2. Other conditions count as met."""
    for bound in wanted.split(","):
        match = re.fullmatch(r"(>=|<)([\d.]+)", bound.strip())
        if match is not None and (_numbers(version) >= _numbers(match[2])) != (match[1] == ">="):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a release, without zeros at their end, as 2.0 equals 2."""
    release = re.match(r"v?(?:\d+!)?([\d.]*)", version)
    numbers = [int(part) for part in release[1].split(".") if part] if release is not None else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def _required(extra: str, root: Path) -> Iterator[tuple[str, str]]:
    """The packages of an extra, and their versions; for nested extras `shmserve[NAMES]`. From setup.cfg in a source
    directory, else from the metadata of the installed package."""
    for line in _lines(extra, root):
        nested = re.fullmatch(r"shmserve\[(.*)\].*", line)
        match = _REQUIREMENT.fullmatch(line)
        if nested is not None:
            yield from ((f"shmserve[{name.strip()}]", "") for name in nested[1].split(","))
        elif match is not None and all(
            (sys.version_info[:2] < (int(major), int(minor))) == (operator == "<")
            for operator, major, minor in _PYTHON.findall(match[3] or "")
        ):
            yield match[1], match[2].strip()


def _lines(extra: str, root: Path) -> list[str]:
    if (root / "setup.cfg").is_file():
        from configparser import ConfigParser

        setup = ConfigParser(interpolation=None)
        setup.read(root / "setup.cfg")
        return setup.get("options.extras_require", extra, fallback="").split("\n")
    mark = re.compile(rf"extra == [\"']{re.escape(extra)}[\"']")
    text = _metadata(root, "METADATA")
    lines = [line.removeprefix("Requires-Dist: ") for line in text.splitlines() if line.startswith("Requires-Dist: ")]
    return [line for line in lines if mark.search(line)]


def _with_nested(extra: str, root: Path) -> Iterator[tuple[str, str]]:
    for name, versions in _required(extra, root):
        if name.startswith("shmserve["):
            yield from _with_nested(name[len("shmserve[") : -1], root)
        else:
            yield name, versions


def _origin(root: Path) -> dict[str, Any]:
    """Where pip has installed this package from, as it recorded it; empty for an index."""
    with suppress(ValueError):
        document = json.loads(_metadata(root, "direct_url.json"))
        return document if isinstance(document, dict) else {}
    return {}


def _metadata(root: Path, name: str) -> str:
    """A file of the metadata beside this package; "" if there is none."""
    for folder in sorted(root.glob("shmserve-*.dist-info")):
        with suppress(OSError):
            return (folder / name).read_text()
    return ""

"""The build backend: makes the wheel with the standard library alone, so that pip needs no setuptools for it.

setuptools makes the sdist and editable installations, which only developers and packagers need.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import time
import zipfile
from collections.abc import Iterable, Iterator
from configparser import ConfigParser
from importlib import import_module
from pathlib import Path
from typing import Any

SETUPTOOLS = ("setuptools>=77",)
EARLIEST = 315_532_800
"""1980-01-01: a zip file can have no earlier time. The time of all files, unless SOURCE_DATE_EPOCH is set."""
Settings = dict[str, Any] | None


# ------------------------------------------------------------------------------------------ what pip calls


def get_requires_for_build_wheel(settings: Settings = None) -> list[str]:
    return []


def prepare_metadata_for_build_wheel(folder: str, settings: Settings = None) -> str:
    config = _config()
    name = f"{_stem(config)}.dist-info"
    for path, data in _dist_info(config):
        target = Path(folder, name, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return name


def build_wheel(folder: str, settings: Settings = None, metadata_folder: str | None = None) -> str:
    config = _config()
    stem = _stem(config)
    name = f"{stem}-py3-none-any.whl"
    members = [*_modules(config), *((f"{stem}.dist-info/{path}", data) for path, data in _dist_info(config))]
    moment = time.gmtime(max(int(os.environ.get("SOURCE_DATE_EPOCH", EARLIEST)), EARLIEST))[:6]
    write_wheel(Path(folder, name), ((zipfile.ZipInfo(path, moment), data) for path, data in members))
    return name


def get_requires_for_build_sdist(settings: Settings = None) -> list[str]:
    return list(SETUPTOOLS)


def build_sdist(folder: str, settings: Settings = None) -> str:
    return str(_setuptools().build_sdist(folder, settings))


def get_requires_for_build_editable(settings: Settings = None) -> list[str]:
    return list(SETUPTOOLS)


def build_editable(folder: str, settings: Settings = None, metadata_folder: str | None = None) -> str:
    return str(_setuptools().build_editable(folder, settings, metadata_folder))


def _setuptools() -> Any:
    return import_module("setuptools.build_meta")


# ------------------------------------------------------------------------------------------ the wheel


def write_wheel(path: Path, members: Iterable[tuple[zipfile.ZipInfo, bytes]]) -> None:
    """Writes a wheel of these files and their RECORD, which lies beside the file WHEEL."""
    rows = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for info, data in members:
            info.external_attr, info.compress_type = 0o100644 << 16, zipfile.ZIP_DEFLATED
            wheel.writestr(info, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append((info.filename, f"sha256={digest}", len(data)))
            if info.filename.endswith(".dist-info/WHEEL"):
                record = zipfile.ZipInfo(info.filename.replace("/WHEEL", "/RECORD"), info.date_time)
        record.external_attr, record.compress_type = 0o100664 << 16, zipfile.ZIP_DEFLATED
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*rows, (record.filename, "", "")])
        wheel.writestr(record, text.getvalue())


def _config() -> ConfigParser:
    config = ConfigParser(delimiters="=", interpolation=None)
    config.read("setup.cfg", "utf-8")
    return config


def _stem(config: ConfigParser) -> str:
    return f"{config['metadata']['name']}-{config['metadata']['version']}"


def _lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line]


def _modules(config: ConfigParser) -> Iterator[tuple[str, bytes]]:
    """The files of all packages: their modules, and the files of `options.package_data`."""
    options = config["options"]
    links = dict(line.split(" = ") for line in _lines(options["package_dir"]))
    found: dict[str, Path] = {}
    for package in _lines(options["packages"]):
        parent = max((name for name in links if f"{package}.".startswith(f"{name}.")), key=len)
        folder = Path((links[parent] + package.removeprefix(parent)).replace(".", "/"))
        patterns = ["*.py", *_lines(config["options.package_data"].get(package, ""))]
        for path in (path for pattern in patterns for path in folder.glob(pattern) if path.is_file()):
            found[f"{package.replace('.', '/')}/{path.relative_to(folder).as_posix()}"] = path
    for name, path in sorted(found.items()):
        yield name, path.read_bytes()


def _dist_info(config: ConfigParser) -> Iterator[tuple[str, bytes]]:
    license_file = config["metadata"]["license_files"]
    scripts = "\n".join(_lines(config["options.entry_points"]["console_scripts"]))
    yield "METADATA", _metadata(config).encode()
    yield "WHEEL", b"Wheel-Version: 1.0\nGenerator: shmserve\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    yield "entry_points.txt", f"[console_scripts]\n{scripts}\n".encode()
    yield f"licenses/{license_file}", Path(license_file).read_bytes()


def _metadata(config: ConfigParser) -> str:
    about, options = config["metadata"], config["options"]
    fields = [
        ("Metadata-Version", "2.4"),
        ("Name", about["name"]),
        ("Version", about["version"]),
        ("Summary", about["description"]),
        ("Author", about["author"]),
        ("License-Expression", about["license_expression"]),
        ("Keywords", ",".join(word.strip() for word in about["keywords"].split(","))),
        ("Platform", about["platforms"]),
        *(("Classifier", line) for line in _lines(about["classifiers"])),
        ("Requires-Python", options["python_requires"]),
        ("Description-Content-Type", about["long_description_content_type"]),
        ("License-File", about["license_files"]),
        *(("Requires-Dist", line) for line in _lines(options["install_requires"])),
    ]
    for extra, requirements in config["options.extras_require"].items():
        fields.append(("Provides-Extra", extra))
        for line in _lines(requirements):
            requirement, _, marker = (part.strip() for part in line.partition(";"))
            condition = f"({marker}) and " if marker else ""
            fields.append(("Requires-Dist", f'{requirement}; {condition}extra == "{extra}"'))
    description = Path(about["long_description"].removeprefix("file:").strip()).read_text("utf-8")
    return "".join(f"{name}: {value}\n" for name, value in fields) + f"\n{description}"

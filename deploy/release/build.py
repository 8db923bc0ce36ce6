"""`python -m deploy.release.build DIRECTORY`: the sdist and the wheels of HEAD, and the file SHA256SUMS.

Both depend only on the commit: they are built from `git archive`, with the commit's time and fixed modes, by the pinned
setuptools of requirements.txt. The wheel is built from the sdist, so a release cannot have a wheel that does not match
its sdist.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from deploy.release.platform_wheel import platform_wheel

ROOT = Path(__file__).resolve().parents[2]
SUMS = "SHA256SUMS"


def build(target: Path, root: Path = ROOT) -> list[Path]:
    """Writes the packages of HEAD to `target`. Returns the sdist, the wheel for all platforms and that for this one."""
    epoch = int(_output(root, "git", "log", "-1", "--format=%ct"))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=root, check=True, stdout=subprocess.PIPE).stdout
        source = _unpack(io.BytesIO(archive), place / "source")
        raw = _backend(source, place / "raw", "--sdist", epoch)
        target.mkdir(parents=True, exist_ok=True)
        sdist = target / raw.name
        sdist.write_bytes(normalized(raw, epoch))
        with sdist.open("rb") as file:
            (unpacked,) = _unpack(file, place / "unpacked").iterdir()
        built = _backend(unpacked, place / "wheel", "--wheel", epoch)
        wheel = target / built.name
        wheel.write_bytes(built.read_bytes())
    return [sdist, wheel, platform_wheel(wheel, target)]


def normalized(sdist: Path, epoch: int) -> bytes:
    """Sorts the members and sets the same time, owner and mode for all; setuptools keeps those on disk."""
    packed, compressed = io.BytesIO(), io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with gzip.GzipFile(fileobj=compressed, mode="wb", filename="", mtime=epoch) as file:
        file.write(packed.getvalue())
    return compressed.getvalue()


def write_sums(target: Path) -> None:
    """Writes SHA256SUMS in the format of `sha256sum --check`."""
    files = sorted(path for path in target.iterdir() if path.name != SUMS)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (target / SUMS).write_text("".join(lines))


def _unpack(file: io.BufferedIOBase, folder: Path) -> Path:
    """Extracts with the modes of umask 022, because a wheel gets the modes of the files that it is built from."""
    before = os.umask(0o022)
    try:
        with tarfile.open(fileobj=file, mode="r:*") as archive:
            for member in archive.getmembers():
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                archive.extract(member, folder, filter="data")
    finally:
        os.umask(before)
    return folder


def _backend(source: Path, target: Path, kind: str, epoch: int) -> Path:
    """Runs the build backend of this environment. Returns the only file that it wrote."""
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(epoch)}
    command = [sys.executable, "-m", "build", "--no-isolation", kind, "--outdir", str(target), str(source)]
    done = subprocess.run(
        command, env=environment, umask=0o022, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\npython -m build {kind} failed with status {done.returncode}")
    (file,) = target.iterdir()
    return file


def _output(folder: Path, *command: str) -> str:
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def main(arguments: list[str]) -> int:
    target = Path(arguments[0] if arguments else "dist")
    if target.is_dir() and any(target.iterdir()):
        print(f"{target} is not empty: remove it, so that it does not mix two builds", file=sys.stderr)
        return 1
    for path in build(target):
        print(path)
    write_sums(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

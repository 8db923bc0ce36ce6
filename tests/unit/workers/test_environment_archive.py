"""Archives of interpreters: their members are extracted, and nothing is written outside the target.

Each archive is built member by member, as an attacker would.
"""

from __future__ import annotations

import fcntl
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shmserve.errors import InvalidRequest, ServeError, Unavailable
from shmserve.workers.process import environment_archive
from tests.support.cases import cases


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname, found.mode = kind, link, mode
    return found


def archive(path: Path, *members: tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as file:
        for entry in members:
            info, data = entry if isinstance(entry, tuple) else (entry, b"")
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


def tree(root: Path) -> dict[str, str]:
    """Path -> content of a file, or target of a link."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[name] = path.read_text()
    return found


def python_of(root: Path) -> str:
    return str(root / "bin/python")


def test_all_kinds_of_members_are_unpacked(tmp_path: Path, cache: Path) -> None:
    made = archive(
        tmp_path / "env.tar.gz",
        member("./", tarfile.DIRTYPE),
        (member("./bin/python", mode=0o6755), b"program"),
        (member("lib/a.py"), b"text"),
        member("lib64", tarfile.SYMTYPE, "lib"),
        member("lib/b.py", tarfile.LNKTYPE, "lib/a.py"),
        member("lib/deep/c.py", tarfile.SYMTYPE, "../a.py"),
    )
    root = environment_archive.unpacked(made, cache, python_of)
    assert tree(root) == {
        "bin/python": "program",
        "lib/a.py": "text",
        "lib/b.py": "text",
        "lib/deep/c.py": "-> ../a.py",
        "lib64": "-> lib",
    }
    assert stat.S_IMODE((root / "bin/python").stat().st_mode) & 0o7111 == 0o111 & ~current_umask()
    assert stat.S_IMODE((cache).stat().st_mode) & 0o077 == 0


def current_umask() -> int:
    found = os.umask(0o022)
    os.umask(found)
    return found


def close_locks(cache: Path) -> None:
    """Closes locks, which otherwise stay open for the life of a worker process."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(str(cache)):
                os.close(int(name))


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "cache"
    close_locks(tmp_path / "cache")


@cases(
    ([member("../outside")], "'../outside' lies outside of it"),
    ([member("bin/../../outside")], "'../outside' lies outside of it"),
    ([member("/tmp/outside")], "'/tmp/outside' lies outside of it"),
    ([member("a", tarfile.SYMTYPE, "/etc")], "'a' is a link to what lies outside"),
    ([member("a/b", tarfile.SYMTYPE, "../../etc")], "'a/b' is a link to what lies outside"),
    ([member("a", tarfile.LNKTYPE, "/etc/passwd")], "'a' is a link to no file before it"),
    ([member("a", tarfile.LNKTYPE, "../outside")], "'a' is a link to no file before it"),
    ([member("a", tarfile.SYMTYPE, "b"), member("a/x")], "'a' is a link or a file, and has members"),
    (
        [member("b", tarfile.DIRTYPE), member("a", tarfile.SYMTYPE, "b"), member("a/x/y")],
        "'a' is a link or a file, and has members",
    ),
    ([member("a", tarfile.SYMTYPE, "."), member("a/../../outside")], "'../outside' lies outside of it"),
    ([member("a", tarfile.SYMTYPE, "b"), member("c", tarfile.LNKTYPE, "a")], "'c' is a link to no file before"),
    ([member("a", tarfile.FIFOTYPE)], "'a' is neither a file nor a directory nor a link"),
    ([member("a", tarfile.CHRTYPE)], "'a' is neither a file nor a directory nor a link"),
    ([member("a", tarfile.BLKTYPE)], "'a' is neither a file nor a directory nor a link"),
)
def test_members_outside_are_refused(members: list[tarfile.TarInfo], why: str, tmp_path: Path, cache: Path) -> None:
    made = archive(tmp_path / "env.tar.gz", *members)
    with pytest.raises(InvalidRequest, match="the archive of EXECUTION_ENV_PATH is rejected") as found:
        environment_archive.unpacked(made, cache, python_of)
    assert why in str(found.value)
    assert not (tmp_path / "outside").exists()
    assert tree(cache) == {path: "" for path in tree(cache) if path.endswith(".lock")}


def test_a_file_is_never_written_twice(tmp_path: Path) -> None:
    """Nor through a link that has replaced it."""
    (tmp_path / "root").mkdir()
    made = archive(tmp_path / "env.tar.gz", member("a", tarfile.SYMTYPE, "b"), (member("a"), b"x"))
    with pytest.raises(Unavailable, match="cannot be unpacked: File exists"):
        environment_archive.extract(made, tmp_path / "root")
    assert tree(tmp_path / "root") == {"a": "-> b"}


@pytest.mark.parametrize("limit", ["MEMBERS", "BYTES"])
def test_archives_over_the_limits_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(environment_archive, limit, 2)
    (tmp_path / "root").mkdir()
    made = archive(tmp_path / "env.tar.gz", *((member(str(number)), b"x") for number in range(3)))
    with pytest.raises(InvalidRequest, match=r"EXECUTION_ENV_PATH ha.* more than|holds more than"):
        environment_archive.extract(made, tmp_path / "root")


@pytest.mark.parametrize("data", [b"", b"no archive", b"\x1f\x8b" + bytes(50)])
def test_files_that_are_not_archives_are_refused(tmp_path: Path, data: bytes) -> None:
    made = tmp_path / "env.tar.gz"
    made.write_bytes(data)
    (tmp_path / "root").mkdir()
    with pytest.raises(ServeError, match="archive of EXECUTION_ENV_PATH cannot be"):
        environment_archive.extract(made, tmp_path / "root")


def test_an_archive_is_unpacked_again_only_if_it_has_changed(tmp_path: Path, cache: Path) -> None:
    made = archive(tmp_path / "env.tar.gz", (member("a"), b"one"))
    first = environment_archive.unpacked(made, cache, python_of)
    (first / "a").write_text("used")
    assert environment_archive.unpacked(made, cache, python_of) == first
    assert (first / "a").read_text() == "used"

    archive(tmp_path / "other", (member("a"), b"two")).rename(made)
    second = environment_archive.unpacked(made, cache, python_of)
    assert (second / "a").read_text() == "two"
    assert first.exists(), "somebody has it"
    close_locks(cache)

    archive(tmp_path / "other", (member("a"), b"three")).rename(made)
    environment_archive.unpacked(made, cache, python_of)
    assert not first.exists()
    assert not second.exists()


def test_an_incomplete_environment_is_unpacked_again(tmp_path: Path, cache: Path) -> None:
    made = archive(tmp_path / "env.tar.gz", (member("a"), b"all of it"))
    root = environment_archive.unpacked(made, cache, python_of)
    close_locks(cache)
    (root.parent / environment_archive.READY).unlink()
    (root / "a").write_text("half")
    assert (environment_archive.unpacked(made, cache, python_of) / "a").read_text() == "all of it"


def test_an_unpacked_environment_stays_locked_while_in_use(tmp_path: Path, cache: Path) -> None:
    root = environment_archive.unpacked(archive(tmp_path / "env.tar.gz", member("a")), cache, python_of)

    def is_free() -> bool:
        with root.parent.with_suffix(environment_archive.LOCK).open("r+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    assert not is_free()
    close_locks(cache)
    assert is_free()


def test_an_environment_in_use_is_not_waited_for(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker has seen that the environment is missing. Before it can unpack it, another worker has, and keeps its
    lock."""
    made = archive(tmp_path / "env.tar.gz", member("a"))
    real = fcntl.flock
    others: list[Path | None] = []

    def flock(descriptor: int, how: int) -> None:
        real(descriptor, how | fcntl.LOCK_NB)  # waiting here would never end
        if not others:
            others.append(None)
            others[0] = environment_archive.unpacked(made, cache, python_of)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert environment_archive.unpacked(made, cache, python_of) == others[0]


def test_a_cache_that_other_users_can_write_to_is_refused(tmp_path: Path, cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(Unavailable, match="where other users can write") as found:
        environment_archive.unpacked(archive(tmp_path / "env.tar.gz", member("a")), cache, python_of)
    assert str(tmp_path) not in str(found.value)


RELOCATE = b"#!/bin/sh\necho moved > $(dirname $0)/../moved\n"


@pytest.mark.parametrize("code", [0, 3])
def test_conda_unpack_runs_once(tmp_path: Path, cache: Path, code: int) -> None:
    program = RELOCATE + f"exit {code}\n".encode()
    made = archive(tmp_path / "env.tar.gz", (member(environment_archive.RELOCATE, mode=0o755), program))
    if code:
        with pytest.raises(InvalidRequest, match="its bin/conda-unpack ended with 3"):
            environment_archive.unpacked(made, cache, lambda root: "/bin/sh")
    else:
        root = environment_archive.unpacked(made, cache, lambda root: "/bin/sh")
        assert (root / "moved").read_text() == "moved\n"

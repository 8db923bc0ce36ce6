"""Named segments: access to them, and removal of those of dead processes."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import posix_ipc
import pytest

from shmserve.broker.segments import Segments
from shmserve.errors import Denied, InvalidRequest, NotFound, Unavailable
from shmserve.protocol.messages import Map
from shmserve.shm.extents import posix
from tests.support.leaks import count_descriptors, own_names

SIZE = 1 << 16
SHM = Path("/dev/shm")


def path(name: str | None) -> Path:
    assert name is not None
    return SHM / name[1:]


@pytest.fixture
def leftover() -> Iterator[list[Path]]:
    """Files that a test creates in /dev/shm by hand."""
    made: list[Path] = []
    yield made
    for one in made:
        one.unlink(missing_ok=True)


def test_names_are_random_and_contain_the_owner() -> None:
    extents = [posix.create(SIZE) for _ in range(3)]
    names = [extent.name or "" for extent in extents]
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    for name in names:
        assert re.fullmatch(rf"/shmserve-{os.getpid()}-{started}-\d+-[0-9a-f]{{32}}", name)
    assert len({name[-32:] for name in names}) == 3
    extents[0].unlink()
    assert not path(extents[0].name).exists()
    extents[0].memory[0] = 1
    path(extents[1].name).unlink()  # by another process
    for extent in extents:
        extent.close()
    assert not any(path(name).exists() for name in names)


def test_the_group_is_given_before_the_mode_whatever_the_umask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise another group could open the segment in between."""
    seen: list[tuple[str, int]] = []
    mask = os.umask(0o077)
    fchown, fchmod = os.fchown, os.fchmod

    def note_chown(fd: int, uid: int, gid: int) -> None:
        seen.append(("group", stat.S_IMODE(os.fstat(fd).st_mode)))
        fchown(fd, uid, gid)

    def note_chmod(fd: int, mode: int) -> None:
        seen.append(("mode", mode))
        fchmod(fd, mode)

    monkeypatch.setattr(os, "fchown", note_chown)
    monkeypatch.setattr(os, "fchmod", note_chmod)
    grouped = posix.create(SIZE, 0o640, os.getgid())
    os.umask(mask)
    found = path(grouped.name).stat()
    assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o640, os.getgid())
    grouped.close()
    assert seen == [("group", 0o600), ("mode", 0o640)]


def test_a_group_that_cannot_be_set_is_denied_and_leaves_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    before = own_names()
    monkeypatch.setattr(os, "fchown", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    with pytest.raises(Denied, match="group 5 with mode 660"):
        posix.create(SIZE, 0o660, 5)
    assert own_names() == before


@pytest.mark.parametrize("name", ["", "/", "..", "/..", "a/b", "/a/../b", "x" * 300, "a b", "a\0b", "ä", "//x", "a\n"])
def test_an_invalid_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="characters"):
        posix.attach(name, SIZE, False)


def test_an_unknown_name_is_not_found_and_a_link_not_followed(leftover: list[Path], tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such shared memory object") as caught:
        posix.attach("/shmserve-nobody", SIZE, False)
    assert "nobody" not in str(caught.value)
    (tmp_path / "file").write_bytes(bytes(SIZE))
    leftover.append(SHM / f"test-link-{os.getpid()}")
    leftover[0].symlink_to(tmp_path / "file")
    with pytest.raises(Unavailable, match="cannot open"):
        posix.attach(leftover[0].name, SIZE, False)


def test_access_that_is_not_permitted_is_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    extent = posix.create(SIZE)
    assert extent.name is not None
    before = count_descriptors()
    with pytest.raises(Denied, match=f"does not belong to user {os.getuid() + 1}"):
        posix.attach(extent.name, SIZE, False, uid=os.getuid() + 1)
    assert count_descriptors() == before
    part = posix.attach(extent.name[1:], 100, False, uid=os.getuid())
    assert len(part.memory) == 100, "a part of a segment may be mapped"
    part.close()
    real = posix_ipc.SharedMemory

    def readable(name: str, *, read_only: bool = False, **options: int) -> object:
        if not read_only:
            raise posix_ipc.PermissionsError("No permission")
        return real(name, read_only=True, **options)

    monkeypatch.setattr(posix_ipc, "SharedMemory", readable)
    with pytest.raises(Denied, match="permission denied"):
        posix.attach(extent.name, SIZE, True)
    other = posix.attach(extent.name, SIZE, False)
    assert other.pages.writable_alias() is None
    other.close()
    extent.close()


def test_a_forked_child_does_not_remove_the_name() -> None:
    code = """if True:
        import os
        from shmserve.shm.extents import posix
        extent = posix.create(4096)
        name = "/dev/shm" + extent.name
        child = os.fork()
        if not child:
            extent.close()
            os._exit(0)
        os.waitpid(child, 0)
        print(os.path.exists(name))
        extent.close()
        print(os.path.exists(name))
    """
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.split() == ["True", "False"]


OWN = os.getpid() << 32
"""Replaces the number of the pid namespace, so that servers beside these tests ignore the names."""


DEAD = 2**22 + 1
"""More than a pid can be."""


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix, "_namespace", lambda: OWN)


@pytest.fixture
def dead(leftover: list[Path], namespace: None) -> Path:
    """A name that a process that has ended left behind."""
    leftover.append(SHM / f"shmserve-{DEAD}-1-{OWN}-{'1' * 32}")
    leftover[0].touch()
    return leftover[0]


def test_the_sweep_removes_only_segments_of_dead_processes(dead: Path, leftover: list[Path]) -> None:
    mine = posix.create(SIZE)
    tail = "0" * 32
    mark = path(mine.name).name.split("-")
    strangers = [
        f"shmserve-{os.getpid()}",
        f"shmserve-{mark[1]}-{mark[2]}-{mark[3]}-{tail}x",
        f"test-shmserve-999999-1-{mark[3]}-{tail}",
        f"shmserve-{DEAD}-1-1-{tail}",  # name from another pid namespace
    ]
    recycled = SHM / f"shmserve-{mark[1]}-{int(mark[2]) + 1}-{mark[3]}-{tail}"
    leftover += [recycled, *(SHM / name for name in strangers)]
    for made in leftover:
        made.touch()
    assert posix.sweep(os.getpid()) == 1
    assert dead.exists()
    assert not recycled.exists(), "the pid lives, but it is another process"
    assert posix.sweep() == 1
    assert not dead.exists()
    assert path(mine.name).exists()
    assert all((SHM / name).exists() for name in strangers)
    assert posix.sweep() == 0
    mine.close()


def test_the_sweep_keeps_names_that_a_process_holds(dead: Path) -> None:
    """For example names that the broker holds for clients that have not opened them yet."""
    held = [posix.hold("/" + dead.name) for _ in range(2)]
    for descriptor in held:
        assert descriptor is not None
        assert posix.sweep() == 0
        assert dead.exists()
        os.close(descriptor)
    assert posix.sweep() == 1
    assert posix.hold("/" + dead.name) is None
    os.mkfifo(dead)  # opening it must not block
    descriptor = posix.hold("/" + dead.name)
    assert descriptor is not None
    os.close(descriptor)
    assert posix.sweep() == 1


def test_an_announced_name_is_kept_from_the_sweeps_of_all_servers_until_it_is_forgotten(dead: Path) -> None:
    """Also between the exit of the worker and the broker's notice of it."""
    segments = Segments()
    segments.add_named(Map(1, SIZE, f"/{dead.name}"), DEAD)
    assert posix.sweep() == 0
    segments.worker_ended(DEAD)
    assert dead.exists()
    segments.forget(1)
    assert not dead.exists()
    segments.close()


@pytest.mark.usefixtures("namespace")
def test_the_sweep_takes_names_of_a_child_when_it_has_ended(leftover: list[Path]) -> None:
    code = f"""if True:
        from shmserve.shm.extents import posix
        posix._namespace = lambda: {OWN}
        extent = posix.create(4096)
        print(extent.name, flush=True)
        input()
    """
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        name = path(child.stdout.readline().strip())
        leftover.append(name)
        assert posix.sweep() == 0
        assert name.exists()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended but is not reaped
        assert posix.sweep() == 1
        assert not name.exists()


@pytest.mark.usefixtures("namespace")
def test_the_sweep_keeps_names_of_a_process_that_proc_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    extent = posix.create(SIZE)
    monkeypatch.setattr(posix, "_start_time", Mock(side_effect=FileNotFoundError(2, "hidden")))
    assert posix.sweep() == 0
    assert path(extent.name).exists()
    extent.close()


def test_the_sweep_skips_names_that_it_may_not_remove(monkeypatch: pytest.MonkeyPatch, dead: Path) -> None:
    monkeypatch.setattr(posix_ipc, "unlink_shared_memory", Mock(side_effect=posix_ipc.PermissionsError))
    assert posix.sweep() == 0
    assert dead.exists()

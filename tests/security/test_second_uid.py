"""Other users of the machine, against a real server: they can connect only where access was granted, do only what their
roles allow, and cannot access tensors of others through descriptors and names that they can see."""

from __future__ import annotations

import ctypes
import fcntl
import grp
import mmap
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
from bench.lib import models
from bench.lib.raw_client import RawLane, RawSegment, Zmq
from shmserve.protocol import codec, messages
from shmserve.protocol.messages import Fail, Goodbye, Handle, Hello, Infer, Map, Reply, Tensor
from tests.security.users import ALICE, BOB, as_user, attempt, needs_root, some_group
from tests.support.launch import Launched, identity
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.process, needs_root, pytest.mark.xdist_group("second uid")]

LARGE = np.arange(65_536, dtype=np.float32)
PUNCH_HOLE = 0x02 | 0x01  # and keep the size
MADV_REMOVE = 9
GROUP = some_group() if os.geteuid() == 0 else ""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory that everybody may enter, so any restriction comes from the server."""
    folder = Path(tempfile.mkdtemp(prefix="shmserve-test-"))
    folder.chmod(0o755)
    identity(folder / "models", "m")
    yield folder
    shutil.rmtree(folder)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.fixture(scope="module")
def private(place: Path) -> Iterator[Launched]:
    """A server with default settings, and umask 0."""
    with umask(0):
        server = Launched(place / "models", place / "private")
    with server:
        with shmserve.Client(f"ipc://{server.zmq}") as client:  # its worker keeps a named segment from now on
            client.infer("m", {"x": LARGE[None]})
        yield server


@pytest.fixture(scope="module")
def shared(place: Path) -> Iterator[Launched]:
    options = ["--socket-group", GROUP, "--access", f"uid:{BOB}=operate", "--model-control-mode", "explicit"]
    with umask(0o077):
        server = Launched(place / "models", place / "shared", *options, "--load-model", "m")
    with server:
        with shmserve.Client(f"unix://{server.lane}") as client:  # other users cannot read the files that it imports
            client.infer("m", {"x": np.ones((1, 3), np.float32)})
        yield server


def member() -> list[int]:
    return [grp.getgrnam(GROUP).gr_gid]


def modes(server: Launched) -> list[str]:
    names = ("", "lane.sock", "broker.sock", "broker.lock", "generations")
    found = [(server.runtime_dir / name).stat() for name in names]
    return [f"{stat.S_IMODE(status.st_mode):o} {status.st_uid}:{status.st_gid}" for status in found]


def test_r15_modes_of_the_runtime_directory(private: Launched, shared: Launched) -> None:
    (gid,) = member()
    assert modes(private) == ["700 0:0", "600 0:0", "600 0:0", "600 0:0", "700 0:0"]
    assert modes(shared) == [f"750 0:{gid}", f"660 0:{gid}", "600 0:0", "600 0:0", "700 0:0"]


def test_r15_another_user_cannot_connect(private: Launched, shared: Launched) -> None:
    """Neither through the directory nor, if the directory's mode is changed, through the sockets. With a group, only
    its members can, and not to the ZeroMQ socket."""

    def connect(server: Launched, groups: list[int]) -> list[str]:
        tasks = partial(RawLane, server.lane), partial(_stream, server.zmq)
        return [answer.partition(":")[0] for answer in as_user(ALICE, lambda: attempt(*tasks), groups)]

    try:
        for mode in (0o755, 0o700):
            private.runtime_dir.chmod(mode)
            assert connect(private, []) == ["EACCES", "EACCES"]
    finally:
        private.runtime_dir.chmod(0o700)
    assert connect(shared, []) == ["EACCES", "EACCES"]
    assert connect(shared, member()) == ["done", "EACCES"]


def test_r15_the_runtime_directory_cannot_be_changed(shared: Launched) -> None:
    def try_it() -> list[str]:
        directory = shared.runtime_dir
        return attempt(
            lambda: os.unlink(shared.lane),
            lambda: os.rename(shared.lane, directory / "mine"),
            lambda: os.symlink("/tmp", directory / "x"),
            lambda: os.chmod(directory, 0o777),
            lambda: os.open(directory / "broker.lock", os.O_RDWR),
            lambda: os.listdir(directory / "generations"),
        )

    assert set(as_user(ALICE, try_it, member())) <= {"EACCES", "EPERM"}


def _stream(path: str) -> None:
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(path)


def told(task: Any) -> str:
    """The error code with which the task ended, or OK."""
    try:
        task()
    except shmserve.ServeError as error:
        return f"{error.code} {error.message}"
    return "OK"


def test_r8_group_members_can_only_infer_and_observe(shared: Launched) -> None:
    """An access rule adds roles for Bob; access itself comes from his group."""

    def use() -> list[Any]:
        with RawLane(shared.lane) as lane, shmserve.Client(f"unix://{shared.lane}") as client:
            y = client.infer("m", {"x": np.ones((1, 3), np.float32)})["y"]
            allowed = (client.models, partial(client.statistics, "m"), partial(client.config, "m"), client.ready)
            operations = (
                partial(client.load, "m"),
                partial(client.load, "m", config={"max_batch_size": 4}),
                partial(client.unload, "m"),
                partial(client.restart, "m"),
            )
            lane.hello("memfd")
            lane.send(Map(lane.owner << 32 | 1, 4096, "/somebody"))
            answer = lane.receive_kind(Goodbye, Fail)
            return [
                y.tolist(),
                [told(call) for call in allowed],
                [*[told(call) for call in operations], f"{answer.code} {answer.text}"],
            ]

    y, allowed, denied = as_user(ALICE, use, member())
    assert (y, allowed) == ([[1, 1, 1]], ["OK"] * 4)
    for answer in denied:
        assert answer.startswith("DENIED")
        assert "needs the role operate, but this connection has infer and observe" in answer
    assert "'register'" in denied[-1]

    def operate() -> list[str]:
        with shmserve.Client(f"unix://{shared.lane}") as client:
            return [told(call) for call in (partial(client.restart, "m"), partial(client.load, "m"), client.models)]

    assert as_user(BOB, operate, member()) == ["OK"] * 3
    assert as_user(BOB, lambda: attempt(lambda: RawLane(shared.lane))) == ["EACCES"]


class _KeepingLane(RawLane):
    """Keeps the descriptors of segments instead of mapping them."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.fds: dict[int, int] = {}

    def _note(self, message: Any, descriptors: list[int]) -> None:
        if isinstance(message, Map):
            self.fds[message.segment] = descriptors.pop(0)


def infer(number: int, data: Any, elements: int = LARGE.size, *outputs: messages.Wanted) -> Infer:
    return Infer(number, "m", 0, (Tensor("x", "FP32", (1, elements), data),), outputs or None)


class Holder:
    """A user with a large answer in shared memory, who has only the handles that every client gets."""

    def __init__(self, path: str) -> None:
        self.lane = _KeepingLane(path)
        self.fds = self.lane.fds
        self.lane.hello("memfd")
        self.input = RawSegment(self.lane, LARGE.nbytes)
        data = self.input.put(0, LARGE.tobytes())
        self.lane.send(infer(1, data))
        self.reply = self.lane.receive_kind(Reply, Fail)
        (self.handle,) = self.reply.outputs[0].data


def test_r4_r16_a_response_cannot_be_written_or_truncated(shared: Launched) -> None:
    """Attempts use the passed descriptor, the file reopened through /proc, and punching a hole."""

    def use() -> list[str]:
        holder = Holder(shared.lane)
        (fd,) = holder.fds.values()
        size = os.fstat(fd).st_size
        libc = ctypes.CDLL(None, use_errno=True)
        view = mmap.mmap(fd, size, prot=mmap.PROT_READ)

        def again() -> int:
            return os.open(f"/proc/self/fd/{fd}", os.O_RDWR)

        def hole() -> None:
            if libc.fallocate(fd, PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(4096)):
                raise OSError(ctypes.get_errno(), "fallocate")

        found = attempt(
            lambda: os.pwrite(fd, b"evil", 0),
            lambda: os.ftruncate(fd, 0),
            lambda: os.ftruncate(fd, 2 * size),
            lambda: mmap.mmap(fd, size, prot=mmap.PROT_WRITE | mmap.PROT_READ),
            lambda: hole(),
            lambda: view.madvise(MADV_REMOVE),
            lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
            lambda: os.pwrite(again(), b"evil", 0),
            lambda: os.truncate(f"/proc/self/fd/{fd}", 0),
            lambda: mmap.mmap(again(), size),
        )
        at = holder.handle
        right = view[at.offset : at.offset + at.size] == LARGE.tobytes()
        return [*found, str(right)]

    *errors, right = as_user(ALICE, use, member())
    assert set(errors) <= {"EPERM", "EACCES"}, errors
    assert right == "True"


def test_r4_users_share_no_memory(shared: Launched) -> None:
    """Two users get responses of the same model at the same time, each in its own segment, with its own handles.
    Neither can read, use, return or unmap what the other holds."""
    mine = Holder(shared.lane)
    secret = (mine.handle.segment, mine.handle.offset, mine.handle.size)

    def use() -> dict[str, Any]:
        os.close(mine.lane.fileno())  # the copy made by the fork
        for fd in mine.fds.values():
            os.close(fd)
        holder = Holder(shared.lane)
        lane, handle = holder.lane, Handle(*secret)
        said = []
        for message in (
            infer(2, (handle,)),
            infer(3, (Handle(secret[0], secret[1], 16),), 4),
            infer(4, bytes(16), 4, messages.Wanted("y", Handle(secret[0], 0, 16))),
            messages.Return((handle,)),
            messages.Unmap(secret[0]),
        ):
            lane.send(message)
            said.append(lane.receive_kind(Fail, Reply).code)
        return {"segments": list(holder.fds), "said": said}

    try:
        found = as_user(ALICE, use, member())
        assert isinstance(found, dict), found
        assert len(found["segments"]) == 1
        assert not set(found["segments"]) & set(mine.fds)
        assert found["said"] == ["INVALID_ARG"] * 5
        (fd,) = mine.fds.values()
        assert os.pread(fd, mine.handle.size, mine.handle.offset) == LARGE.tobytes()
    finally:
        mine.input.close()
        mine.lane.close()
        for fd in mine.fds.values():
            os.close(fd)


def test_r17_responses_contain_no_bytes_of_other_users(shared: Launched) -> None:
    """Two users take turns at one instance. All memory that a user can map contains only that user's bytes."""

    def use(pattern: int) -> list[int]:
        mine = np.full(LARGE.size, pattern, np.float32)
        found = set()
        with RawLane(shared.lane) as lane:
            lane.hello("memfd")
            segment = RawSegment(lane, mine.nbytes)
            for number in range(1, 4):
                data = segment.put(0, mine[: LARGE.size // number].tobytes())
                lane.send(infer(number, data, LARGE.size // number))
                lane.read(lane.receive_kind(Reply).outputs[0])
                for mapped in lane.maps.values():
                    found |= set(np.unique(np.frombuffer(mapped[:], np.float32)).tolist())
        return sorted(found)

    for round_ in range(3):
        for number, uid in enumerate((ALICE, BOB), 1):
            # Negative, because the memory of a user may still hold LARGE from an earlier test.
            pattern = -(10 * round_ + number)
            seen = as_user(uid, partial(use, pattern), member())
            assert pattern in seen
            others = {-(10 * earlier + (3 - number)) for earlier in range(3)}
            assert not others & set(seen), seen


def test_r4_server_processes_cannot_be_inspected(shared: Launched) -> None:
    processes = [shared.process.pid, *shared.workers()]
    opened = {pid: os.listdir(f"/proc/{pid}/fd") for pid in processes}

    def use() -> list[str]:
        found = []
        for pid, descriptors in opened.items():
            found += attempt(
                partial(os.listdir, f"/proc/{pid}/fd"),
                partial(os.open, f"/proc/{pid}/mem", os.O_RDONLY),
                partial(os.listdir, f"/proc/{pid}/map_files"),
                partial(os.kill, pid, 9),
            )
            for descriptor in descriptors:
                path = f"/proc/{pid}/fd/{descriptor}"
                found += attempt(partial(os.open, path, os.O_RDWR), partial(os.truncate, path, 0))
        return found

    found = as_user(ALICE, use, member())
    assert len(found) > 4 * len(processes)
    assert set(found) <= {"EACCES", "EPERM", "ENOENT"}, found


def test_r2_r4_only_the_server_can_open_named_segments(private: Launched) -> None:
    """Responses for ZeroMQ clients are in named segments, whose names everybody can list."""
    with Zmq(private.zmq) as client:
        client.send(Hello(1, os.getpid(), "raw", "posix"))
        client.receive_kind(messages.Welcome)
        client.send_bytes(codec.encode([infer(1, 0)]), (LARGE.tobytes(),))
        announced = client.receive_kind(Map)
        reply = client.receive_kind(Reply)
        assert isinstance(reply.outputs[0].data, tuple)
        path = f"/dev/shm{announced.name}"
        status = os.stat(path)
        assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o600, 0)
        assert len(announced.name.rpartition("-")[2]) == 32, "128 bits that nobody can guess"

        def use() -> list[str]:
            return attempt(
                lambda: os.open(path, os.O_RDONLY),
                lambda: os.open(path, os.O_RDWR),
                lambda: os.truncate(path, 0),
                lambda: os.unlink(path),
                lambda: os.rename(path, "/dev/shm/mine"),
                lambda: os.chmod(path, 0o777),
                lambda: os.link(path, "/dev/shm/mine"),
            )

        assert set(as_user(ALICE, use, member())) <= {"EACCES", "EPERM"}
        assert Path(path).read_bytes()[: LARGE.nbytes] == LARGE.tobytes()


PRINTS = """
import os
import sys


class TritonPythonModel:
    def execute(self, requests):
        print("the other user asked about plums", file=sys.stderr, flush=True)
        os.abort()
"""


def test_r25_model_output_is_shown_to_operators_only(shared: Launched, place: Path) -> None:
    model = models.Model("python", {"x": ("FP32", [-1])}, {"y": ("FP32", [-1])}, max_batch=1)
    models.write(place / "models", "prints", model, {"model.py": PRINTS})
    one = {"x": np.ones((1, 1), np.float32)}

    def look() -> list[Any]:
        with shmserve.Client(f"unix://{shared.lane}") as client:
            entry = next(entry for entry in client.models() if entry["name"] == "prints")
            rest = [client.statistics(), client.metrics(), client.metadata("prints"), client.config("prints")]
            (instance,) = entry["instances"]
            return [instance["last_words"], str(rest), told(lambda: client.infer("prints", one))]

    with shmserve.Client(f"unix://{shared.lane}") as client:
        client.load("prints")
        try:
            with pytest.raises(shmserve.ModelFailed):
                client.infer("prints", one, timeout=PATIENCE_S)
            assert "plums" in str(client.models())
            words, *texts = as_user(ALICE, look, member())
            assert words == []
            assert "plums" not in str(texts)
            assert "SIGABRT" in texts[-1]
            words, *_ = as_user(BOB, look, member())
            assert "the other user asked about plums" in words
        finally:
            client.unload("prints")

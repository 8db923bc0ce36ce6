"""A pytest plug-in: no test may leave anything behind. Leftovers are an error of that test.

It watches open descriptors, threads (including those that native libraries start), descendant processes, names in
/dev/shm that this process or a descendant owns, and mappings of shared memory. Nothing else on the machine counts, so
several test processes can run in parallel. It waits only for things that are already ending (joins a thread, polls the
pidfd of a process), never for time to pass.

For a test with the mark `process`, the states before its first function-scoped fixture and after the teardown of the
last one are compared; for other tests, which are many and fast, the states around all tests of their module; for a
class, module or session, the states around the fixtures of that scope. What a fixture of a wider scope creates while a
narrower node is being watched belongs to the wider one.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import select
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import pytest

from shmserve.system import procfs

SHM = Path("/dev/shm")
OWNER = re.compile(r"shmserve-(\d+)-(\d+)-")
"""Names of shmserve begin with the pid and the start time of their owner."""
MAPPING = re.compile(r"^(\w+)-\S+ \S+ \S+ \S+ (\d+) +(/(?:memfd:|dev/shm/).*)$", re.MULTILINE)
"""Start, inode and path of memory that may be shared, in /proc/self/maps."""
STANDARD = ("0", "1", "2")
"""pytest's capture redirects these descriptors repeatedly."""

ONCE = (
    # multiprocessing starts one resource tracker per process at the first use of a semaphore, and keeps it.
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    # A browser starts it at any time, not as its child; Chromium.close waits for its end.
    "chrome_crashpad_handler",
)
PREPARED = ("-m shmserve.workers.zygote", "-m shmserve.gateway.openai.renderer")
"""A server has the first of these processes from its first worker on, a gateway the second from its first chat with a
template on."""
BROWSER = " --headless"
"""A browser starts and ends processes at any time. Those that survive it are found as orphans."""
POOL = "event_engine"
"""gRPC starts these threads when all of them are busy, and ends them when they have been idle for long. They are no
leak themselves, but close a channel's descriptors after `close` has returned."""
BLAS_THREADS = "OPENBLAS_NUM_THREADS"
DRIVER = ("thread", "fd", "map")
"""What a driver of a GPU keeps in a process that has used it. It is not checked in tests with the mark `gpu`."""
WATCHED = ("process", "gpu")
"""The marks of tests that are checked one by one."""
PR_SET_CHILD_SUBREAPER = 36
PIDFD_THREAD = os.O_EXCL


class Thing(NamedTuple):
    """One resource. `key` is unique; resources of the same `kind` may replace each other; `text` is for the report."""

    sort: str
    key: tuple[Any, ...]
    kind: str
    text: str


Things = dict[tuple[Any, ...], Thing]


class Leaked(Exception):
    """Something was left behind."""


def _descriptors() -> Generator[Thing, None, None]:
    for name in os.listdir("/proc/self/fd"):
        if name in STANDARD:
            continue
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor that listed the folder
        yield Thing("fd", ("fd", name, target), re.sub(r"\[\d+\]", "", target), f"descriptor {name} -> {target}")


def _threads() -> Generator[Thing, None, None]:
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    for tid in os.listdir("/proc/self/task"):
        try:
            comm = Path(f"/proc/self/task/{tid}/comm").read_text().strip()
        except OSError:
            continue  # ended in the meantime
        name = names.get(int(tid))
        sort = "pool" if comm == POOL else "thread"
        yield Thing(sort, (sort, tid), name or comm, f"thread {name!r}" if name else f"native thread {comm!r}")


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _stat(pid: int) -> tuple[str, int, int] | None:
    """State, parent and start time of a process."""
    fields = procfs.stat_fields(pid)
    return (fields[0].decode(), int(fields[1]), int(fields[19])) if fields else None


def _processes() -> Generator[Thing, None, None]:
    """All descendants. Orphans among them also belong to this process, which is a subreaper.

    The descendants of a server that runs for several tests replace each other: it restarts its workers, and an engine
    has processes of its own."""
    if not _has_children():
        return
    seen: set[int] = set()
    todo = [(os.getpid(), 0)]
    while todo:
        parent, server = todo.pop()
        for pid in procfs.children(parent):
            if pid not in seen:
                seen.add(pid)
                if BROWSER not in procfs.command_line(pid):
                    todo.append((pid, server or pid))
                found = _stat(pid)
                if found:
                    _family.add((pid, found[2]))
                    yield from _process(pid, parent, server, *found)
        if not todo and parent != os.getpid():
            todo.append((os.getpid(), 0))  # processes that have lost their parent in the meantime


def _process(pid: int, parent: int, server: int, state: str, _: int, started: int) -> Generator[Thing, None, None]:
    command = procfs.command_line(pid)
    prepared = parent != os.getpid() and any(part in command for part in PREPARED)
    if not prepared and not any(part in command for part in ONCE):
        what = (
            f"zombie {pid}, never waited for by {parent}: {procfs.command_line(parent)}"
            if state == "Z"
            else f"process {pid}: {command}"
        )
        kind = f"descendant of {server}" if server else str(pid)
        yield Thing("process", ("process", pid, started), kind, what)


def _names() -> Generator[Thing, None, None]:
    """Segments of this process and its descendants. Other servers and test workers use the same folder."""
    for name in os.listdir(SHM) if SHM.is_dir() else ():
        owner = OWNER.match(name)
        if owner is None or not _is_ours(int(owner[1]), int(owner[2])):
            continue
        found = _stat(int(owner[1]))
        kind = f"child of {found[1]}" if found and found[1] != os.getpid() else name
        yield Thing("shm", ("shm", name), kind, f"shared memory {SHM / name}")


def count_descriptors() -> int:
    """Open descriptors of this process, for tests that compare before and after."""
    return len(os.listdir("/proc/self/fd"))


def own_names() -> list[str]:
    """The segments that this process owns, for tests that compare before and after."""
    return sorted(path.name for path in SHM.glob(f"shmserve-{os.getpid()}-*"))


_family: set[tuple[int, int]] = set()
"""Pid and start time of this process and of all descendants that were ever seen.

Orphans become children of this process, which waits for them only after it has listed them, so that only a process
whose parent has waited for it can be missed. A server checks the names of those itself, as does
`shmserve.testing.Server.stop`."""


def _is_ours(pid: int, started: int) -> bool:
    if (pid, started) in _family:
        return True
    found = _stat(pid)
    if found is None or found[2] != started:
        return False
    above = pid
    while above != os.getpid():
        found = _stat(above)
        if found is None or found[1] == 0:
            return False
        above = found[1]
    _family.add((pid, started))
    return True


def _mappings() -> Generator[Thing, None, None]:
    for start, inode, path in MAPPING.findall(Path("/proc/self/maps").read_text(errors="replace")):
        yield Thing("map", ("map", start, inode), path, f"mapping of {path} ({inode})")


SORTS: tuple[Callable[[], Generator[Thing, None, None]], ...] = (_threads, _processes, _descriptors, _names, _mappings)
"""Threads and processes first: one that ends while the others are listed closes what it holds before it vanishes. If
they came last, its descriptors would be listed, but not the thread that still has to close them."""


def snapshot() -> Things:
    return {thing.key: thing for sort in SORTS for thing in sort()}


def grown(before: Things, after: Things) -> list[Thing]:
    """New things. Those that replace vanished ones of their kind do not count: a fixture's client that reconnects has
    another socket, but not more sockets."""
    gone = Counter((thing.sort, thing.kind) for key, thing in before.items() if key not in after)
    new = []
    for key, thing in after.items():
        if key not in before and thing.sort != "pool":
            if gone[thing.sort, thing.kind] > 0:
                gone[thing.sort, thing.kind] -= 1
            else:
                new.append(thing)
    return new


_spawned: set[tuple[int, int]] = set()
"""The processes that this one started itself, as far as known: pid and start time, since pids are reused. All other
children are inherited orphans."""


def _note(pid: int) -> None:
    found = _stat(pid) if pid else None
    if found is not None:
        _spawned.add((pid, found[2]))
        _family.add((pid, found[2]))


def _note_spawns() -> None:
    def noting(function: Callable[..., int]) -> Callable[..., int]:
        def noted(*args: Any, **kwargs: Any) -> int:
            pid = function(*args, **kwargs)
            _note(pid)
            return pid

        return noted

    start: Callable[..., None] = subprocess.Popen.__init__

    def noted_start(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        _note(self.pid)

    subprocess.Popen.__init__ = noted_start  # type: ignore[method-assign]
    for name in ("fork", "posix_spawn", "posix_spawnp"):
        setattr(os, name, noting(getattr(os, name)))


def _reap_orphans() -> None:
    """Waits for ended orphans, whose parent this process now is."""
    for thing in list(_processes()):
        pid = thing.key[1]
        found = _stat(pid)
        if found and found[0] == "Z" and found[1] == os.getpid() and (pid, found[2]) not in _spawned:
            os.waitpid(pid, 0)


def _wait(things: list[Thing], seconds: float) -> set[tuple[Any, ...]]:
    """Waits until one of these threads and processes has ended. Returns those for which it is no use to wait again."""
    poll = select.poll()
    opened: dict[int, tuple[Any, ...]] = {}
    over: set[tuple[Any, ...]] = set()
    for thing in things:
        try:
            flags = PIDFD_THREAD if thing.sort == "thread" else 0
            descriptor = os.pidfd_open(int(thing.key[1]), flags)
        except ProcessLookupError:
            over.add(thing.key)  # ended in the meantime
        except OSError:  # a kernel before 6.9 has no pidfd for a thread
            for thread in threading.enumerate():
                if thread.native_id == int(thing.key[1]):
                    thread.join(seconds)
            over.add(thing.key)
        else:
            opened[descriptor] = thing.key
            poll.register(descriptor, select.POLLIN)
    if opened and not over:
        over.update(opened[descriptor] for descriptor, _ in poll.poll(seconds * 1000))
    for descriptor in opened:
        os.close(descriptor)
    return over


def _settled(before: Things, seconds: float) -> tuple[list[Thing], Things]:
    """The leftovers after everything that can still end has ended, and everything that exists then."""
    left, now = _look(before)
    if not left:
        return [], now
    gc.collect()
    left, now = _look(before)
    over: set[tuple[Any, ...]] = set()
    end = monotonic() + seconds
    while left and monotonic() < end:
        # A server's new process replaces another one, which may be the one that still ends.
        kinds = {thing.kind for thing in left if thing.sort == "process"}
        ending = [thing for thing in left if thing.sort == "thread"]
        ending += [thing for thing in now.values() if thing.sort == "process" and thing.kind in kinds]
        if any(map(_is_ending, ending)) or _are_closing(left, now):
            select.select((), (), (), 0.02)  # there is no event when a process has waited for its child, or gRPC closes
        else:
            ended = _wait([thing for thing in ending if thing.key not in over], end - monotonic())
            if not ended:
                break
            over |= ended
            _reap_orphans()
        left, now = _look(before)  # perhaps with threads and processes that those that ended have started
    return left, now


def _look(before: Things) -> tuple[list[Thing], Things]:
    now = snapshot()
    return grown(before, now), now


def _is_ending(thing: Thing) -> bool:
    """Whether it is a process that has ended, and for which its parent, a server, has not waited yet, or only since it
    was listed."""
    if thing.sort != "process":
        return False
    found = _stat(int(thing.key[1]))
    gone = found is None or found[2] != thing.key[2]
    return gone or (found is not None and found[0] == "Z" and found[1] != os.getpid())


def _are_closing(left: list[Thing], now: Things) -> bool:
    """Whether gRPC had threads when these were listed, which may still close a descriptor."""
    return any(thing.sort == "fd" for thing in left) and any(thing.sort == "pool" for thing in now.values())


KILL_S = 10.0


def _clear(left: list[Thing]) -> None:
    """Reports and removes leaked processes and names, so that they affect neither the machine nor the next test."""
    for thing in left:
        if thing.sort == "process":
            try:
                os.kill(thing.key[1], signal.SIGKILL)
            except ProcessLookupError:
                continue
        elif thing.sort == "shm":
            (SHM / thing.key[1]).unlink(missing_ok=True)
    for thing in left:
        if thing.sort == "process":
            _wait([thing], KILL_S)
    _reap_orphans()


class Watch:
    """The state before each watched node: the session, a module, a class, a test."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.before: dict[Any, Things] = {}
        self.last: Things | None = None
        """The state when last listed, valid while nothing has run since: after a test, before the next one."""

    def begin(self, node: Any) -> None:
        if isinstance(node, pytest.Item) and not any(map(node.get_closest_marker, WATCHED)):
            node = node.getparent(pytest.Module) or node
        if node in self.before:
            return
        self.before[node] = dict(self.last or snapshot())
        node.addfinalizer(lambda: self.end(node))  # the first one added is the last to run

    def end(self, node: Any) -> None:
        if node.get_closest_marker("gpu"):
            self._keep(DRIVER)
        left, self.last = _settled(self.before.pop(node), self.seconds)
        if not left:
            return
        _clear(left)
        self.last = snapshot()
        for before in self.before.values():
            before.update(self.last)  # report it once
        raise Leaked(f"{node.nodeid or 'the session'} left behind:\n" + "\n".join(f"  {thing.text}" for thing in left))

    def _keep(self, sorts: tuple[str, ...]) -> None:
        """Attributes everything of these sorts to the time before."""
        found = {key: thing for key, thing in snapshot().items() if thing.sort in sorts}
        for known in self.before.values():
            known.update(found)

    def belongs_to_wider(self, node: Any, before: Things) -> None:
        """Attributes what a fixture of `node` has created to `node`, not to narrower nodes."""
        chain = node.listchain()
        now = snapshot()
        created = {key: thing for key, thing in now.items() if key not in before}
        narrower = [known for watched, known in self.before.items() if watched not in chain]
        for known in narrower:
            known.update(created)
        self.last = None if narrower else now


_watch = pytest.StashKey[Watch]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("leaks_wait", "seconds that threads and processes get to end after a test", default="60")


def pytest_configure(config: pytest.Config) -> None:
    # A BLAS with several threads ends them at each fork and starts others in a later test, which would seem to leak
    # them. Libraries read this when a test file imports them.
    os.environ[BLAS_THREADS] = "1"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    _note_spawns()
    config.stash[_watch] = Watch(float(config.getini("leaks_wait")))


def pytest_collection_finish() -> None:
    del os.environ[BLAS_THREADS]  # servers that tests start do not inherit it


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    watch = request.config.stash[_watch]
    watch.begin(request.node)
    before = snapshot() if fixturedef.scope != "function" else None
    watch.last = None
    try:
        return (yield)
    finally:
        if before is not None:
            watch.belongs_to_wider(request.node, before)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    watch = item.config.stash[_watch]
    watch.begin(item)
    watch.last = None
    return (yield)

"""The zygote: a process that has imported what every worker needs, and forks workers: `python -m
shmserve.workers.zygote FD`.

Invariant: it runs no model code and has one thread and only its own descriptors, so a fork of it is equivalent to a
fresh process. Engines are not imported here, because they may start threads or open devices.

A worker is forked twice and the intermediate process exits, so that the worker is reparented to the broker: the broker
gets its exit status, and PDEATHSIG follows the broker.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import select
import socket
import sys
from collections.abc import Callable
from typing import NoReturn

from shmserve.protocol.descriptors import ANCILLARY_BYTES, received
from shmserve.workers import main as worker
from shmserve.workers.process.exit_codes import Exit

MODULES = (
    "numpy",
    "shmserve.shm.mapped",
    "shmserve.workers.backends.identity",
    "shmserve.workers.backends.python.backend",
    "shmserve.workers.loop",
    "shmserve.workers.loading",
    "shmserve.workers.outbox",
)
NAME = "shmserve-ready"
"""The name of this process in the process table."""
REQUEST_BYTES = 64 * 1024
_THREADS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)

SetThreads = Callable[[int], object]


class CannotFork(Exception):
    """Why this process cannot fork workers."""


def main() -> NoReturn:
    control = socket.socket(fileno=int(sys.argv[1]))
    broker = os.getppid()
    worker.prepare(NAME)
    if os.getppid() != broker:
        os._exit(Exit.LINK_LOST)
    _set_command_line([sys.executable, "-m", "shmserve.workers.zygote"])
    try:
        set_threads = _import()
    except CannotFork as reason:
        control.send(f"cannot {reason}".encode())
        os._exit(Exit.STOPPED)
    control.send(b"ready")
    gc.collect()
    gc.freeze()
    while True:
        request, ancillary, _, _ = control.recvmsg(REQUEST_BYTES, ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        if not request:
            os._exit(Exit.STOPPED)
        link, output = descriptors = received(ancillary)
        words = ["--link", str(link), *request.decode().split("\0")]
        arguments = worker.parser.parse_args(words)  # not in each worker, which would copy the memory that it changes
        if _fork(control, broker):
            break
        for descriptor in descriptors:
            os.close(descriptor)
    _become_worker(words, link, output)
    # Call from here, not deeper: only the last lines of a worker's traceback are kept, so each frame counts.
    worker.run(words, arguments, lambda: set_threads(_threads()))


def _import() -> SetThreads:
    """Imports what workers need, with one thread for numpy. Returns the function that sets numpy's thread count, whose
    threads start with the first call that needs them."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        for name in MODULES:
            importlib.import_module(name)
        linked = importlib.import_module("numpy.linalg._umath_linalg")
    except ImportError as error:  # a worker that needs the module reports it in detail
        raise CannotFork(f"{error}") from None
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    if len(os.listdir("/proc/self/task")) > 1:
        raise CannotFork("an imported module has started a thread")
    return _setter(str(linked.__file__))


def _setter(path: str) -> SetThreads:
    """Returns the function of the OpenBLAS that the extension module `path` of numpy is linked with. No environment
    variable can replace it: OpenBLAS reads its variables once, when numpy is imported, but each worker has its own
    thread count."""
    library = ctypes.CDLL(path)
    # dlsym also searches the libraries that a library depends on
    setter = next((getattr(library, name) for name in _SETTERS if hasattr(library, name)), None)
    if setter is None:
        raise CannotFork("numpy is not linked with an OpenBLAS whose number of threads can be set")
    stop = getattr(library, "blas_thread_shutdown_", None)

    def set_threads(count: int) -> None:
        setter(count)
        # The setter has started the threads, which poll for 2^26 cycles before they sleep. OpenBLAS starts them again
        # when it needs them, as after a fork.
        if stop is not None:
            stop()

    return set_threads


def _fork(control: socket.socket, broker: int) -> bool:
    """Returns True in the worker. Sends the broker the worker's pid and pidfd, or the reason why the fork failed."""
    try:
        between = os.fork()
    except OSError as error:
        control.send(f"failed {error.strerror}".encode())
        return False
    if between:
        os.waitpid(between, 0)
        return False
    done = False
    try:
        _run_intermediate(control, broker)
        done = True
    finally:
        if not done:
            os._exit(Exit.INTERNAL)
    return True


def _run_intermediate(control: socket.socket, broker: int) -> None:
    """Runs in the intermediate process, which exits, and then in the worker, where it returns."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    between = os.pidfd_open(os.getpid())
    try:
        pid = os.fork()
    except OSError as error:
        control.send(f"failed {error.strerror}".encode())
        os._exit(Exit.STOPPED)
    if pid:
        child = os.pidfd_open(pid)
        socket.send_fds(control, [str(pid).encode()], [child])
        os.write(write_end, b"x")
        os._exit(Exit.STOPPED)
    os.close(write_end)
    control.close()
    known = os.read(read_end, 1)
    os.close(read_end)
    select.select([between], [], [])  # after its exit this process has its new parent
    os.close(between)
    if not known or os.getppid() != broker:
        os._exit(Exit.LINK_LOST)


def _become_worker(words: list[str], link: int, output: int) -> None:
    """Sets the process up as if it had been started with these arguments and this output."""
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.set_inheritable(link, True)
    sys.argv = ["shmserve.workers.main", *words]
    _set_command_line([sys.executable, "-m", *sys.argv])
    random = sys.modules.get("numpy.random")
    if random is not None:  # older versions seed their global state at import, so all workers would share it
        random.seed()


def _threads() -> int:
    """Returns the number of threads that the library would use if it were loaded now."""
    for name in _THREADS[:3]:
        text = os.environ.get(name, "").partition(",")[0].strip()
        if text.isdecimal() and int(text) > 0:
            return int(text)
    return len(os.sched_getaffinity(0))


def _set_command_line(command: list[str]) -> None:
    """Overwrites the command line in the process table.

    Without this, `ps -f` and `systemctl status` would show the same command for the zygote and all workers. PR_SET_NAME
    sets only the short name of 15 bytes, which truncates long instance names. PR_SET_MM needs a privilege, or thirteen
    addresses and a kernel option.
    """
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if 0 < start < end:
        text = "\0".join(command).encode()[: end - start - 1]
        ctypes.memmove(start, text + bytes(end - start - len(text)), end - start)


if __name__ == "__main__":
    main()

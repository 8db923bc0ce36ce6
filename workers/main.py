"""The worker process: `python -m shmserve.workers.main --link FD [--cpus 0,1] [--threads 2] [--name x] ...`.

Invariant: the process ends only on Stop, when the link to the broker is lost, or on a fault, and its exit code says
which.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from shmserve.errors import ConnectionLost, ProtocolError
from shmserve.protocol.worker_messages import Load, Loaded, LoadFailed
from shmserve.system.huge_pages import use_huge_pages
from shmserve.system.process import MODEL_HEAP_BYTES, NAME, NO_NEW_PRIVS, PDEATHSIG, keep_freed_memory, prctl
from shmserve.workers.link import BrokerLink
from shmserve.workers.process.exit_codes import Exit, exit_process
from shmserve.workers.process.load_priority import LoadPriority
from shmserve.workers.process.log import TRACE_LIMIT, log_message, log_traceback, trace_of

if TYPE_CHECKING:
    from shmserve.workers.loading import LoadedModel
    from shmserve.workers.outbox import Outbox

_GC_THRESHOLDS = (50_000, 20, 50)
"""The loop's own objects are freed by reference counting. The collector is needed only for reference cycles of models,
so it can run rarely."""

HUGE_BYTES = 256 << 20
"""Moving this much to huge pages delays the start of a model by up to half a second."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def main(
    words: list[str], arguments: argparse.Namespace | None = None, threads: Callable[[], object] | None = None
) -> Exit:
    """`arguments`: the parsed `words`. `threads` applies the thread limit to libraries that are already imported."""
    arguments = arguments or parser.parse_args(words)
    parent = os.getppid()
    prepare(arguments.name)
    if os.getppid() != parent:
        return Exit.LINK_LOST  # the broker died before PDEATHSIG was set
    priority = LoadPriority(arguments.load_nice, arguments.normal_nice)
    priority.lower()
    try:
        if arguments.group:
            _join_control_group(arguments.group)
        if arguments.variable:
            name, _, value = arguments.variable.partition("=")
            os.environ[name] = value
        # Before heavy imports: libraries size their thread pools by the affinity.
        if arguments.cpus:
            os.sched_setaffinity(0, {int(cpu) for cpu in arguments.cpus.split(",")})
        if arguments.threads > 0:
            _limit_threads(arguments.threads)
        if threads is not None:
            threads()
        sock = socket.socket(fileno=arguments.link)
    except (OSError, ValueError) as error:
        log_message(f"cannot start on cores '{arguments.cpus}' and link {arguments.link}: {error}")
        return Exit.USAGE
    link = BrokerLink(sock, arguments.busy_poll_ns)
    try:
        if arguments.environment:
            return _replace_interpreter(link, arguments, [*words, f"--normal-nice={priority.normal}"])
        return _serve(link, priority)
    except ConnectionLost as error:
        log_message(str(error))
        return Exit.LINK_LOST
    except ProtocolError as error:
        log_message(f"the broker broke the protocol: {error}")
        return Exit.BAD_ORDER
    except Exception as error:
        log_traceback("a fault in the worker", error)
        return Exit.INTERNAL
    finally:
        link.close()


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shmserve.workers.main", allow_abbrev=False)
    parser.add_argument("--link", type=int, required=True, help="descriptor of the link to the broker")
    parser.add_argument("--cpus", default="", help="the cores this worker may use, like 0,1")
    parser.add_argument("--threads", type=int, default=0, help="maximum threads of an engine; 0: it decides")
    parser.add_argument("--name", default="", help="the instance's name, for the process table")
    parser.add_argument("--group", default="", help="file of the control group to enter")
    parser.add_argument("--variable", default="", help="NAME=VALUE, for the environment of this process")
    parser.add_argument("--environment", default="", help="folder of the model's own Python interpreter")
    parser.add_argument("--unpacked", default="", help="folder into which archives of interpreters are unpacked")
    parser.add_argument("--busy-poll-ns", type=int, default=0, help="longest time to poll for orders before sleeping")
    parser.add_argument("--load-nice", type=int, default=0, help="how much to lower the priority while loading")
    parser.add_argument("--normal-nice", type=int, help="the nice value after loading; default: the present one")
    return parser


parser = _make_parser()


def run(
    words: list[str] | None = None,
    arguments: argparse.Namespace | None = None,
    threads: Callable[[], object] | None = None,
) -> NoReturn:
    exit_process(main(sys.argv[1:] if words is None else words, arguments, threads))


def _join_control_group(processes: str) -> None:
    descriptor = os.open(processes, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, b"0")
    finally:
        os.close(descriptor)


def _replace_interpreter(link: BrokerLink, arguments: argparse.Namespace, words: list[str]) -> Exit:
    """Replaces the interpreter of this process. Returns only if that fails."""
    from shmserve.workers.process.environment import replace_interpreter

    at = words.index("--environment")
    try:
        replace_interpreter(
            arguments.environment, arguments.unpacked, "shmserve.workers.main:run", words[:at] + words[at + 2 :]
        )
    except Exception as error:
        from shmserve.workers.outbox import Outbox

        orders, descriptors = _first_order(link)
        for descriptor in descriptors:
            os.close(descriptor)
        return _report_load_failure(orders[0], error, Outbox(link))


def prepare(name: str) -> None:
    """Ties the process to the broker: dies with it, leaves SIGINT and SIGTERM to it, prints to stderr only."""
    faulthandler.enable()
    prctl(PDEATHSIG, signal.SIGKILL)
    prctl(NO_NEW_PRIVS, 1)
    if name:
        prctl(NAME, name.encode()[:15])
    # Empty handlers, not SIG_IGN, which processes started by a model would inherit.
    signal.signal(signal.SIGINT, _ignore_signal)
    signal.signal(signal.SIGTERM, _ignore_signal)
    # Those that it forks must end at SIGTERM, by which a multiprocessing.Pool ends its processes.
    os.register_at_fork(after_in_child=_obey_sigterm)
    os.dup2(2, 1)


def _obey_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _limit_threads(threads: int) -> None:
    """Sets the variables that engines read. Values set by the operator take precedence."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if first.isdecimal() and int(first) > 0:
        threads = int(first)
    os.environ["SHMSERVE_THREADS"] = str(threads)
    for name in _THREAD_VARIABLES:
        if not os.environ.get(name):
            os.environ[name] = str(threads)


def _ignore_signal(number: int, frame: Any) -> None:
    """Ctrl-C in a terminal and a service manager's stop signal the whole group; the broker stops its
    workers in order."""


def _first_order(link: BrokerLink) -> tuple[list[Any], list[int]]:
    """Returns Load with the orders in its packet, and the descriptors; the first one holds the configuration."""
    orders, descriptors = link.receive()
    order = orders[0] if orders else None
    if not isinstance(order, Load) or not descriptors:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ProtocolError(f"the first order must be Load with the configuration, found {type(order).__name__}")
    return orders, descriptors


def _report_load_failure(order: Load, error: Exception, outbox: Outbox) -> Exit:
    from shmserve.workers.loading import load_error

    failure = load_error(error, order.model_dir)
    lines = trace_of(error)
    # The directory is a snapshot that the server keeps: show the path in the repository instead.
    trace = "\n".join(lines).replace(order.model_dir, order.model)[-TRACE_LIMIT:] if len(lines) > 1 else ""
    outbox.add(LoadFailed(failure.code, failure.text, trace))
    outbox.flush()
    return Exit.LOAD_FAILED


def _serve(link: BrokerLink, priority: LoadPriority) -> Exit:
    orders, descriptors = _first_order(link)
    order: Load = orders[0]
    from shmserve.workers.loading import load
    from shmserve.workers.loop import Loop
    from shmserve.workers.outbox import Outbox

    outbox = Outbox(link)
    config = _read(descriptors.pop(0))
    try:
        model = load(order, config, outbox)
    except Exception as error:
        return _report_load_failure(order, error, outbox)
    stopped = False
    try:
        priority.restore()
        keep_freed_memory(MODEL_HEAP_BYTES)  # not earlier: what loading has used need not be kept
        use_huge_pages(HUGE_BYTES)
        _report_loaded(model, outbox)
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        Loop(link, outbox, model).run(orders[1:], descriptors)
        stopped = True
    finally:
        finalized = _finalize(model, stopped)
    return Exit.STOPPED if finalized else Exit.FINALIZE_FAILED


def _report_loaded(loaded: LoadedModel, outbox: Outbox) -> None:
    from shmserve.repo.config.schema import encode_config

    descriptor = os.memfd_create("shmserve-config", os.MFD_CLOEXEC)
    try:
        os.pwrite(descriptor, encode_config(loaded.config), 0)
        outbox.add(Loaded(loaded.model.slots), descriptor)
        outbox.flush()
    finally:
        os.close(descriptor)


def _finalize(model: LoadedModel, stopped: bool) -> bool:
    """`stopped`: the worker received Stop, so the broker is alive and will free the memory that callers still hold."""
    try:
        model.close()
    except Exception as error:
        log_traceback("the model failed while it was finalized", error)
        return False
    finally:
        model.arenas.close(keep_names=stopped)
    return True


def _read(descriptor: int) -> bytes:
    try:
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    run()

"""Starts, watches, restarts and stops the gateway processes of this server.

Invariant: at startup, a gateway that cannot listen stops the server, as the failure would otherwise go unnoticed.
Later, a gateway that exits is always restarted.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from msgspec import Struct

from shmserve.broker.observability.metric_definitions import Page
from shmserve.broker.processes import children
from shmserve.core.limits import pause_ns
from shmserve.paths import python

log = logging.getLogger("shmserve")

MODULE = "shmserve.clients.cli.main"
PORTS = ("http", "grpc", "metrics")
"""Endpoints whose port the kernel may choose. A restarted gateway listens on the same port."""
PAUSES_NS = 1_000_000_000, 30_000_000_000
"""Pause before the second consecutive restart, and the longest pause."""
STEADY_S = 60.0
"""Uptime after which the restart counter is reset."""
OPEN_S = 60.0
"""Time for a gateway to start listening."""
GRACE_S = 1.0
"""Time to exit after the time for requests in flight; less than `stop_deadline.KILL_S`."""
ERROR_START = "shmserve gateway: "
_LEVELS = {level: level for level in ("debug", "info", "warning", "error", "critical")}
_OWN_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
"""Shields gateways from a terminal's Ctrl-C, as the broker stops them in order. In a session of their own, they pass on
5 to 11 % fewer requests where the kernel shares the processors among sessions (autogroups)."""
_INHERITED = ("SSL_", "OPENSSL_")
"""Prefixes of environment variables for gateways, besides those of every child. Gateways parse network input, so they
get only what they need."""


class GatewaySettings(Struct, frozen=True):
    """The number of gateways, and their command-line arguments."""

    count: int
    arguments: tuple[str, ...]


class _Gateway(Struct, eq=False):
    """One gateway; `process` is None while it is not running."""

    number: int
    process: subprocess.Popen[bytes] | None = None
    pidfd: int = -1
    output: children.Output | None = None
    ready_pipe: int = -1
    """Pipe on which the gateway reports that it is listening."""
    is_open: bool = False
    began: float = 0.0
    consecutive_exits: int = 0
    timer: Any = None

    def cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Gateways:
    """`opened(ports)` is called once, when all gateways are listening, or `failed(code, text)` if one cannot listen.
    `log_record` logs their output."""

    def __init__(
        self,
        loop: Any,
        settings: GatewaySettings,
        url: str,
        exit_timeout_s: float,
        opened: Callable[[Mapping[str, int]], None],
        failed: Callable[[int, str], None],
        log_record: Callable[[str, str, dict[str, Any]], None],
    ) -> None:
        self.pids: set[int] = set()
        """Pids of running gateways, which this class reaps."""
        self.ports: dict[str, int] = {}
        """Endpoint -> port."""
        self._restarts = 0
        self._loop = loop
        self._opened = opened
        self._failed = failed
        self._log_record = log_record
        self._all = [_Gateway(number) for number in range(settings.count)]
        self._options = ["--url", url, "--exit-timeout-secs", f"{exit_timeout_s:g}", *settings.arguments]
        if settings.count > 1:
            self._options.append("--reuse-http-port")
        self._begun = False
        """All gateways have started to listen once."""
        self._ended: Callable[[], None] | None = None
        """Set by `stop`."""

    def start(self) -> None:
        """Starts the first gateway. The others follow after it has reported the ports."""
        if self._all:
            self._start(self._all[0])
        else:
            self._begun = True
            self._loop.call_soon(self._opened, self.ports)

    # ------------------------------------------------------------------------------------ one gateway

    def _start(self, gateway: _Gateway) -> None:
        gateway.timer = None
        try:
            self._start_process(gateway)
        except OSError as error:
            self._handle_exit(gateway, 1, f"cannot start a process: {error.strerror}")

    def _start_process(self, gateway: _Gateway) -> None:
        """Raises OSError without leaving anything behind, for example if no descriptors are left."""
        ports = [
            word
            for endpoint, port in self.ports.items()
            if endpoint in PORTS
            for word in (f"--{endpoint}-port", str(port))
        ]
        with ExitStack() as undo, ExitStack() as child_ends:
            ready_pipe, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            undo.callback(os.close, ready_pipe)
            child_ends.callback(os.close, write_end)
            output = children.Output(self._loop, _LEVELS, partial(self._log, gateway.number))
            undo.callback(output.close)
            child_ends.callback(os.close, output.write_end)
            arguments = ["gateway", "--parent", str(os.getpid()), "--ready-fd", str(write_end), *self._options, *ports]
            process = subprocess.Popen(
                [*python(), "-m", MODULE, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output.write_end,
                stderr=output.write_end,
                pass_fds=[write_end],
                env=children.environment(*_INHERITED),
                **_OWN_GROUP,
            )
            undo.callback(process.wait)
            undo.callback(process.kill)
            gateway.pidfd = os.pidfd_open(process.pid)
            undo.pop_all()
        gateway.process, gateway.output, gateway.ready_pipe = process, output, ready_pipe
        gateway.began = self._loop.time()
        gateway.is_open = False
        self.pids.add(process.pid)
        self._loop.add_reader(ready_pipe, self._read_report, gateway)
        self._loop.add_reader(gateway.pidfd, self._process_exited, gateway)
        gateway.timer = self._loop.call_later(OPEN_S, self._open_timed_out, gateway)

    def _read_report(self, gateway: _Gateway) -> None:
        report = os.read(gateway.ready_pipe, 4096).split()
        self._close_ready_pipe(gateway)
        if report[:1] != [b"READY"]:
            return  # the gateway is about to exit
        gateway.is_open = True
        gateway.cancel_timer()
        for word in report[1:]:
            endpoint, _, port = word.decode("ascii", "replace").partition("=")
            if port.isdecimal():
                self.ports[endpoint] = int(port)
        if self._begun or self._ended is not None:
            return
        later = next((other for other in self._all if other.process is None), None)
        if later is not None:
            self._start(later)
        elif all(other.is_open for other in self._all):
            self._begun = True
            self._opened(self.ports)

    def _close_ready_pipe(self, gateway: _Gateway) -> None:
        if gateway.ready_pipe >= 0:
            self._loop.remove_reader(gateway.ready_pipe)
            os.close(gateway.ready_pipe)
            gateway.ready_pipe = -1

    def _open_timed_out(self, gateway: _Gateway) -> None:
        gateway.timer = None
        log.error("gateway %d did not start listening within %g s", gateway.number, OPEN_S)
        self._kill(gateway)

    def _log(self, number: int, level: str, text: str) -> None:
        self._log_record(level, f"[gateway] {text}", {"gateway": number})

    def _process_exited(self, gateway: _Gateway) -> None:
        """Handles the exit of the process."""
        assert gateway.process is not None
        assert gateway.output is not None
        code = gateway.process.wait()
        gateway.output.finish()
        last_line = gateway.output.last_line(ERROR_START)  # a hint may follow the error
        self._release(gateway)
        self._handle_exit(gateway, code, last_line)

    def _release(self, gateway: _Gateway) -> None:
        assert gateway.process is not None
        assert gateway.output is not None
        self._close_ready_pipe(gateway)
        gateway.output.close()
        self._loop.remove_reader(gateway.pidfd)
        os.close(gateway.pidfd)
        gateway.cancel_timer()
        self.pids.discard(gateway.process.pid)
        gateway.process = None

    def _handle_exit(self, gateway: _Gateway, code: int, last_line: str) -> None:
        if self._ended is not None:
            self._check_ended()
        elif not self._begun:
            self._ended = _already_reported  # do not report the exits of the other gateways, which are stopped now
            why = last_line.removeprefix(ERROR_START) or children.describe_exit(code)
            self._failed(2 if code == 2 else 1, f"cannot start the gateway: {why}")
        else:
            lived = self._loop.time() - gateway.began if gateway.is_open else 0.0
            self._restarts += 1
            gateway.consecutive_exits = 1 if lived > STEADY_S else gateway.consecutive_exits + 1
            pause = pause_ns(gateway.consecutive_exits, *PAUSES_NS) / 1e9
            again = f"in {pause:g} s" if pause else "immediately"
            text = f"gateway {gateway.number} exited ({children.describe_exit(code)}); restarting it {again}"
            self._log_record("error", text, {"gateway": gateway.number})
            gateway.timer = self._loop.call_later(pause, self._start, gateway)

    def _kill(self, gateway: _Gateway) -> None:
        if gateway.process is not None:
            signal.pidfd_send_signal(gateway.pidfd, signal.SIGKILL)

    def names(self) -> dict[int, str]:
        """Names of running processes by pid."""
        running = ((gateway.process, gateway.number) for gateway in self._all)
        return {process.pid: f"gateway {number}" for process, number in running if process is not None}

    def metrics(self) -> str:
        """Metrics in Prometheus format; "" without gateways."""
        page = Page()
        if self._all:
            page.add("shmserve_gateway_restarts_total", self._restarts, "")
        return page.text()

    def reread(self) -> None:
        """Makes gateways reread certificates and tokens."""
        for gateway in self._all:
            if gateway.process is not None and gateway.is_open:  # others have not read them yet
                signal.pidfd_send_signal(gateway.pidfd, signal.SIGHUP)

    # ------------------------------------------------------------------------------------ stop

    def stop(self, limit_s: float, ended: Callable[[], None]) -> None:
        """Makes gateways stop accepting requests and finish those in flight. Calls `ended` when all have exited."""
        self._ended = ended
        for gateway in self._all:
            gateway.cancel_timer()
            if gateway.process is not None:
                signal.pidfd_send_signal(gateway.pidfd, signal.SIGTERM)
                gateway.timer = self._loop.call_later(limit_s + GRACE_S, self._kill, gateway)
        self._check_ended()

    def _check_ended(self) -> None:
        if self._ended is not None and all(gateway.process is None for gateway in self._all):
            ended, self._ended = self._ended, _already_reported
            ended()

    def fail_requests(self) -> None:
        """Makes gateways fail their remaining requests and exit. Call after `stop`."""
        for gateway in self._all:
            if gateway.process is not None:
                signal.pidfd_send_signal(gateway.pidfd, signal.SIGINT)
                gateway.cancel_timer()
                gateway.timer = self._loop.call_later(GRACE_S, self._kill, gateway)

    def close(self) -> None:
        """Kills gateways that are still running."""
        self._ended = _already_reported
        for gateway in self._all:
            if gateway.process is not None:
                self._kill(gateway)
                select.select([gateway.pidfd], [], [])
                gateway.process.wait()
                self._release(gateway)
            else:
                gateway.cancel_timer()


def _already_reported() -> None:
    """The value of `_ended` after a stop or a failed start has been reported."""


def arguments_of(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The command line of a gateway with these options."""
    arguments: list[str] = []
    for name, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            arguments.append(f"--{name}" if one is True else f"--{name}={'false' if one is False else one}")
    return tuple(arguments)

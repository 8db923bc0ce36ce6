"""`python -m bench.peers`: shmserve beside other servers, with the same models and the same load.

Every server has one instance of a model and one thread for its engine. Requests are HTTP, in the cheapest form that the
server accepts: binary tensors for servers with KServe's protocol, bytes for the others. For single requests, batching
is disabled where it would delay them. The servers take turns of a few seconds, in an order that is reversed each round;
the others are stopped. The load generator is wrk, on the same cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from bench.lib import wrk
from bench.lib.clock import in_turn
from bench.lib.wrk import Post, WrkTurn
from bench.peers import report
from bench.peers.report import Cell
from bench.peers.running import Running
from bench.peers.servers import BATCH, SERVERS, PeerServer, on_python
from bench.peers.workloads import WORKLOADS, Array, PeerWorkload, expected
from tests.support.system.apt import apt_get

WRK = "wrk"
WARM = 50
"""Requests before each turn that are not measured: the processes have just been resumed."""
NEAR = 1e-3


def installed(names: list[str]) -> list[PeerServer]:
    """The servers that are available. Installs missing packages."""
    results = []
    for server in SERVERS:
        if names and server.name not in names:
            continue
        if not server.is_installed():
            say(f"installing {server.name} ...")
            try:
                server.install()
            except subprocess.CalledProcessError as error:
                say(f"skipped: {server.name} could not be installed ({error})")
                continue
        results.append(server)
    return results


def installed_wrk(name: str) -> str | None:
    """Installs wrk from its Debian package, if permitted."""
    if name != WRK or os.geteuid() or shutil.which("apt-get") is None:
        return None
    say("installing wrk ...")
    try:
        apt_get("install", "--quiet", "--yes", "--no-install-recommends", WRK)
    except subprocess.SubprocessError as error:
        say(f"wrk could not be installed: {error}")
    return shutil.which(WRK)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class PeerComparison:
    """The servers of one workload: all are started, and all but one are stopped."""

    def __init__(self, workload: PeerWorkload, tool: str, seconds: float, work: Path, stack: ExitStack) -> None:
        self.workload = workload
        self._tool, self._seconds, self._work, self._stack = tool, seconds, work, stack
        self._started: dict[tuple[str, int], tuple[Running, Post]] = {}
        self.failures: dict[str, str] = {}

    def start(self, server: PeerServer) -> None:
        wanted = {BATCH} if server.one_for_all else {self._batch(flight) for flight in self.workload.flights}
        try:
            for batch in wanted:
                self._started[server.name, batch] = self._start(server, batch)
            if server.one_for_all:
                self._started[server.name, 1] = self._started[server.name, BATCH]
        except (RuntimeError, subprocess.SubprocessError) as error:
            self.failures[server.name] = str(error)
            say(f"{self.workload.name}: {server.name} failed: {error}")

    def _batch(self, flight: int) -> int:
        return BATCH if self.workload.batches and flight > 1 else 1

    def _start(self, server: PeerServer, batch: int) -> tuple[Running, Post]:
        running, url = self._stack.enter_context(server.started(self.workload, batch, self._work))
        post = server.post(url, self.workload)
        y = numbers(running.await_answer(post))
        if not np.allclose(y, expected(self.workload, self.workload.payloads()[0], self._work), rtol=NEAR, atol=NEAR):
            raise RuntimeError(f"a wrong answer of {y.size} numbers: {y[:4]}")
        running.pause()
        return running, post

    def cells(self, flight: int, rounds: int) -> Iterator[Cell]:
        batch = self._batch(flight)
        names = [name for name, of in self._started if of == batch and name not in self.failures]
        turns = in_turn(rounds, {name: partial(self._turn, name, batch, flight) for name in names})
        for name, result in turns.items():
            yield Cell.of(self.workload.name, flight, name, [turn for turn in result if turn is not None])

    def _turn(self, name: str, batch: int, flight: int) -> WrkTurn | None:
        running, post = self._started[name, batch]
        running.resume()
        try:
            for _ in range(WARM):
                running.await_answer(post)
            turn = wrk.run(self._tool, post, flight, self._seconds, self._work)
            # This answer follows those to the requests that wrk gave up: Triton crashes if it is stopped with some.
            running.await_answer(post)
            return turn
        except (RuntimeError, subprocess.SubprocessError) as error:
            say(f"{self.workload.name}, {flight} in flight: {name} failed: {error}")
            return None
        finally:
            running.pause()


def numbers(answer: bytes) -> Array:
    """Parses an array, sent as bytes or as JSON."""
    if answer.startswith(b"[["):
        return np.asarray(json.loads(answer), np.float32).ravel()
    return np.frombuffer(answer, np.float32)


def measured(servers: list[PeerServer], chosen: argparse.Namespace, tool: str, work: Path) -> Iterator[Cell]:
    for workload in WORKLOADS:
        if chosen.only and workload.name not in chosen.only:
            continue
        with ExitStack() as stack:
            compared = PeerComparison(workload, tool, chosen.seconds, work, stack)
            for server in servers:
                if not server.only or workload.name in server.only:
                    compared.start(server)
            for flight in workload.flights:
                for cell in compared.cells(flight, chosen.rounds):
                    say(cell.line())
                    yield cell


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    option = parser.add_argument
    option("--servers", nargs="+", default=[], metavar="NAME", choices=[server.name for server in SERVERS])
    option("--pythons", nargs="+", default=[], metavar="PATH", help="also shmserve in these environments")
    option("--only", nargs="+", default=[], metavar="MODEL", choices=[workload.name for workload in WORKLOADS])
    option("--seconds", type=float, default=1.2, help="length of one turn (default 1.2)")
    option("--rounds", type=int, default=7, help="turns of each server (default 7)")
    option("--wrk", default=WRK, metavar="PATH", help="(default: the one in PATH)")
    option("--save", action="store_true", help="keep the result in bench/results")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    chosen = arguments(argv)
    tool = shutil.which(chosen.wrk) or installed_wrk(chosen.wrk)
    if tool is None:
        say("there is no wrk: `apt install wrk`, or give --wrk")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the servers end with the block below
    servers = [*installed(chosen.servers), *map(on_python, chosen.pythons)]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        cells = list(measured(servers, chosen, tool, Path(folder)))
    versions = dict.fromkeys(server.versions() for server in servers)
    print(report.markdown(cells))
    if chosen.save:
        turns = f"{chosen.rounds} of {chosen.seconds:g} s each, in turn"
        command = shlex.join(["python", "-m", "bench.peers", *argv])
        path = report.save(cells, command, {"servers": ", ".join(versions), "turns": turns})
        print(f"kept in bench/results/{path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

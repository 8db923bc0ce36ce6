"""`python -m shmserve.ray.host`: the parent process of a server on a node, on behalf of owners that may end at any
time.

The directory has a Unix socket per key. An owner connects, reads the server's state, one JSON line per change, and
keeps the connection open. The kernel closes the connection when the owner ends, even after SIGKILL. When the last owner
is gone, the host removes the socket and stops the server as SIGTERM does. If the host is killed, the kernel kills the
server.

The host detaches from the process that starts it, because Ray kills the children of a worker when the worker ends. It
restarts a crashed server, with a back-off.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from shmserve.ray.config import ServerConfig
from shmserve.system.process import PDEATHSIG, prctl

FIRST_OWNER_S = 30.0
"""How long to wait for the owner that started this process to connect."""
STOP_S = 600.0
"""The server ends by itself after --exit-timeout-secs; this timeout is for a server that hangs."""
RESTARTS = 5
"""Maximum number of consecutive crashes. A server that has run for STABLE_S resets the count."""
STABLE_S = 60.0
BACK_OFF_S = (0.0, 1.0, 2.0, 4.0, 8.0)
LAST_LINES = 8
LISTENING = b"L"


class ServerState(msgspec.Struct, frozen=True):
    """What a host tells owners about its server."""

    state: str
    """starting, ready, or failed: the server has crashed repeatedly. Owners add over: the host is gone."""
    host: int = 0
    """The pid of the host."""
    runtime_dir: str = ""
    ports: dict[str, int] = {}
    """Endpoint -> port, when the server is ready."""
    reason: str = ""
    """Why the server has failed or is started again."""


class Host:
    """`reports`: a descriptor to which LISTENING is written."""

    def __init__(self, directory: Path, key: str, config: ServerConfig, reports: int) -> None:
        self._socket = directory / f"{key}.sock"
        self._directory = directory
        self._place = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=directory))
        self._lock = _locked(self._place)
        self._config = config
        self._reports = reports
        self._owners: set[asyncio.StreamWriter] = set()
        self._state = self._state_of("starting")
        self._over = asyncio.Event()
        self._lines: deque[str] = deque(maxlen=LAST_LINES)

    async def run(self) -> None:
        with suppress(FileNotFoundError):
            self._socket.unlink()  # left by a host that was killed: the starter holds the lock and could not connect
        sweep(self._directory, self._place)
        server = await asyncio.start_unix_server(self._owned, self._socket)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._over.set)
        os.write(self._reports, LISTENING)
        os.close(self._reports)
        timer = loop.call_later(FIRST_OWNER_S, self._end_if_unowned)
        try:
            await self._supervise()
            await self._over.wait()
        finally:
            timer.cancel()
            server.close()
            shutil.rmtree(self._place, ignore_errors=True)
            os.close(self._lock)
            self._remove_directory()

    # ------------------------------------------------------------------------------------------------ owners

    async def _owned(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._owners.add(writer)
        self._tell(writer)
        try:
            while await reader.read(4096):
                pass
        except ConnectionError:
            pass
        finally:
            self._owners.discard(writer)
            writer.close()
            self._end_if_unowned()

    def _end_if_unowned(self) -> None:
        if not self._owners and not self._over.is_set():
            with suppress(FileNotFoundError):
                self._socket.unlink()  # the next owner starts another host
            self._over.set()

    def _state_of(self, state: str, **more: Any) -> ServerState:
        return ServerState(state, os.getpid(), str(self._place / "run"), **more)

    def _publish(self, state: ServerState) -> None:
        self._state = state
        for writer in self._owners:
            self._tell(writer)

    def _tell(self, writer: asyncio.StreamWriter) -> None:
        writer.write(msgspec.json.encode(self._state) + b"\n")

    def _remove_directory(self) -> None:
        """Removes the directory if it is empty. Starters hold the lock while they create or use it."""
        try:
            lock = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with suppress(OSError):
                self._directory.rmdir()
        finally:
            os.close(lock)

    # ------------------------------------------------------------------------------------------------ the server

    async def _supervise(self) -> None:
        loop = asyncio.get_running_loop()
        crashes = 0
        while not self._over.is_set():
            began = loop.time()
            code, was_ready = await self._serve()
            if self._over.is_set():
                return
            crashes = 1 if loop.time() - began > STABLE_S else crashes + 1
            text = f"the server exited with code {code}: {'; '.join(self._lines) or 'it printed nothing'}"
            if not was_ready or crashes > RESTARTS:
                self._publish(self._state_of("failed", reason=text))
                return
            print(f"shmserve: {text}; it is started again", file=sys.stderr, flush=True)
            self._publish(self._state_of("starting", reason=text))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._over.wait(), BACK_OFF_S[min(crashes, len(BACK_OFF_S)) - 1])

    async def _serve(self) -> tuple[int, bool]:
        """Runs the server until it exits. Returns its status, and whether it was ready."""
        reader, writer = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._config.command(self._place / "run"),
                *("--ready-fd", str(writer)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=[writer],
                preexec_fn=_die_with_host,
            )
        finally:
            os.close(writer)
        ready = asyncio.ensure_future(self._await_ready(reader))
        copied = asyncio.ensure_future(self._copy_output(process))
        exited = asyncio.ensure_future(process.wait())
        over = asyncio.ensure_future(self._over.wait())
        await asyncio.wait((exited, over), return_when=asyncio.FIRST_COMPLETED)
        if not exited.done():
            process.terminate()
            await asyncio.wait((exited,), timeout=STOP_S)
            if not exited.done():
                process.kill()
        code = await exited
        over.cancel()
        await asyncio.wait((copied,), timeout=1.0)  # a model's process may keep the pipe open for longer
        copied.cancel()
        return code, await ready

    async def _await_ready(self, descriptor: int) -> bool:
        stream = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        pipe = os.fdopen(descriptor, "rb", 0)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
        try:
            output = (await stream.read()).decode().split()
        finally:
            transport.close()
        if output[:1] != ["READY"]:
            return False
        ports = (word.partition("=") for word in output[1:])
        self._publish(self._state_of("ready", ports={endpoint: int(port) for endpoint, _, port in ports}))
        return True

    async def _copy_output(self, process: asyncio.subprocess.Process) -> None:
        """Copies the server's output to this process's own, which Ray keeps with the logs of the worker that started
        it."""
        assert process.stdout is not None
        while chunk := await process.stdout.read(1 << 16):
            text = chunk.decode(errors="replace")
            self._lines.extend(line for line in text.splitlines() if line.strip())
            with suppress(OSError):
                sys.stderr.write(text)
                sys.stderr.flush()


def sweep(directory: Path, own: Path) -> None:
    """Removes the files that killed hosts have left. `own`: the folder of this host."""
    for place in directory.iterdir():
        with suppress(FileNotFoundError):  # its host has just removed it
            if place.is_dir() and place != own and (lock := _locked(place)) >= 0:
                shutil.rmtree(place, ignore_errors=True)
                os.close(lock)
            elif place.is_socket() and not _answers(place):
                place.unlink()


def _answers(path: Path) -> bool:
    """Whether a process listens on the Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as tried:
        try:
            tried.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True


def _locked(directory: Path) -> int:
    """A descriptor that holds the lock of a directory; -1 if another process has it."""
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return -1
    return lock


def _die_with_host() -> None:
    prctl(PDEATHSIG, signal.SIGKILL)


def main(arguments: Sequence[str]) -> int:
    directory, key, config, reports = arguments
    ctypes.CDLL(None)  # loads the library before the first fork
    if os.fork():
        return 0
    settings = msgspec.json.decode(config, type=ServerConfig)
    asyncio.run(Host(Path(directory), key, settings, int(reports)).run())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

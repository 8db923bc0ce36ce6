"""Checks and prepares what a server needs to start: the runtime directory, GPUs and packages."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from shmserve.broker.config import settings as setting
from shmserve.broker.processes.gateways import GatewaySettings
from shmserve.errors import InvalidRequest
from shmserve.extras import GATEWAY, install_command, outdated
from shmserve.paths import BROKER, LANE, SOCKET_PATH_BYTES, make_runtime_dir
from shmserve.repo.gpus import Gpus, discover
from shmserve.repo.storage.model_files import ModelFiles
from shmserve.terminal import streams

log = logging.getLogger("shmserve")

LOCK = "broker.lock"
GENERATIONS = "generations"
"""Subdirectory of the runtime directory for the files of loaded versions."""
AGENTS = "agents"
"""Subdirectory of the runtime directory for the results of repository agents."""
FILES = "files"
"""Subdirectory of the runtime directory for models that are single files."""


class CannotStart(Exception):
    """Startup failed. The message is printed as one line."""


class RuntimeDir(contextlib.AbstractContextManager[None]):
    """Locks the runtime directory, and removes files that an earlier server left there. The kernel releases the lock if
    the process dies."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        size = len(os.fsencode((self._path / BROKER).absolute()))
        if size > SOCKET_PATH_BYTES:
            raise CannotStart(
                f"runtime directory {self._path}: the path of its socket {BROKER} has {size} bytes, and that of a Unix "
                f"socket may have {SOCKET_PATH_BYTES}; give a shorter one with --runtime-dir"
            )
        try:
            make_runtime_dir(self._path)
            self._lock = self._acquire_lock()
            self._directory = self._lock_against_tmpfiles()
            self._remove()
            for name in (GENERATIONS, FILES):
                (self._path / name).mkdir(mode=0o700)
            (self._path / AGENTS).mkdir(mode=0o700, exist_ok=True)
        except BlockingIOError:
            raise CannotStart(
                f"another server runs in {self._path}; stop it, with Ctrl-C in its terminal, or give this one another "
                "--runtime-dir and other ports (--http-port, --grpc-port, --metrics-port)"
            ) from None
        except OSError as error:
            text = f"cannot use runtime directory {self._path}: {streams.error_text(error)}"
            raise CannotStart(f"{text}; give another with --runtime-dir") from None

    def _acquire_lock(self) -> int:
        """The descriptor of the lock. Raises BlockingIOError if another server holds it."""
        while True:
            lock = os.open(self._path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_current_lock(lock):
                    return lock
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)  # an exiting server removed the file after it was opened here

    def _lock_against_tmpfiles(self) -> int:
        """The descriptor of the directory, locked. systemd-tmpfiles removes files from /tmp that have not been used for
        days, but skips locked directories. A restarted worker needs the files of its model."""
        directory = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(BlockingIOError):  # systemd-tmpfiles has locked the directory
            fcntl.flock(directory, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return directory

    def _is_current_lock(self, lock: int) -> bool:
        """Whether this is still the lock file in the directory, which may have been removed and created again."""
        try:
            return os.path.samestat(os.fstat(lock), (self._path / LOCK).stat())
        except FileNotFoundError:
            return False

    def _remove(self) -> None:
        for name in (LANE, BROKER):
            (self._path / name).unlink(missing_ok=True)
        for name in (GENERATIONS, FILES):
            shutil.rmtree(self._path / name, ignore_errors=True)

    def __exit__(self, *_: object) -> None:
        if self._is_current_lock(self._lock):
            self._remove()
            shutil.rmtree(self._path / AGENTS, ignore_errors=True)
            (self._path / LOCK).unlink(missing_ok=True)
        os.close(self._directory)
        os.close(self._lock)


def find_gpus() -> Gpus:
    """Finds the GPUs and logs them."""
    gpus = discover()
    for gpu in gpus.devices:
        log.info("GPU %d: %s, %s", gpu.number, gpu.name, gpu.uuid)
    if gpus.why:
        log.warning("the NVIDIA driver is installed, but no GPU is used: %s", gpus.why)
    return gpus


def model_files(settings: argparse.Namespace) -> ModelFiles | None:
    """The models that are single files; None if there are none. Raises CannotStart for a file that is not a model,
    unless the server follows its changes and serves on without it."""
    if not settings.model_files:
        return None
    files = ModelFiles(settings.model_files, settings.runtime_dir.absolute() / FILES)
    try:
        files.refresh(strict=settings.exit_on_error or settings.model_control_mode != "poll")
    except InvalidRequest as error:
        raise CannotStart(str(error)) from None
    except OSError as error:
        text = f"cannot write to the runtime directory {settings.runtime_dir}: {streams.error_text(error)}"
        raise CannotStart(f"{text}; give another with --runtime-dir") from None
    return files


def gateway_settings(settings: argparse.Namespace, busy_poll_ns: int = 0) -> GatewaySettings:
    """Returns the gateway settings. If a package is missing, disables the gateways, or raises CannotStart if they were
    configured explicitly."""
    gateways = setting.gateway_settings(settings, busy_poll_ns)
    missing = [name for name in GATEWAY if gateways.count and find_spec(name) is None]
    if not missing:
        return gateways
    text = f"the gateway needs the package {missing[0]}: {install_command('server')}"
    if gateways.arguments or gateways.count > 1:
        raise CannotStart(f"{text}, or omit its flags")
    log.warning("%s; serving only clients on this machine", text)
    return GatewaySettings(0, ())


def require_exporter(protocol: str) -> None:
    """Raises CannotStart unless the packages that export traces over this protocol are installed."""
    package = f"opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter"
    if not _is_installed("opentelemetry.sdk") or not _is_installed(package):
        name = f"opentelemetry-exporter-otlp-proto-{protocol}"
        raise CannotStart(f"--trace-config mode=opentelemetry needs the package {name}: {install_command('otel')}")
    if old := outdated("otel"):
        raise CannotStart(f"--trace-config mode=opentelemetry cannot be used: {old}")


def _is_installed(module: str) -> bool:
    """Whether the module is installed. `find_spec` imports its parent packages, which may be missing."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False

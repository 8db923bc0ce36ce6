"""The server that the tests of a file share, and load generators in threads."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from shmserve.repo import samples
from shmserve.testing import Server
from shmserve.tools.load import one_load
from shmserve.tools.load.generation import process
from tests.process.cli.load.bench_server import SEQUENCE, SLOW, BenchServer
from tests.support.commands import run
from tests.support.gateway.running_gateway import Gateway, model, talker
from tests.support.model_files import write_model
from tests.support.workers.models import gguf_models


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BenchServer]:
    repository, keys = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("keys")
    samples.build(repository, lambda text: None)
    model(repository, "id", ["FP32", "BYTES"], "[ 4 ]", 8, "dynamic_batching { }")
    model(repository, "sequence", ["INT32"], "[ 1 ]", 4, SEQUENCE)
    model(repository, "wide", ["FP32"], "[ -1 ]", 4)
    talker(repository)
    write_model(repository, "slow", SLOW)
    if importlib.util.find_spec("xllamacpp") is not None:
        write_model(repository, "chat", 'backend: "llamacpp"')
        gguf_models.write(repository / "chat" / "1" / "model.gguf")
    for name, roles in (("server", "infer"), ("alice", "infer,observe")):
        assert run("keygen", name, "--out", str(keys), "--roles", roles)[0] == 0
    options = ["--zmq-address", "tcp://127.0.0.1:0", "--zmq-server-key", str(keys / "server.key")]
    options += ["--zmq-keys", str(keys / "alice.pub")]
    with Server(repository, *options, gateway=True) as server:
        yield BenchServer(server, keys)


class GeneratorThread:
    """Replaces the `Popen` of a generator process: runs the same code in a thread, without starting Python."""

    def __init__(self, command: list[str], pass_fds: list[int], stdin: int) -> None:
        self._thread = threading.Thread(target=asyncio.run, args=[process.serve(os.dup(pass_fds[0]))])
        self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def kill(self) -> None:
        return


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes generators threads that report often, for tests about what they send. Their processor time is that of the
    whole test process, so it must not cause more generators to be added.
    """
    start = subprocess.Popen

    def started(command: list[str], **options: Any) -> Any:
        is_generator = process.__name__ in command
        return GeneratorThread(command, **options) if is_generator else start(command, **options)

    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(process, "FLUSH_S", 0.01)
    monkeypatch.setattr(one_load, "BUSY", float("inf"))


@pytest.fixture(scope="module")
def secure(served: BenchServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Path]]:
    """A gateway that requires client certificates, and a folder with its certificates."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca"))
    for name, host in (("server", "localhost"), ("client", "alice")):
        issued = authority.issue_cert(host)
        issued.private_key_and_cert_chain_pem.write_to_path(str(folder / name))
        (folder / name).chmod(0o600)
    issued.private_key_pem.write_to_path(str(folder / "key"))
    gateway = Gateway(served.server, "--tls-cert", str(folder / "server"), "--tls-client-ca", str(folder / "ca"))
    try:
        yield gateway, folder
    finally:
        gateway.stop()

"""Requests to a killed server are answered by the next one, even if they arrive while that server is still loading its
models."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import shmserve
from shmserve.testing import Server
from tests.support.ensemble_models import config_text
from tests.support.model_files import parameters, python_model, write_model
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.process

CONFIG = config_text("python", "x", "y", "max_batch_size: 4 dynamic_batching { }")
MODEL = python_model(
    """
    if self.first:
        open(self.folder + "/begun", "w").close()
        select.select([], [], [], 600)
    return self.respond(x * 2)
    """,
    """
    self.folder = json.loads(args["model_config"])["parameters"]["folder"]["string_value"]
    self.first = not os.path.exists(self.folder + "/seen")
    open(self.folder + "/seen", "w").close()
    if not self.first:
        open(self.folder + "/go").read()  # a pipe: blocks until the test writes
    """,
)


def test_requests_survive_a_server_restart(tmp_path: Path) -> None:
    """The models have begun to run the requests. The next server receives them, and requests of a new client, while its
    models are still loading."""
    cases = [(link, size) for link in ("lane", "zmq") for size in (3, 30_000)]
    folders = [tmp_path / "models" / f"{link}_{size}" for link, size in cases]
    for folder in folders:
        config = CONFIG + parameters(folder=str(folder))
        write_model(folder.parent, folder.name, config, MODEL)
        os.mkfifo(folder / "go")
    with (
        Server(tmp_path / "models") as server,
        shmserve.Client(server.url, reconnect_timeout=PATIENCE_S) as lane,
        shmserve.Client(server.zmq_url, reconnect_timeout=PATIENCE_S) as zmq,
        ThreadPoolExecutor(2 * len(cases)) as pool,
    ):
        inputs = [np.arange(size, dtype=np.float32)[None] for _, size in cases]
        results = []
        for (link, _), folder, x in zip(cases, folders, inputs, strict=True):
            client = lane if link == "lane" else zmq
            results.append(pool.submit(client.submit(folder.name, {"x": x}).result, PATIENCE_S))
        while not all((folder / "begun").exists() for folder in folders):
            server.client().close()
        server.kill()
        restarted = pool.submit(server.restart)
        with connected(server) as new:
            later = [new.submit(folder.name, {"x": x}) for folder, x in zip(folders, inputs, strict=True)]
            new.flush()
            while any(not model["queued"] for model in new.activity()["models"]):
                assert not restarted.done()
            gates = [pool.submit((folder / "go").write_text, "") for folder in folders]
            for x, result, after in zip(inputs, results, later, strict=True):
                assert np.array_equal(result.result()["y"], x * 2)
                assert np.array_equal(after.result(PATIENCE_S)["y"], x * 2)
            restarted.result()
        for gate in gates:
            gate.result()


def connected(server: Server) -> shmserve.Client:
    """A client of a server that is being started."""
    client = shmserve.Client(server.url)
    while not client.live():
        pass
    return client

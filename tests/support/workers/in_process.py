"""A model in this process, as a worker has it, without the worker: for libraries that take long to be imported.

The rule: small inputs and outputs only, which travel in messages; what is about shared memory needs a real worker.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shmserve.protocol.messages import Load
from shmserve.repo.config.schema import ModelConfig, encode_config
from shmserve.shm.mapped import Mapped
from shmserve.workers.loading import THREADS, LoadedModel, load
from shmserve.workers.outbox import NullOutbox
from tests.support.workers.worker_harness import WORKER


@contextmanager
def loaded(given: ModelConfig, folder: Path) -> Iterator[LoadedModel]:
    mapped = Mapped()
    threads = os.environ.get(THREADS)
    os.environ[THREADS] = "1"  # an engine with more starts threads, which stay
    path, kept, modules = list(sys.path), sys.dont_write_bytecode, set(sys.modules)
    try:
        order = Load(WORKER, given.name, 1, "m_0_0", str(folder))
        model = load(order, encode_config(given), NullOutbox(), mapped)
        try:
            yield model
        finally:
            model.backend.close()
            model.arenas.close()
    finally:
        mapped.close()
        del os.environ[THREADS]
        if threads is not None:
            os.environ[THREADS] = threads
        sys.path[:], sys.dont_write_bytecode = path, kept
        for name in set(sys.modules) - modules:
            if name.startswith(("shmserve_model_", "triton_python_backend", "c_python_backend")):
                del sys.modules[name]

"""llama.cpp in this process: a thread of the engine runs all sequences as one batch, which sequences can join and leave
at every step.

The package's interface also starts an HTTP server. It listens on a socket in a private directory, which is removed
before the first request, so that nothing can reach it.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmserve.errors import InvalidRequest, ModelFailed
from shmserve.workers.process.log import log_message

if TYPE_CHECKING:
    from shmserve.workers.backends.llamacpp.settings import Settings

# Read when the engine's library is loaded. A step has hundreds of barriers, and threads that spin at them lose whole
# time slices when other processes need the cores: with two threads on two busy cores, a step took 20 times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
import xllamacpp

_SILENT, _ERRORS = 0, 1
"""Log levels of the engine."""


class Engine:
    """A loaded model. `generate` may be called in any thread; `close` when no call is in progress."""

    def __init__(self, settings: Settings) -> None:
        """Raises ModelFailed if the model cannot be loaded."""
        try:
            self._server = _started(settings, _SILENT)
        except RuntimeError:
            # Load again with logging, because the engine only logs the reason.
            log_message(f"llama.cpp cannot load {settings.file.name}")
            try:
                self._server = _started(settings, _ERRORS)
            except RuntimeError as error:
                raise ModelFailed(
                    f"llama.cpp cannot load {settings.file.name}; the log of the server has its messages"
                ) from error

    def generate(self, chat: bool, body: bytes, receive: Callable[[bytes], bool]) -> None:
        """Runs a request. Calls `receive` with each piece of JSON, in this thread; True stops the request at the next
        step. `receive` must not raise. Raises InvalidRequest if the engine cannot parse the request or its template
        refuses it.
        """
        run = self._server.handle_chat_completions if chat else self._server.handle_completions
        try:
            run(body, receive)
        except (RuntimeError, ValueError) as error:
            raise InvalidRequest(" ".join(str(error).split())) from error

    def close(self) -> None:
        """Ends the engine's thread and frees the model."""
        self._server = None


def _started(settings: Settings, verbosity: int) -> Any:
    with tempfile.TemporaryDirectory(prefix="llamacpp-") as folder:
        return xllamacpp.Server(_parameters(settings, Path(folder) / "http.sock", verbosity))


def _parameters(settings: Settings, socket: Path, verbosity: int) -> Any:
    found = xllamacpp.CommonParams()
    found.model.path = str(settings.file)
    found.n_parallel = settings.slots
    found.n_ctx = settings.context * settings.slots
    found.kv_unified = False  # each slot has its part of the context
    found.ctx_shift = False
    found.n_batch = max(settings.prompt_batch, settings.slots)
    found.n_ubatch = found.n_batch
    for threads in (found.cpuparams, found.cpuparams_batch):
        threads.n_threads = settings.threads
    kind = xllamacpp.ggml_type[f"GGML_TYPE_{settings.cache_type.upper()}"]
    found.cache_type_k = found.cache_type_v = kind
    found.cache_ram_mib = 0
    found.n_ctx_checkpoints = 0
    found.fit_params = False
    found.use_jinja = True
    if settings.chat_template:
        found.chat_template = settings.chat_template
    found.hostnames = [str(socket)]
    found.api_keys = [secrets.token_hex(32)]
    found.n_threads_http = 1
    found.ui = False
    found.endpoint_slots = False
    found.verbosity = verbosity
    return found

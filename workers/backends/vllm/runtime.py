"""vLLM in this process. Its scheduler and the network run in a process of its own, or in several; an event loop in a
thread of this process receives what they compute. The sockets between them are in a private directory, which others
cannot enter."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

import uvloop
from vllm.config import PoolerConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from shmserve.errors import InvalidRequest
from shmserve.workers.backends.language.engine import EngineLimits
from shmserve.workers.model_calls.coroutines import Coroutines
from shmserve.workers.process.exit_codes import Exit, exit_process
from shmserve.workers.process.log import log_message

_Result = TypeVar("_Result")
POOLER = "pooler_config"


class Runtime:
    """A loaded model. `close` is called when no call is in progress; the others in any thread."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Raises what vLLM raises if the model cannot be loaded."""
        if isinstance(arguments.get(POOLER), dict):
            arguments = {**arguments, POOLER: PoolerConfig(**arguments[POOLER])}
        try:
            parsed = AsyncEngineArgs(**arguments)
        except TypeError as error:
            raise InvalidRequest(f"vLLM does not accept an argument of the model: {error}") from error
        self._numbers = count(1)
        self._guard = _start_guard()
        self._sockets = tempfile.TemporaryDirectory(prefix="vllm-")
        os.environ.setdefault("VLLM_RPC_BASE_PATH", self._sockets.name)
        self.coroutines = Coroutines(uvloop.new_event_loop())
        try:
            self.engine: AsyncLLM = self.coroutines.submit(_started(parsed)).result()
        except BaseException:
            self.coroutines.close()
            self._sockets.cleanup()
            raise
        self.tokenizer = self.engine.get_tokenizer()
        config = self.engine.vllm_config
        cache = (config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size
        self.limits = EngineLimits(
            config.scheduler_config.max_num_seqs, config.model_config.max_model_len, max(1, cache)
        )

    def number(self) -> str:
        """The number of a request, which the engine demands."""
        return str(next(self._numbers))

    def run(self, request: Coroutine[Any, Any, _Result]) -> _Result:
        """Runs a request and returns its result. Raises InvalidRequest if the engine refuses the request."""
        with translated_errors():
            result: _Result = self.coroutines.submit(request).result()
        return result

    def close(self) -> None:
        self.coroutines.close()
        self.engine.shutdown()
        self._sockets.cleanup()


def _start_guard() -> subprocess.Popen[bytes] | None:
    """Starts a process that kills the processes of the engine when this one has ended.

    The broker kills the group of a worker that ends. If the broker is killed, however, only the worker ends with it,
    and nothing else would end the engine, which keeps its memory."""
    if os.getpgrp() != os.getpid():  # the group of a command in a terminal, which contains other processes
        return None
    guard = subprocess.Popen(["/bin/sh", "-c", "read end; kill -s KILL 0"], stdin=subprocess.PIPE)
    assert guard.stdin is not None
    os.register_at_fork(after_in_child=guard.stdin.close)
    return guard


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raises InvalidRequest if the engine refuses a request. Ends the process if the engine has ended."""
    try:
        yield
    except (ValueError, VLLMClientError) as error:
        raise InvalidRequest(f"vLLM: {error}") from error
    except EngineDeadError as error:
        log_message(f"vLLM has ended: {error}")
        exit_process(Exit.INTERNAL)


async def _started(arguments: AsyncEngineArgs) -> AsyncLLM:
    """Starts the engine with the defaults of vLLM's own server, which depend on the context."""
    context = UsageContext.OPENAI_API_SERVER
    return await asyncio.to_thread(AsyncLLM.from_engine_args, arguments, usage_context=context)

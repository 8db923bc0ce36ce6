"""llama.cpp in this process: a thread of the engine runs all sequences as one batch, which sequences can join and leave
at every step.

The package's interface also starts an HTTP server, which alone can tokenize. It listens on a socket in a private
directory, which is removed before the first request. From then on, the socket can only be reached through a descriptor
of this process, and requests need a random key.
"""

from __future__ import annotations

import base64
import http.client
import os
import re
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from shmserve.errors import InvalidRequest, ModelFailed, Unsupported
from shmserve.workers.backends.language.engine import EngineLimits
from shmserve.workers.backends.language.schemas import check_chat
from shmserve.workers.backends.llamacpp.parameters import body_of, cut
from shmserve.workers.backends.llamacpp.pieces import Pieces
from shmserve.workers.process.log import log_message

if TYPE_CHECKING:
    from shmserve.workers.backends.language.encoder import Vector
    from shmserve.workers.backends.language.engine import Listener
    from shmserve.workers.backends.language.requests import GenerationRequest
    from shmserve.workers.backends.llamacpp.settings import LlamaCppSettings

# Read when the engine's library is loaded. A step has hundreds of barriers, and threads that spin at them lose whole
# time slices when other processes need the cores: with two threads on two busy cores, a step took 20 times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
import xllamacpp

_SILENT, _ERRORS = 0, 1
"""Log levels of the engine."""
_ERROR_LINE = re.compile(r"[\d.]+ E +(.+)")
_LATE_S = 5.0
"""How long to wait for the log of a failed load."""
_Answer = TypeVar("_Answer", bound=Struct)


class _Prompt(Struct):
    prompt: str


class _Tokens(Struct):
    tokens: list[int]


class _Text(Struct):
    content: str


class _Usage(Struct):
    prompt_tokens: int


class _Vector(Struct):
    embedding: str


class _Vectors(Struct):
    data: tuple[_Vector]
    usage: _Usage


class _Score(Struct):
    relevance_score: float


class _Scores(Struct):
    results: tuple[_Score]
    usage: _Usage


class _Problem(Struct):
    message: str


class _Filling(Struct):
    """An empty text that was filled in, with the special tokens around it."""

    prompt: str = ""
    error: _Problem | None = None


class _Refusal(Struct):
    error: _Problem | None = None


class LlamaCppEngine:
    """A loaded model. `close` is called when no call is in progress; all others in any thread."""

    coroutines: None = None

    def __init__(self, settings: LlamaCppSettings) -> None:
        """Raises ModelFailed if the model cannot be loaded."""
        self.limits = EngineLimits(settings.slots, settings.context, settings.slots * settings.context)
        self._defaults = settings.defaults
        self._adapters = list(settings.adapters)
        self._common = {
            "cache_prompt": settings.prompt_cache,
            "repeat_last_n": settings.context,  # penalties apply to all tokens of a sequence
        }
        self._norm = 2 if settings.normalize else -1
        """Which norm of a vector is 1; -1: none."""
        self._key = secrets.token_hex(32)
        try:
            self._server, self._socket = _started(settings, self._key, _SILENT)
        except RuntimeError:
            # Load again with logging, because the engine only logs the reason.
            with closing(_Log()) as log:
                try:
                    self._server, self._socket = _started(settings, self._key, _ERRORS)
                except RuntimeError as error:
                    reason = log.error(settings.file)
                    raise ModelFailed(f"llama.cpp cannot load {settings.file.name}: {reason}") from error

        self._filling = [] if settings.pooling else self._filling_tokens()

    def _filling_tokens(self) -> list[int]:
        """The tokens around a prompt and a suffix between which a text is filled in: those before the prompt, the one
        between the two, and the one at the end. Empty: the model has none."""
        empty = b'{"input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "cache_prompt": false}'
        filling = msgspec.json.decode(self._answer("/infill", empty), type=_Filling)
        if filling.error is not None:
            return []
        body = {"content": filling.prompt, "add_special": False, "parse_special": True}
        return self._post("/tokenize", msgspec.json.encode(body), _Tokens).tokens

    def prepared(self, generation: GenerationRequest) -> Callable[[Listener], None]:
        if generation.suffix and not self._filling:
            raise Unsupported("the model cannot fill in the middle of a text: its vocabulary has no tokens for that")
        body = self._common | body_of(generation, self._defaults, self._filling)
        if self._adapters:  # always all of them: the engine continues the wrong cached text if the list is left out
            chosen = generation.sampling.lora_name
            body["lora"] = [
                {"id": number, "scale": float(name == chosen)} for number, name in enumerate(self._adapters)
            ]
        pieces = Pieces(generation.sampling.logprobs or 0, generation.count, "grammar" not in body)
        return partial(self._generate, generation, pieces, msgspec.json.encode(body))

    def _generate(self, generation: GenerationRequest, pieces: Pieces, body: bytes, listener: Listener) -> None:
        """The engine calls `receive` with each piece, in this thread; True ends the request at the next step."""
        failed: list[Exception] = []

        def receive(data: bytes) -> bool:
            try:
                return listener.step(pieces.steps(data))
            except Exception as error:
                failed.append(error)
                return True

        run = self._server.handle_completions if generation.chat is None else self._server.handle_chat_completions
        try:
            run(body, receive)
        except (RuntimeError, ValueError) as error:  # the request, or the template of the model, is refused
            raise InvalidRequest(" ".join(str(error).split())) from error
        if failed:
            raise failed[0]

    def tokens(self, prompt: str) -> list[int]:
        """The tokens that the model sees."""
        return self._post("/tokenize", msgspec.json.encode({"content": prompt, "add_special": True}), _Tokens).tokens

    def chat_tokens(self, chat: dict[str, Any]) -> list[int]:
        check_chat(chat)
        return self.tokens(self._post("/apply-template", msgspec.json.encode(chat), _Prompt).prompt)

    def text(self, tokens: list[int]) -> str:
        return self._post("/detokenize", msgspec.json.encode({"tokens": tokens}), _Text).content

    def embedding(self, text: str, limit: int | None = None) -> tuple[Vector, int]:
        content = text if limit is None else self._first_tokens(text, limit if limit > 0 else self.limits.context - 1)
        body = {"input": [content], "encoding_format": "base64", "embd_normalize": self._norm}
        result = _decoded(self._server.handle_embeddings(msgspec.json.encode(body)), _Vectors)
        return np.frombuffer(base64.b64decode(result.data[0].embedding), "<f4"), result.usage.prompt_tokens

    def _first_tokens(self, text: str, limit: int) -> list[int]:
        """The tokens of a text, cut to `limit`."""
        tokens = self.tokens(text)
        if len(tokens) <= limit:
            return tokens
        body = {"content": text, "add_special": False}
        return cut(tokens, self._post("/tokenize", msgspec.json.encode(body), _Tokens).tokens, limit)

    def score(self, query: str, document: str) -> tuple[Vector, int]:
        body = {"query": query, "documents": [document]}
        result = _decoded(self._server.handle_rerank(msgspec.json.encode(body)), _Scores)
        return np.array([result.results[0].relevance_score], np.float32), result.usage.prompt_tokens

    def _post(self, path: str, body: bytes, kind: type[_Answer]) -> _Answer:
        return _decoded(self._answer(path, body), kind)

    def _answer(self, path: str, body: bytes) -> bytes:
        with closing(_Connection(self._socket)) as connection:
            connection.request("POST", path, body, {"Authorization": f"Bearer {self._key}"})
            return connection.getresponse().read()

    def close(self) -> None:
        """Ends the engine's thread and frees the model."""
        self._server = None
        os.close(self._socket)


def _decoded(text: bytes, kind: type[_Answer]) -> _Answer:
    refusal = msgspec.json.decode(text, type=_Refusal)
    if refusal.error is not None:
        raise InvalidRequest(f"llama.cpp: {refusal.error.message}")
    return msgspec.json.decode(text, type=kind)


class _Connection(http.client.HTTPConnection):
    """A connection to the engine's socket, through its descriptor."""

    def __init__(self, descriptor: int) -> None:
        super().__init__("localhost")
        self._descriptor = descriptor

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(f"/proc/self/fd/{self._descriptor}")


def _started(settings: LlamaCppSettings, key: str, verbosity: int) -> tuple[Any, int]:
    """The server, and a descriptor of its socket."""
    with tempfile.TemporaryDirectory(prefix="llamacpp-") as folder:
        path = Path(folder) / "http.sock"
        server = xllamacpp.Server(_parameters(settings, path, key, verbosity))
        return server, os.open(path, os.O_PATH | os.O_CLOEXEC)


class _Log:
    """The engine's log during a load: lines `TIME E FUNCTION: TEXT` on the standard error. A thread of the engine
    writes them, perhaps only after the load has failed."""

    def __init__(self) -> None:
        self._before = os.dup(2)
        reading, writing = os.pipe()
        os.dup2(writing, 2)
        os.close(writing)
        self._lines: list[str] = []
        self._has_error = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(reading,), name="engine log")
        self._reader.start()

    def _read(self, descriptor: int) -> None:
        with open(descriptor, errors="replace") as log:
            for line in log:
                self._lines.append(line.rstrip())
                if _ERROR_LINE.match(line):
                    self._has_error.set()

    def error(self, file: Path) -> str:
        """The first error. All lines so far are logged, without the folder of the file."""
        self._has_error.wait(_LATE_S)
        self.close()
        lines = [line.replace(str(file), file.name) for line in self._lines]
        for line in lines:
            log_message(line)
        errors = [" ".join(match[1].split()) for line in lines if (match := _ERROR_LINE.match(line))]
        return errors[0] if errors else "the log of the server has its messages"

    def close(self) -> None:
        if self._before < 0:
            return
        os.dup2(self._before, 2)
        os.close(self._before)
        self._before = -1
        self._reader.join()


def _parameters(settings: LlamaCppSettings, path: Path, key: str, verbosity: int) -> Any:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(settings.file)
    if settings.projector is not None:
        parameters.mmproj.path = str(settings.projector)
        parameters.mmproj_use_gpu = settings.gpu is not None
    parameters.n_parallel = settings.slots
    parameters.n_ctx = settings.context * settings.slots
    # Otherwise each slot has its part of the context; with these poolings, llama.cpp 2026.10 would then mix up the
    # texts of a step.
    parameters.kv_unified = settings.pooling in ("mean", "cls")
    parameters.ctx_shift = False
    parameters.n_batch = max(settings.prompt_batch, settings.slots)
    if settings.pooling:
        parameters.embedding = True
        parameters.pooling_type = getattr(
            xllamacpp.llama_pooling_type, f"LLAMA_POOLING_TYPE_{settings.pooling.upper()}"
        )
        parameters.n_batch = max(parameters.n_batch, settings.context)  # a text is computed in one step
    parameters.n_ubatch = parameters.n_batch
    for threads in (parameters.cpuparams, parameters.cpuparams_batch):
        threads.n_threads = settings.threads
    kind = xllamacpp.ggml_type[f"GGML_TYPE_{settings.cache_type.upper()}"]
    parameters.cache_type_k = parameters.cache_type_v = kind
    parameters.cache_ram_mib = settings.kept_prompts
    parameters.n_ctx_checkpoints = 0
    parameters.fit_params = False
    parameters.n_gpu_layers = settings.gpu_layers
    if settings.gpu is not None:
        parameters.main_gpu = settings.gpu
        parameters.split_mode = xllamacpp.llama_split_mode.LLAMA_SPLIT_MODE_NONE
    if settings.draft is not None:
        parameters.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        parameters.speculative.draft.mparams.path = str(settings.draft)
        parameters.speculative.draft.n_gpu_layers = settings.gpu_layers
    parameters.use_jinja = True
    if settings.chat_template:
        parameters.chat_template = settings.chat_template
    parameters.lora_adapters = [_adapter(path) for path in settings.adapters.values()]
    parameters.hostnames = [str(path)]
    parameters.api_keys = [key]
    parameters.n_threads_http = 1
    parameters.ui = False
    parameters.endpoint_slots = False
    parameters.verbosity = verbosity
    return parameters


def _adapter(path: Path) -> Any:
    adapter = xllamacpp.CommonAdapterLoraInfo()
    adapter.path = str(path)
    adapter.scale = 0.0  # for requests that name no adapter
    return adapter


def has_gpu() -> bool:
    """True if the installed library can use a GPU of this machine."""
    return any(device["type"].name.endswith("GPU") for device in xllamacpp.get_device_info())

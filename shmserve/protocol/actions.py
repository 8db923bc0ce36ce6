"""The table of actions: what a caller can ask of the server, with the roles, paths and calls that lead to it.

Queries and operations of clients (`Ask`), the endpoints of a gateway and their documentation are derived from it. A row
holds names only; each user of the table maps them to its handlers.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

_ANY = ("infer", "observe", "operate")
_READ = ("observe", "operate")
_OPERATE = ("operate",)
_INFER = ("infer",)
_MEMORY = ("infer", "operate")
_PAGE = ("page",)
_HEALTH = "grpc.health.v1.Health"


class Row(NamedTuple):
    name: str
    roles: tuple[str, ...]
    """Any of them is sufficient. Without roles, the action is denied."""
    summary: str = ""
    query: str = ""
    """The value of `Ask.what` that is sent to the broker. A row whose name is its query defines the query."""
    http: tuple[str, ...] = ()
    """Methods and paths. A segment in braces matches any text, and a part in brackets is optional."""
    grpc: tuple[str, ...] = ()
    """Methods of the service inference.GRPCInferenceService, or of another service that is named."""
    groups: tuple[str, ...] = ()
    """Triton's names of the restricted APIs whose headers the action needs. A page shows the data of several."""
    changes: bool = False
    """The action changes something or takes computing time. Such a query may have a body."""
    takes: str = ""
    """Name of the OpenAPI schema of the request body; "": no body."""
    gives: str = ""
    """Name of the OpenAPI schema of the response body; "": no body."""


class Action(str, Enum):
    """A member is equal to the name in its row."""

    row: Row

    def __new__(cls, *row: object) -> Action:
        """Enum unpacks the row, as it does with every tuple."""
        fields = Row(*row)  # type: ignore[arg-type]
        self = str.__new__(cls, fields.name)
        self._value_ = fields.name
        self.row = fields
        return self

    __hash__ = str.__hash__
    """Replaces Enum's hash, which is a Python function: every request looks up its action."""

    NONE = Row("", ())
    """The action of a request without a route."""
    # Paths are tried in the order of the rows, so the most frequent requests come first.
    INFER = Row(
        "infer",
        _INFER,
        "Run the model",
        http=("POST /v2/models/{model}[/versions/{version}]/infer",),
        grpc=("ModelInfer", "ModelStreamInfer"),
        groups=("inference",),
        changes=True,
        takes="InferRequest",
        gives="InferResponse",
    )
    GENERATE = Row(
        "generate",
        _INFER,
        "Run the model once, with plain JSON",
        http=("POST /v2/models/{model}[/versions/{version}]/generate",),
        groups=("inference",),
        changes=True,
        takes="Generate",
        gives="Generated",
    )
    GENERATE_STREAM = Row(
        "generate_stream",
        _INFER,
        "Run the model with plain JSON; each response is a server-sent event",
        http=("POST /v2/models/{model}[/versions/{version}]/generate_stream",),
        groups=("inference",),
        changes=True,
        takes="Generate",
        gives="Generated",
    )
    COMPLETIONS = Row(
        "completions",
        _INFER,
        "OpenAI-compatible: completions; with `stream`, as server-sent events",
        http=("POST /v1/completions",),
        groups=("inference",),
        changes=True,
        takes="Completion",
        gives="Choices",
    )
    CHAT_COMPLETIONS = Row(
        "chat_completions",
        _INFER,
        "OpenAI-compatible: chat completions; with `stream`, as server-sent events",
        http=("POST /v1/chat/completions",),
        groups=("inference",),
        changes=True,
        takes="Chat",
        gives="Choices",
    )
    RESPONSES = Row(
        "responses",
        _INFER,
        "OpenAI-compatible: responses, which are not kept; with `stream`, as server-sent events",
        http=("POST /v1/responses",),
        groups=("inference",),
        changes=True,
        takes="ResponseInput",
        gives="Response",
    )
    MESSAGES = Row(
        "messages",
        _INFER,
        "Anthropic-compatible: messages; with `stream`, as server-sent events",
        http=("POST /v1/messages",),
        groups=("inference",),
        changes=True,
        takes="Messages",
        gives="Message",
    )
    COUNT_TOKENS = Row(
        "count_tokens",
        _INFER,
        "Anthropic-compatible: the number of tokens of a message",
        http=("POST /v1/messages/count_tokens",),
        groups=("inference",),
        changes=True,
        takes="MessagesToCount",
        gives="InputTokens",
    )
    EMBEDDINGS = Row(
        "embeddings",
        _INFER,
        "OpenAI-compatible: embeddings",
        http=("POST /v1/embeddings",),
        groups=("inference",),
        changes=True,
        takes="TextsToEmbed",
        gives="EmbeddingList",
    )
    RERANK = Row(
        "rerank",
        _INFER,
        "Jina-compatible: documents, ordered by their relevance to a query",
        http=("POST /v1/rerank",),
        groups=("inference",),
        changes=True,
        takes="TextsToRank",
        gives="Ranking",
    )
    SCORE = Row(
        "score",
        _INFER,
        "vLLM-compatible: scores of pairs of texts",
        http=("POST /v1/score",),
        groups=("inference",),
        changes=True,
        takes="TextsToScore",
        gives="Scores",
    )
    TOKENIZE = Row(
        "tokenize",
        _INFER,
        "vLLM-compatible: the tokens of a prompt or a chat",
        http=("POST /tokenize",),
        groups=("inference",),
        changes=True,
        takes="TextToTokenize",
        gives="Tokens",
    )
    DETOKENIZE = Row(
        "detokenize",
        _INFER,
        "vLLM-compatible: the text of tokens",
        http=("POST /detokenize",),
        groups=("inference",),
        changes=True,
        takes="TokensToText",
        gives="Prompt",
    )
    TRANSCRIPTIONS = Row(
        "transcriptions",
        _INFER,
        "OpenAI-compatible: the text of recorded speech; with `stream`, as server-sent events",
        http=("POST /v1/audio/transcriptions",),
        groups=("inference",),
        changes=True,
        takes="Speech",
        gives="Transcription",
    )
    LIVE = Row(
        "live", _ANY, "Liveness", query="live", http=("GET /v2/health/live",), grpc=("ServerLive",), groups=("health",)
    )
    READY = Row(
        "ready",
        _ANY,
        "Readiness",
        query="ready",
        http=("GET /v2/health/ready",),
        grpc=("ServerReady", f"{_HEALTH}/Check", f"{_HEALTH}/Watch"),
        groups=("health",),
    )
    MODEL_READY = Row(
        "model_ready",
        _ANY,
        "Readiness of the model",
        query="ready",
        http=("GET /v2/models/{model}[/versions/{version}]/ready",),
        grpc=("ModelReady",),
        groups=("health",),
    )
    LOADED = Row(
        "loaded", _ANY, "Wait until no model is being loaded for the first time", query="loaded", groups=("health",)
    )
    METADATA = Row(
        "metadata",
        _ANY,
        "Server metadata: name, version and extensions",
        query="metadata",
        http=("GET /v2",),
        grpc=("ServerMetadata",),
        groups=("metadata",),
        gives="Server",
    )
    MODEL_METADATA = Row(
        "model_metadata",
        _ANY,
        "Model metadata: inputs and outputs",
        query="metadata",
        http=("GET /v2/models/{model}[/versions/{version}]",),
        grpc=("ModelMetadata",),
        groups=("metadata",),
        gives="Model",
    )
    OPENAPI = Row(
        "openapi",
        _ANY,
        "This document",
        http=("GET /v2/openapi.json", "GET /openapi.json"),
        groups=("metadata",),
        gives="Any",
    )
    MODEL_OPENAPI = Row(
        "model_openapi",
        _ANY,
        "The endpoints of the model as an OpenAPI document",
        http=("GET /v2/models/{model}[/versions/{version}]/openapi.json",),
        groups=("metadata",),
        gives="Any",
    )
    MODELS = Row(
        "models",
        _READ,
        "All models",
        query="models",
        http=("POST /v2/repository/index",),
        grpc=("RepositoryIndex",),
        groups=("model-repository",),
        takes="Filter",
        gives="Index",
    )
    CONFIG = Row(
        "config",
        _READ,
        "Model configuration",
        query="config",
        http=("GET /v2/models/{model}[/versions/{version}]/config",),
        grpc=("ModelConfig",),
        groups=("model-config",),
        gives="Any",
    )
    ORIGINS = Row(
        "origins",
        _READ,
        "Model configuration, and where each value comes from",
        query="origins",
        groups=("model-config",),
    )
    STATISTICS = Row(
        "statistics",
        _READ,
        "Statistics",
        query="statistics",
        http=("GET /v2/models/stats", "GET /v2/models/{model}[/versions/{version}]/stats"),
        grpc=("ModelStatistics",),
        groups=("statistics",),
        gives="Statistics",
    )
    METRICS = Row("metrics", _READ, "Metrics, in the Prometheus format", query="metrics", http=("GET /metrics",))
    ACTIVITY = Row(
        "activity",
        _READ,
        "Current activity, and the counters of all models",
        query="activity",
        groups=("model-repository", "statistics"),
    )
    REPORT = Row(
        "report",
        _READ,
        "An overview of one model",
        query="report",
        groups=("model-repository", "metadata", "model-config", "statistics"),
    )
    LOG = Row(
        "log",
        _READ,
        "Log settings",
        query="log",
        http=("GET /v2/logging",),
        grpc=("LogSettings",),
        groups=("logging",),
        gives="Settings",
    )
    TRACE = Row(
        "trace",
        _READ,
        "Trace settings",
        query="trace",
        http=("GET /v2[/models/{model}]/trace/setting",),
        grpc=("TraceSetting",),
        groups=("trace",),
        gives="Settings",
    )
    TRAFFIC = Row(
        "traffic",
        _READ,
        "Shares, aliases and shadows of the versions of a model",
        query="traffic",
        groups=("model-repository",),
    )
    TEXT_MODELS = Row(
        "text_models", _READ, "READY models that take text", query="text_models", groups=("model-repository",)
    )
    SERVICE = Row(
        "service",
        _READ,
        "Whether the server is out of service, and what is still in flight",
        query="service",
        groups=("health",),
    )
    LOGS = Row("logs", _OPERATE, "The latest records of the log", query="logs", groups=("logging",))
    LOAD = Row(
        "load",
        _OPERATE,
        "Load or reload the model",
        query="load",
        http=("POST /v2/repository/models/{model}/load",),
        grpc=("RepositoryModelLoad",),
        groups=("model-repository",),
        changes=True,
        takes="Load",
    )
    UNLOAD = Row(
        "unload",
        _OPERATE,
        "Unload the model",
        query="unload",
        http=("POST /v2/repository/models/{model}/unload",),
        grpc=("RepositoryModelUnload",),
        groups=("model-repository",),
        changes=True,
        takes="Unload",
    )
    NAMED_REPOSITORY = Row(
        "named_repository",
        _OPERATE,
        "Not supported: 501",
        http=(
            "POST /v2/repository/{repository}/index",
            "POST /v2/repository/{repository}/models/{model}/load",
            "POST /v2/repository/{repository}/models/{model}/unload",
        ),
        groups=("model-repository",),
        changes=True,
    )
    RESTART = Row(
        "restart",
        _OPERATE,
        "Restart the processes of a model",
        query="restart",
        groups=("model-repository",),
        changes=True,
    )
    ROLLBACK = Row(
        "rollback",
        _OPERATE,
        "Load the previous files of a model",
        query="rollback",
        groups=("model-repository",),
        changes=True,
    )
    SET_LOG = Row(
        "set_log",
        _OPERATE,
        "Change log settings",
        query="set_log",
        http=("POST /v2/logging",),
        groups=("logging",),
        changes=True,
        takes="Settings",
        gives="Settings",
    )
    SET_TRACE = Row(
        "set_trace",
        _OPERATE,
        "Change trace settings",
        query="set_trace",
        http=("POST /v2[/models/{model}]/trace/setting",),
        groups=("trace",),
        changes=True,
        takes="Settings",
        gives="Settings",
    )
    SET_TRAFFIC = Row(
        "set_traffic",
        _OPERATE,
        "Change shares, aliases and shadows",
        query="set_traffic",
        groups=("model-repository",),
        changes=True,
    )
    SET_SERVICE = Row(
        "set_service",
        _OPERATE,
        "Take the server out of service, or back",
        query="set_service",
        groups=("health",),
        changes=True,
    )
    RECORD = Row(
        "record", _OPERATE, "Record when each client sends requests", query="record", groups=("trace",), changes=True
    )
    OPENAI_MODELS = Row(
        "openai_models",
        _ANY,
        "OpenAI-compatible: language models and embedding models",
        query="text_models",
        http=("GET /v1/models",),
        groups=("model-repository",),
        gives="OpenAiModels",
    )
    OPENAI_MODEL = Row(
        "openai_model",
        _ANY,
        "OpenAI-compatible: one of them",
        query="text_models",
        http=("GET /v1/models/{model}",),
        groups=("model-repository",),
        gives="OpenAiModel",
    )
    MEMORY_STATUS = Row(
        "memory_status",
        _MEMORY,
        "Registered shared memory regions",
        http=(
            "GET /v2/systemsharedmemory[/region/{region}]/status",
            "GET /v2/cudasharedmemory[/region/{region}]/status",
        ),
        grpc=("SystemSharedMemoryStatus", "CudaSharedMemoryStatus"),
        groups=("shared-memory",),
        gives="Regions",
    )
    MEMORY_REGISTER = Row(
        "memory_register",
        _MEMORY,
        "Register a shared memory region of the client",
        http=(
            "POST /v2/systemsharedmemory/region/{region}/register",
            "POST /v2/cudasharedmemory/region/{region}/register",
        ),
        grpc=("SystemSharedMemoryRegister", "CudaSharedMemoryRegister"),
        groups=("shared-memory",),
        changes=True,
        takes="Region",
    )
    MEMORY_UNREGISTER = Row(
        "memory_unregister",
        _MEMORY,
        "Unregister a region, or all regions",
        http=(
            "POST /v2/systemsharedmemory[/region/{region}]/unregister",
            "POST /v2/cudasharedmemory[/region/{region}]/unregister",
        ),
        grpc=("SystemSharedMemoryUnregister", "CudaSharedMemoryUnregister"),
        groups=("shared-memory",),
        changes=True,
    )
    PAGE_FILE = Row(
        "page_file",
        _PAGE,
        "A file of the web page: code and style sheets, which contain no data",
        http=("GET /", "GET /docs", "GET /page/{file}", "GET /page/{folder}/{file}"),
    )
    PAGE_EVENTS = Row(
        "page_events",
        _PAGE,
        "The event stream of the web page",
        query="activity",
        http=("GET /page/events",),
        groups=("model-repository", "statistics"),
    )
    PAGE_PREFLIGHT = Row(
        "page_preflight",
        (),
        "A browser's CORS preflight: may the page of another server read the event stream?",
        http=("OPTIONS /page/events",),
    )
    PAGE_HISTORY = Row(
        "page_history",
        (*_PAGE, *_READ),
        "The last hour of the server, or of a version",
        http=("GET /page/history[/{model}/versions/{version}]",),
        groups=("model-repository", "statistics"),
    )
    PAGE_MODEL = Row(
        "page_model",
        _PAGE,
        "The web page's report on a model",
        query="report",
        http=("GET /page/model/{model}[/versions/{version}]",),
        groups=("model-repository", "metadata", "model-config", "statistics"),
    )

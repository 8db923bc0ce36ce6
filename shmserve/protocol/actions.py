"""The table of actions: what a caller can ask of the server, with the roles, paths and calls that lead to it.

Queries and operations of clients (`Ask`), the endpoints of a gateway and their documentation are derived from it. A row
holds names only; each user of the table maps them to its handlers.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

_ANY = ("infer", "observe", "operate")
_READ = ("observe", "operate")
_OPERATE = ("operate",)
_INFER = ("infer",)
_MEMORY = ("infer", "operate")
_PAGE = ("page",)
_HEALTH = "grpc.health.v1.Health"
_MODEL = "/v2/models/{model}[/versions/{version}]"
_REPOSITORY = ("model-repository",)
_ACTIVITY = (*_REPOSITORY, "statistics")
_REPORT = (*_REPOSITORY, "metadata", "model-config", "statistics")


class ActionRow(NamedTuple):
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


def _inference(
    name: str,
    summary: str,
    path: str,
    takes: str,
    gives: str,
    *,
    also: tuple[str, ...] = (),
    grpc: tuple[str, ...] = (),
) -> ActionRow:
    """An endpoint that runs a model. `also`: its other paths."""
    return ActionRow(
        name,
        _INFER,
        summary,
        http=tuple(f"POST {one}" for one in (path, *also)),
        grpc=grpc,
        groups=("inference",),
        changes=True,
        takes=takes,
        gives=gives,
    )


def _query(name: str, roles: tuple[str, ...], summary: str, groups: tuple[str, ...], **more: Any) -> ActionRow:
    """A query that the broker answers."""
    return ActionRow(name, roles, summary, query=name, groups=groups, **more)


def _operation(name: str, summary: str, groups: tuple[str, ...], **more: Any) -> ActionRow:
    """An operation that the broker runs for an operator."""
    return ActionRow(name, _OPERATE, summary, query=name, groups=groups, changes=True, **more)


class Action(str, Enum):
    """A member is equal to the name in its row."""

    row: ActionRow

    def __new__(cls, *row: object) -> Action:
        """Enum unpacks the row, as it does with every tuple."""
        fields = ActionRow(*row)  # type: ignore[arg-type]
        self = str.__new__(cls, fields.name)
        self._value_ = fields.name
        self.row = fields
        return self

    __hash__ = str.__hash__
    """Replaces Enum's hash, which is a Python function: every request looks up its action."""

    NONE = ActionRow("", ())
    """The action of a request without a route."""
    # Paths are tried in the order of the rows, so the most frequent requests come first.
    INFER = _inference(
        "infer",
        "Run the model",
        f"{_MODEL}/infer",
        "InferRequest",
        "InferResponse",
        grpc=("ModelInfer", "ModelStreamInfer"),
    )
    GENERATE = _inference(
        "generate", "Run the model once, with plain JSON", f"{_MODEL}/generate", "Generate", "Generated"
    )
    GENERATE_STREAM = _inference(
        "generate_stream",
        "Run the model with plain JSON; each response is a server-sent event",
        f"{_MODEL}/generate_stream",
        "Generate",
        "Generated",
    )
    COMPLETIONS = _inference(
        "completions",
        "OpenAI-compatible: completions; with `stream`, as server-sent events",
        "/v1/completions",
        "CompletionRequest",
        "Choices",
    )
    CHAT_COMPLETIONS = _inference(
        "chat_completions",
        "OpenAI-compatible: chat completions; with `stream`, as server-sent events",
        "/v1/chat/completions",
        "ChatRequest",
        "Choices",
    )
    RESPONSES = _inference(
        "responses",
        "OpenAI-compatible: responses, which are not kept; with `stream`, as server-sent events",
        "/v1/responses",
        "ResponsesRequest",
        "Response",
    )
    COUNT_INPUT_TOKENS = _inference(
        "count_input_tokens",
        "OpenAI-compatible: the number of tokens of the input of a response",
        "/v1/responses/input_tokens",
        "InputRequest",
        "InputTokens",
    )
    MESSAGES = _inference(
        "messages",
        "Anthropic-compatible: messages; with `stream`, as server-sent events",
        "/v1/messages",
        "MessagesRequest",
        "Message",
    )
    COUNT_TOKENS = _inference(
        "count_tokens",
        "Anthropic-compatible: the number of tokens of a message",
        "/v1/messages/count_tokens",
        "CountRequest",
        "InputTokens",
    )
    EMBEDDINGS = _inference(
        "embeddings", "OpenAI-compatible: embeddings", "/v1/embeddings", "EmbeddingRequest", "EmbeddingList"
    )
    RERANK = _inference(
        "rerank",
        "Jina- and Cohere-compatible: documents, ordered by their relevance to a query",
        "/v1/rerank",
        "RerankRequest",
        "Ranking",
        also=("/rerank", "/v2/rerank"),
    )
    SCORE = _inference(
        "score",
        "vLLM-compatible: scores of pairs of texts",
        "/v1/score",
        "ScoreRequest",
        "Scores",
        also=("/score",),
    )
    TOKENIZE = _inference(
        "tokenize", "vLLM-compatible: the tokens of a prompt or a chat", "/tokenize", "TokenizeRequest", "Tokens"
    )
    DETOKENIZE = _inference(
        "detokenize", "vLLM-compatible: the text of tokens", "/detokenize", "DetokenizeRequest", "Prompt"
    )
    TRANSCRIPTIONS = _inference(
        "transcriptions",
        "OpenAI-compatible: the text of recorded speech; with `stream`, as server-sent events",
        "/v1/audio/transcriptions",
        "TranscriptionRequest",
        "Transcription",
    )
    LIVE = _query("live", _ANY, "Liveness", ("health",), http=("GET /v2/health/live",), grpc=("ServerLive",))
    READY = _query(
        "ready",
        _ANY,
        "Readiness",
        ("health",),
        http=("GET /v2/health/ready", "GET /health"),
        grpc=("ServerReady", f"{_HEALTH}/Check", f"{_HEALTH}/Watch"),
    )
    MODEL_READY = ActionRow(
        "model_ready",
        _ANY,
        "Readiness of the model",
        query="ready",
        http=(f"GET {_MODEL}/ready",),
        grpc=("ModelReady",),
        groups=("health",),
    )
    LOADED = _query("loaded", _ANY, "Wait until no model is being loaded for the first time", ("health",))
    METADATA = _query(
        "metadata",
        _ANY,
        "Server metadata: name, version and extensions",
        ("metadata",),
        http=("GET /v2",),
        grpc=("ServerMetadata",),
        gives="Server",
    )
    MODEL_METADATA = ActionRow(
        "model_metadata",
        _ANY,
        "Model metadata: inputs and outputs",
        query="metadata",
        http=(f"GET {_MODEL}",),
        grpc=("ModelMetadata",),
        groups=("metadata",),
        gives="Model",
    )
    OPENAPI = ActionRow(
        "openapi",
        _ANY,
        "This document",
        http=("GET /v2/openapi.json", "GET /openapi.json"),
        groups=("metadata",),
        gives="Any",
    )
    MODEL_OPENAPI = ActionRow(
        "model_openapi",
        _ANY,
        "The endpoints of the model as an OpenAPI document",
        http=(f"GET {_MODEL}/openapi.json",),
        groups=("metadata",),
        gives="Any",
    )
    MODELS = _query(
        "models",
        _READ,
        "All models",
        _REPOSITORY,
        http=("POST /v2/repository/index",),
        grpc=("RepositoryIndex",),
        takes="Filter",
        gives="Index",
    )
    CONFIG = _query(
        "config",
        _READ,
        "Model configuration",
        ("model-config",),
        http=(f"GET {_MODEL}/config",),
        grpc=("ModelConfig",),
        gives="Any",
    )
    ORIGINS = _query("origins", _READ, "Model configuration, and where each value comes from", ("model-config",))
    STATISTICS = _query(
        "statistics",
        _READ,
        "Statistics",
        ("statistics",),
        http=("GET /v2/models/stats", f"GET {_MODEL}/stats"),
        grpc=("ModelStatistics",),
        gives="Statistics",
    )
    METRICS = _query("metrics", _READ, "Metrics, in the Prometheus format", (), http=("GET /metrics",))
    ACTIVITY = _query("activity", _READ, "Current activity, and the counters of all models", _ACTIVITY)
    REPORT = _query("report", _READ, "An overview of one model", _REPORT)
    LOG = _query(
        "log", _READ, "Log settings", ("logging",), http=("GET /v2/logging",), grpc=("LogSettings",), gives="Settings"
    )
    TRACE = _query(
        "trace",
        _READ,
        "Trace settings",
        ("trace",),
        http=("GET /v2[/models/{model}]/trace/setting",),
        grpc=("TraceSetting",),
        gives="Settings",
    )
    TRAFFIC = _query("traffic", _READ, "Shares, aliases and shadows of the versions of a model", _REPOSITORY)
    TEXT_MODELS = _query("text_models", _READ, "READY models that take text", _REPOSITORY)
    SERVICE = _query("service", _READ, "Whether the server is out of service, and what is still in flight", ("health",))
    LOGS = _query("logs", _OPERATE, "The latest records of the log", ("logging",))
    LOAD = _operation(
        "load",
        "Load or reload the model",
        _REPOSITORY,
        http=("POST /v2/repository/models/{model}/load",),
        grpc=("RepositoryModelLoad",),
        takes="Load",
    )
    UNLOAD = _operation(
        "unload",
        "Unload the model",
        _REPOSITORY,
        http=("POST /v2/repository/models/{model}/unload",),
        grpc=("RepositoryModelUnload",),
        takes="Unload",
    )
    NAMED_REPOSITORY = ActionRow(
        "named_repository",
        _OPERATE,
        "Not supported: 501",
        http=(
            "POST /v2/repository/{repository}/index",
            "POST /v2/repository/{repository}/models/{model}/load",
            "POST /v2/repository/{repository}/models/{model}/unload",
        ),
        groups=_REPOSITORY,
        changes=True,
    )
    RESTART = _operation("restart", "Restart the processes of a model", _REPOSITORY)
    ROLLBACK = _operation("rollback", "Load the previous files of a model", _REPOSITORY)
    SET_LOG = _operation(
        "set_log", "Change log settings", ("logging",), http=("POST /v2/logging",), takes="Settings", gives="Settings"
    )
    SET_TRACE = _operation(
        "set_trace",
        "Change trace settings",
        ("trace",),
        http=("POST /v2[/models/{model}]/trace/setting",),
        takes="Settings",
        gives="Settings",
    )
    SET_TRAFFIC = _operation("set_traffic", "Change shares, aliases and shadows", _REPOSITORY)
    SET_SERVICE = _operation("set_service", "Take the server out of service, or back", ("health",))
    RECORD = _operation("record", "Record when each client sends requests", ("trace",))
    OPENAI_MODELS = ActionRow(
        "openai_models",
        _ANY,
        "OpenAI-compatible: language models and embedding models",
        query="text_models",
        http=("GET /v1/models",),
        groups=_REPOSITORY,
        gives="OpenAiModels",
    )
    OPENAI_MODEL = ActionRow(
        "openai_model",
        _ANY,
        "OpenAI-compatible: one of them",
        query="text_models",
        http=("GET /v1/models/{model}",),
        groups=_REPOSITORY,
        gives="OpenAiModel",
    )
    MEMORY_STATUS = ActionRow(
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
    MEMORY_REGISTER = ActionRow(
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
    MEMORY_UNREGISTER = ActionRow(
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
    PAGE_FILE = ActionRow(
        "page_file",
        _PAGE,
        "A file of the web page: code and style sheets, which contain no data",
        http=("GET /", "GET /docs", "GET /page/{file}", "GET /page/{folder}/{file}"),
    )
    PAGE_EVENTS = ActionRow(
        "page_events",
        _PAGE,
        "The event stream of the web page",
        query="activity",
        http=("GET /page/events",),
        groups=_ACTIVITY,
    )
    PAGE_PREFLIGHT = ActionRow(
        "page_preflight",
        (),
        "A browser's CORS preflight: may the page of another server read the event stream?",
        http=("OPTIONS /page/events",),
    )
    PAGE_HISTORY = ActionRow(
        "page_history",
        (*_PAGE, *_READ),
        "The last hour of the server, or of a version",
        http=("GET /page/history[/{model}/versions/{version}]",),
        groups=_ACTIVITY,
    )
    PAGE_MODEL = ActionRow(
        "page_model",
        _PAGE,
        "The web page's report on a model",
        query="report",
        http=("GET /page/model/{model}[/versions/{version}]",),
        groups=_REPORT,
    )

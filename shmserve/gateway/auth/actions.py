"""What a client can request over HTTP and gRPC. Routes and calls map to an action; access rules refer to actions, never
to paths."""

from __future__ import annotations

from enum import Enum


class Action(str, Enum):
    NONE = ""
    """The action of a request without a route."""
    LIVE = "live"
    READY = "ready"
    MODEL_READY = "model_ready"
    METADATA = "metadata"
    MODEL_METADATA = "model_metadata"
    CONFIG = "config"
    STATISTICS = "statistics"
    INDEX = "index"
    METRICS = "metrics"
    INFER = "infer"
    GENERATE = "generate"
    GENERATE_STREAM = "generate_stream"
    LOAD = "load"
    UNLOAD = "unload"
    TRACE = "trace"
    SET_TRACE = "set_trace"
    LOG = "log"
    SET_LOG = "set_log"
    MEMORY_STATUS = "memory_status"
    MEMORY_REGISTER = "memory_register"
    MEMORY_UNREGISTER = "memory_unregister"
    NAMED_REPOSITORY = "named_repository"
    OPENAPI = "openapi"
    OPENAI_MODELS = "openai_models"
    OPENAI_MODEL = "openai_model"
    COMPLETIONS = "completions"
    CHAT_COMPLETIONS = "chat_completions"
    EMBEDDINGS = "embeddings"
    PAGE_FILE = "page_file"
    """A file of the web page: code and style sheets, which contain no data."""
    PAGE_EVENTS = "page_events"
    PAGE_PREFLIGHT = "page_preflight"
    """A browser's CORS preflight: may the page of another server read PAGE_EVENTS?"""
    PAGE_MODEL = "page_model"

    __hash__ = str.__hash__
    """Replaces Enum's hash, which is a Python function: every request looks up its action."""


INFER, GENERATE, GENERATE_STREAM = Action.INFER, Action.GENERATE, Action.GENERATE_STREAM
"""Module-level names, because reading an attribute of an Enum takes 0.2 us."""
TO_MODELS = (INFER, GENERATE, GENERATE_STREAM, Action.COMPLETIONS, Action.CHAT_COMPLETIONS, Action.EMBEDDINGS)
"""Requests that run a model."""
SHARED = frozenset((Action.PAGE_EVENTS, Action.PAGE_PREFLIGHT))
"""Actions allowed to the pages of other servers."""
PAGE = frozenset((Action.PAGE_FILE, Action.PAGE_MODEL, *SHARED))
CHANGES = frozenset((
    *TO_MODELS, Action.LOAD, Action.UNLOAD, Action.NAMED_REPOSITORY, Action.SET_TRACE, Action.SET_LOG,
    Action.MEMORY_REGISTER, Action.MEMORY_UNREGISTER,
))  # fmt: skip
"""Requests that change something or take computing time."""

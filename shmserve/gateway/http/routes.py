"""The routing table of the HTTP endpoints: method and path -> action.

Several paths may lead to the same action. Access rules refer to actions, not to paths.
"""

from __future__ import annotations

from collections import defaultdict
from urllib.parse import unquote

from msgspec import Struct

from shmserve.gateway.auth.actions import Action
from shmserve.gateway.kserve.plans import is_version
from shmserve.gateway.openai.errors import KIND as OPENAI
from shmserve.gateway.upstream.documents import Route


class Path(Struct, frozen=True):
    """`template`: the path, in which a segment in braces matches any text. `wants`: method -> action. `kind`: system or
    cuda, for paths of shared memory; openai."""

    template: str
    wants: dict[str, Action]
    kind: str = ""


_MODEL = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
_GET, _POST, _OPTIONS = "GET", "POST", "OPTIONS"


def _paths() -> list[Path]:
    """All paths; the first match wins."""
    paths = [
        Path("/v2", {_GET: Action.METADATA}),
        Path("/v2/openapi.json", {_GET: Action.OPENAPI}),
        Path("/v2/health/live", {_GET: Action.LIVE}),
        Path("/v2/health/ready", {_GET: Action.READY}),
        Path("/v2/models/stats", {_GET: Action.STATISTICS}),
        Path("/v2/models/{model}/trace/setting", {_GET: Action.TRACE, _POST: Action.SET_TRACE}),
    ]
    for model in _MODEL:
        paths += [
            Path(model, {_GET: Action.MODEL_METADATA}),
            Path(f"{model}/ready", {_GET: Action.MODEL_READY}),
            Path(f"{model}/config", {_GET: Action.CONFIG}),
            Path(f"{model}/stats", {_GET: Action.STATISTICS}),
            Path(f"{model}/infer", {_POST: Action.INFER}),
            Path(f"{model}/generate", {_POST: Action.GENERATE}),
            Path(f"{model}/generate_stream", {_POST: Action.GENERATE_STREAM}),
        ]
    paths += [
        Path("/v2/trace/setting", {_GET: Action.TRACE, _POST: Action.SET_TRACE}),
        Path("/v2/logging", {_GET: Action.LOG, _POST: Action.SET_LOG}),
        Path("/v2/repository/index", {_POST: Action.INDEX}),
        Path("/v2/repository/models/{model}/load", {_POST: Action.LOAD}),
        Path("/v2/repository/models/{model}/unload", {_POST: Action.UNLOAD}),
        Path("/v2/repository/{repository}/index", {_POST: Action.NAMED_REPOSITORY}),
        Path("/v2/repository/{repository}/models/{model}/load", {_POST: Action.NAMED_REPOSITORY}),
        Path("/v2/repository/{repository}/models/{model}/unload", {_POST: Action.NAMED_REPOSITORY}),
    ]
    for kind in ("system", "cuda"):
        memory = f"/v2/{kind}sharedmemory"
        paths += [
            Path(f"{memory}/status", {_GET: Action.MEMORY_STATUS}, kind),
            Path(f"{memory}/unregister", {_POST: Action.MEMORY_UNREGISTER}, kind),
            Path(f"{memory}/region/{{region}}/status", {_GET: Action.MEMORY_STATUS}, kind),
            Path(f"{memory}/region/{{region}}/register", {_POST: Action.MEMORY_REGISTER}, kind),
            Path(f"{memory}/region/{{region}}/unregister", {_POST: Action.MEMORY_UNREGISTER}, kind),
        ]
    return paths


OPENAI_PATHS = [
    Path("/v1/models", {_GET: Action.OPENAI_MODELS}, OPENAI),
    Path("/v1/models/{model}", {_GET: Action.OPENAI_MODEL}, OPENAI),
    Path("/v1/completions", {_POST: Action.COMPLETIONS}, OPENAI),
    Path("/v1/chat/completions", {_POST: Action.CHAT_COMPLETIONS}, OPENAI),
    Path("/v1/embeddings", {_POST: Action.EMBEDDINGS}, OPENAI),
]
KSERVE_PATHS = _paths()
PATHS = KSERVE_PATHS + OPENAI_PATHS
PAGE_PATHS = [
    Path("/", {_GET: Action.PAGE_FILE}),
    Path("/page/events", {_GET: Action.PAGE_EVENTS, _OPTIONS: Action.PAGE_PREFLIGHT}),
    Path("/page/{file}", {_GET: Action.PAGE_FILE}),
    Path("/page/model/{model}", {_GET: Action.PAGE_MODEL}),
    Path("/page/model/{model}/versions/{version}", {_GET: Action.PAGE_MODEL}),
    Path("/page/{folder}/{file}", {_GET: Action.PAGE_FILE}),
]
"""Paths of the web page, which are not part of the API."""
METRICS = [Path("/metrics", {_GET: Action.METRICS})]
"""The only path of the metrics endpoint."""


class NoRoute(Struct, frozen=True):
    """The response to a request without a route. `allow`: the methods of the path, if another was used."""

    status: int
    text: str
    allow: str = ""


UNKNOWN = NoRoute(404, "Not Found")
RouteTable = dict[int, list[tuple[list[str], Path]]]
"""Number of segments -> the paths with that many, each with its segments."""


def _by_length(paths: list[Path]) -> RouteTable:
    table: RouteTable = defaultdict(list)
    for path in paths:
        words = path.template.strip("/").split("/")
        table[len(words)].append((words, path))
    return dict(table)


API_ROUTES, METRICS_ROUTES = _by_length(PATHS + PAGE_PATHS), _by_length(METRICS)
KSERVE_ROUTES = _by_length(KSERVE_PATHS + PAGE_PATHS)
"""Routes with the OpenAI-compatible endpoints switched off."""


def resolve(method: str, target: str, routes: RouteTable = API_ROUTES) -> Route | NoRoute:
    """Finds the route of a request. `target`: as received, percent-encoded."""
    path = target.partition("?")[0].partition("#")[0]
    try:
        words = [unquote(word, errors="strict") for word in path.strip("/").split("/")]
    except UnicodeDecodeError:
        return NoRoute(400, "the path is not UTF-8")
    for template, found in routes.get(len(words), ()):
        if all(wanted == word or wanted.startswith("{") for wanted, word in zip(template, words, strict=True)):
            return _route(method, found, dict(zip(template, words, strict=True)))
    return UNKNOWN


def _route(method: str, path: Path, words: dict[str, str]) -> Route | NoRoute:
    """`words`: segment of the template -> segment of the request."""
    action = path.wants.get(method)
    if action is None:
        methods = list(path.wants)
        return NoRoute(405, f"Method Not Allowed: use {' or '.join(methods)}", ", ".join(methods))
    if action is Action.NAMED_REPOSITORY:
        return Route(action)
    if action is Action.PAGE_FILE:
        names = [words[name] for name in ("{folder}", "{file}") if name in words]
        return Route(action, "/".join(names))
    version = words.get("{version}")
    if version is not None and not is_version(version):
        return NoRoute(400, f"version '{version[:40]}' in the path is not an integer of at least 1")
    if words.get("{model}") == "":
        return NoRoute(400, "the name of the model is missing in the path")
    return Route(action, words.get("{model}") or words.get("{region}") or "", version or "", kind=path.kind)

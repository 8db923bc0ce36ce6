"""The routing table of the HTTP endpoints: method and path -> action. It is derived from the table of actions."""

from __future__ import annotations

import re
from collections import defaultdict
from urllib.parse import unquote

from msgspec import Struct

from shmserve.gateway.auth.actions import PAGE
from shmserve.gateway.kserve.plans import is_version
from shmserve.gateway.openai.errors import KIND as OPENAI
from shmserve.gateway.upstream.documents import Route
from shmserve.protocol.actions import Action
from shmserve.protocol.roles import QUERIES


class Path(Struct, frozen=True):
    """`template`: the path, in which a segment in braces matches any text. `actions`: method -> action. `kind`:
    `system` or `cuda` for paths of shared memory, OPENAI or QUERY; empty for others."""

    template: str
    actions: dict[str, Action]
    kind: str = ""


_OPTIONAL = re.compile(r"\[(.*?)\]")


def _paths() -> list[Path]:
    paths: dict[str, Path] = {}
    for action in Action:
        for method, _, text in (endpoint.partition(" ") for endpoint in action.row.http):
            for template in dict.fromkeys((_OPTIONAL.sub("", text), _OPTIONAL.sub(r"\1", text))):
                paths.setdefault(template, Path(template, {}, _kind(template))).actions[method] = action
    return list(paths.values())


def _kind(template: str) -> str:
    if template.startswith(("/v1/", "/v2/rerank", "/rerank", "/score", "/tokenize", "/detokenize")):
        return OPENAI
    memory = re.match("/v2/(system|cuda)sharedmemory/", template)
    return memory[1] if memory else ""


QUERY = "query"
"""The kind of a path for a query or operation of clients, whose answer is that of the broker."""
_OF_MODEL = {Action.READY: Action.MODEL_READY, Action.METADATA: Action.MODEL_METADATA}
"""Queries that are another action, with access rules of its own, if they are about a model."""


def _query_paths() -> list[Path]:
    """What clients may ask over the lane, for commands over HTTP."""
    parts = ("", "/versions/{version}", "/models/{model}", "/models/{model}/versions/{version}")
    asked = [Action(what) for what in QUERIES if what != Action.METRICS]
    return [
        Path(f"/shmserve/{action.row.query}{part}", {"POST" if action.row.changes else "GET": wanted}, QUERY)
        for action in asked
        for part in parts
        for wanted in [_OF_MODEL.get(action, action) if "{model}" in part else action]
    ]


_PATHS = _paths()
QUERY_PATHS = [*_query_paths(), Path("/shmserve/metrics", {"GET": Action.METRICS})]
METRICS = [path for path in _PATHS if path.template == "/metrics"]
"""The only path of the metrics endpoint."""
PAGE_PATHS = [path for path in _PATHS if not PAGE.isdisjoint(path.actions.values())]
"""Paths of the web page, which are not part of the API."""
KSERVE_PATHS = [path for path in _PATHS if path.kind != OPENAI and path not in METRICS + PAGE_PATHS]
PATHS = KSERVE_PATHS + [path for path in _PATHS if path.kind == OPENAI]


class NoRoute(Struct, frozen=True):
    """The response to a request without a route. `allow`: the methods of the path, if another was used."""

    status: int
    text: str
    allow: str = ""


UNKNOWN = NoRoute(404, "Not Found")
RouteTable = dict[int, list[tuple[list[str], Path]]]
"""Number of segments -> the paths with that many, each with its segments. The first match wins."""


def _by_length(paths: list[Path]) -> RouteTable:
    table: RouteTable = defaultdict(list)
    for path in paths:
        words = path.template.strip("/").split("/")
        table[len(words)].append((words, path))
    for paths_of_length in table.values():  # a literal segment goes before one that matches any text
        paths_of_length.sort(key=lambda entry: [word.startswith("{") for word in entry[0]])
    return dict(table)


API_ROUTES, METRICS_ROUTES = _by_length(PATHS + PAGE_PATHS + QUERY_PATHS), _by_length(METRICS)
KSERVE_ROUTES = _by_length(KSERVE_PATHS + PAGE_PATHS + QUERY_PATHS)
"""Routes with the OpenAI-compatible endpoints switched off."""


def resolve(method: str, target: str, routes: RouteTable = API_ROUTES) -> Route | NoRoute:
    """Finds the route of a request. `target`: as received, percent-encoded."""
    path = target.partition("?")[0].partition("#")[0]
    try:
        words = [unquote(word, errors="strict") for word in path.strip("/").split("/")]
    except UnicodeDecodeError:
        return NoRoute(400, "the path is not UTF-8")
    for template, candidate in routes.get(len(words), ()):
        if all(wanted == word or wanted.startswith("{") for wanted, word in zip(template, words, strict=True)):
            return _route(method, candidate, dict(zip(template, words, strict=True)))
    return UNKNOWN


def _route(method: str, path: Path, words: dict[str, str]) -> Route | NoRoute:
    """`words`: segment of the template -> segment of the request."""
    action = path.actions.get(method)
    if action is None:
        methods = list(path.actions)
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

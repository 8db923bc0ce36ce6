"""The routing table of the HTTP endpoints: method and path -> action.

Several paths may lead to the same action. Access rules refer to actions, not to paths.
"""

from __future__ import annotations

from collections import defaultdict
from urllib.parse import unquote

from msgspec import Struct

from shmserve.gateway.kserve.plans import is_version
from shmserve.gateway.upstream.documents import Route


class Path(Struct, frozen=True):
    """`template`: the path, in which a segment in braces matches any text. `wants`: method -> action. `kind`: system or
    cuda, for paths of shared memory."""

    template: str
    wants: dict[str, str]
    kind: str = ""


_MODEL = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
_GET, _POST = "GET", "POST"


def _paths() -> list[Path]:
    """All paths; the first match wins."""
    found = [
        Path("/v2", {_GET: "metadata"}),
        Path("/v2/openapi.json", {_GET: "openapi"}),
        Path("/v2/health/live", {_GET: "live"}),
        Path("/v2/health/ready", {_GET: "ready"}),
        Path("/v2/models/stats", {_GET: "statistics"}),
        Path("/v2/models/{model}/trace/setting", {_GET: "trace", _POST: "set_trace"}),
    ]
    for model in _MODEL:
        found += [
            Path(model, {_GET: "model_metadata"}),
            Path(f"{model}/ready", {_GET: "model_ready"}),
            Path(f"{model}/config", {_GET: "config"}),
            Path(f"{model}/stats", {_GET: "statistics"}),
            Path(f"{model}/infer", {_POST: "infer"}),
            Path(f"{model}/generate", {_POST: "generate"}),
            Path(f"{model}/generate_stream", {_POST: "generate_stream"}),
        ]
    found += [
        Path("/v2/trace/setting", {_GET: "trace", _POST: "set_trace"}),
        Path("/v2/logging", {_GET: "log", _POST: "set_log"}),
        Path("/v2/repository/index", {_POST: "index"}),
        Path("/v2/repository/models/{model}/load", {_POST: "load"}),
        Path("/v2/repository/models/{model}/unload", {_POST: "unload"}),
        Path("/v2/repository/{repository}/index", {_POST: "named_repository"}),
        Path("/v2/repository/{repository}/models/{model}/load", {_POST: "named_repository"}),
        Path("/v2/repository/{repository}/models/{model}/unload", {_POST: "named_repository"}),
    ]
    for kind in ("system", "cuda"):
        memory = f"/v2/{kind}sharedmemory"
        found += [
            Path(f"{memory}/status", {_GET: "memory_status"}, kind),
            Path(f"{memory}/unregister", {_POST: "memory_unregister"}, kind),
            Path(f"{memory}/region/{{region}}/status", {_GET: "memory_status"}, kind),
            Path(f"{memory}/region/{{region}}/register", {_POST: "memory_register"}, kind),
            Path(f"{memory}/region/{{region}}/unregister", {_POST: "memory_unregister"}, kind),
        ]
    return found


PATHS = _paths()
METRICS = [Path("/metrics", {_GET: "metrics"})]
"""The only path of the metrics endpoint."""

UNKNOWN = Route("", status=404, text="Not Found")
_Table = dict[int, list[tuple[list[str], Path]]]
"""Number of segments -> the paths with that many, each with its segments."""


def _by_length(paths: list[Path]) -> _Table:
    found: _Table = defaultdict(list)
    for path in paths:
        words = path.template.strip("/").split("/")
        found[len(words)].append((words, path))
    return dict(found)


_PATHS, _METRICS = _by_length(PATHS), _by_length(METRICS)


def resolve(method: str, target: str, metrics: bool = False) -> Route:
    """Finds the route of a request; errors are routes with a status. `target`: as received, percent-encoded. `metrics`:
    the request came to the metrics endpoint."""
    path = target.partition("?")[0].partition("#")[0]
    try:
        words = [unquote(word, errors="strict") for word in path.strip("/").split("/")]
    except UnicodeDecodeError:
        return Route("", status=400, text="the path is not UTF-8")
    for template, found in (_METRICS if metrics else _PATHS).get(len(words), ()):
        if all(wanted == word or wanted[0] == "{" for wanted, word in zip(template, words, strict=True)):
            return _route(method, found, dict(zip(template, words, strict=True)))
    return UNKNOWN


def _route(method: str, path: Path, words: dict[str, str]) -> Route:
    """`words`: segment of the template -> segment of the request."""
    action = path.wants.get(method)
    if action is None:
        methods = list(path.wants)
        text = f"Method Not Allowed: use {' or '.join(methods)}"
        return Route("", status=405, text=text, allow=", ".join(methods))
    if action == "named_repository":
        return Route(action)
    version = words.get("{version}")
    if version is not None and not is_version(version):
        return Route("", status=400, text=f"version '{version[:40]}' in the path is not an integer of at least 1")
    if words.get("{model}") == "":
        return Route("", status=400, text="the name of the model is missing in the path")
    return Route(action, words.get("{model}") or words.get("{region}") or "", version or "", kind=path.kind)

"""The tables and diagrams of docs/ that are generated from tables in the source.

`make docs` (`python -m tests.support.docs.doc_tables`) writes them between the markers of their pages, and the terminal
recording of the home page; tests/unit/docs/test_docs.py checks that they are current.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from shmserve import errors
from shmserve.broker.observability import metric_definitions
from shmserve.core import limits
from shmserve.gateway.kserve.status import STATUSES
from shmserve.llm.figures import METRICS, Metric
from shmserve.protocol.actions import Action, ActionRow
from shmserve.repo import parameters
from shmserve.repo.config.support import TABLE, Status
from shmserve.repo.rules.onnx_options import PARAMETERS, OnnxOption
from shmserve.settings.flag import Flag, bytes_text
from shmserve.settings.limits import GATEWAY_LIMITS, GatewayLimits, Limit
from shmserve.settings.table import BY_NAME, ENDPOINTS, FLAGS, GROUPS, SERVER
from shmserve.workers.backends.onnx.options import SETTINGS
from tests import ROOT
from tests.support.docs import terminal

DOCS = ROOT / "docs"
_NAMES = """
id exit-timeout-secs model-store model-repository exit-on-error disable-auto-complete-config strict-readiness
model-control-mode repository-poll-secs load-model model-config-name model-load-thread-count model-load-retry-count
model-namespacing enable-peer-access allow-http http-address http-port reuse-http-port http-header-forward-pattern
http-thread-count http-max-input-size http-restricted-api allow-grpc grpc-address grpc-port reuse-grpc-port
grpc-header-forward-pattern grpc-infer-thread-count grpc-infer-allocation-pool-size grpc-max-response-pool-size
grpc-use-ssl grpc-use-ssl-mutual grpc-server-cert grpc-server-key grpc-root-cert grpc-infer-response-compression-level
grpc-keepalive-time grpc-keepalive-timeout grpc-keepalive-permit-without-calls grpc-http2-max-pings-without-data
grpc-http2-min-recv-ping-interval-without-data grpc-http2-max-ping-strikes grpc-max-connection-age
grpc-max-connection-age-grace grpc-restricted-protocol log-verbose log-info log-warning log-error log-format log-file
allow-sagemaker sagemaker-port sagemaker-safe-port-range sagemaker-thread-count allow-vertex-ai vertex-ai-port
vertex-ai-thread-count vertex-ai-default-model allow-metrics allow-gpu-metrics allow-cpu-metrics metrics-address
metrics-port metrics-interval-ms metrics-config trace-config cache-config cache-directory rate-limit
rate-limit-resource pinned-memory-pool-byte-size cuda-memory-pool-byte-size cuda-virtual-address-size
min-supported-compute-capability buffer-manager-thread-count host-policy model-load-gpu-limit allow-client-shm
backend-directory backend-config repoagent-directory strict-model-config response-cache-byte-size trace-file
trace-level trace-rate trace-count trace-log-frequency
"""
TRITON = _NAMES.split()
"""The flags of tritonserver."""
EVERY_MODEL = "all but ensembles"


class DocPart(NamedTuple):
    """The text between the markers `begin of NAME` and `end of NAME` in a page."""

    page: str
    name: str
    make: Callable[[], str]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)


def items(rows: Iterable[tuple[str, str, str]]) -> str:
    """A list of names, each with facts in parentheses (or none) and a text."""
    return "\n".join(f"- {name} ({facts}): {text}" if facts else f"- {name}: {text}" for name, facts, text in rows)


def sections(groups: Collection[str], made: Callable[[str], str]) -> str:
    return "\n\n".join(f"### {group}\n\n{made(group)}" for group in groups)


def _flags(group: str) -> str:
    return items((_names(flag), flag.default_text, flag.help_text) for flag in GROUPS[group] if not flag.private)


def _names(flag: Flag) -> str:
    name = f"`--{flag.name}{' ' + flag.metavar if flag.metavar else ''}`"
    return f"{name}, `--{flag.alias}`" if flag.alias else name


def _differences() -> str:
    return "\n".join(f"- `--{flag.name}`: {flag.default_text}; Triton: {flag.triton}." for flag in FLAGS if flag.triton)


def _flags_of_triton() -> str:
    """The flags that do something else here, or nothing. `_differences` lists those with other defaults."""
    unused = ", ".join(f"`--{name}`" for name in sorted(TRITON) if BY_NAME[name].note)
    refused = [
        (f"`--{name} true`", "refused", BY_NAME[name].refused) for name in sorted(TRITON) if BY_NAME[name].refused
    ]
    return f"{items(refused)}\n- accepted without effect, for the reason in the log: {unused}"


def _defaults_of_triton() -> str:
    rows = [(f"`--{flag.name}`", _value(flag.compatible)) for flag in FLAGS if flag.compatible is not None]
    return table(("Flag", "With `--triton-compatible`"), rows)


def _value(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _metrics(group: str) -> str:
    return items(
        (f"`{family.name}`", "; ".join([family.kind, *map(code, family.labels)]), family.help)
        for family in metric_definitions.FAMILIES
        if family.group == group
    )


def code(name: str) -> str:
    return f"`{name}`"


def _language_metrics() -> str:
    def facts(metric: Metric) -> str:
        label = "model_instance" if metric.by_instance else metric.label
        return "; ".join([metric.kind, *map(code, filter(None, [label])), f"{code(metric.key)} in statistics"])

    return items((code(metric.name), facts(metric), metric.help) for metric in METRICS)


def _paths() -> str:
    return items(
        (_endpoints(row), _access(row), row.summary) for row in _rows() if row.http and {*row.roles} - {"page"}
    )


def _calls() -> str:
    return items(
        (", ".join(code(name) for name in row.grpc if "." not in name), _access(row), row.summary)
        for row in _rows()
        if row.grpc
    )


def _rows() -> list[ActionRow]:
    return [action.row for action in Action]


def _access(row: ActionRow) -> str:
    """The roles that may use it, and the group with which it can be restricted."""
    roles = "any role" if row.roles == Action.LIVE.row.roles else " or ".join(row.roles)
    return "; ".join([roles, *row.groups])


def _endpoints(row: ActionRow) -> str:
    """As in `GET /v2/models/MODEL[/versions/N]`."""
    text = ", ".join("{} `{}`".format(*endpoint.split()) for endpoint in row.http)
    return re.sub(r"{(\w+)}", lambda match: "N" if match[1] == "version" else match[1].upper(), text)


def _limits(rows: Iterable[Limit], values: object) -> str:
    return items((code(row.name), size(row.name, getattr(values, row.name)), row.counts) for row in rows)


def size(name: str, value: int) -> str:
    """The value of a limit, with its unit."""
    return bytes_text(value) if name.endswith("_bytes") else str(value)


def _onnx(parameters: dict[str, OnnxOption]) -> str:
    return items((code(name), row.default or "the engine's", row.meaning) for name, row in parameters.items())


def _support() -> str:
    """The fields of each message; those of a message with the same note share a line."""
    messages: dict[str, dict[str, list[str]]] = {}
    for field, entry in TABLE.items():
        message, _, name = field.rpartition(".")
        status = "" if entry.status is Status.HONOURED else f"*{entry.status.value}*: "
        messages.setdefault(message, {}).setdefault(f"{status}{entry.note}", []).append(code(name))
    return "\n\n".join(
        f"`{message}`\n\n" + items((", ".join(names), "", note) for note, names in notes.items())
        for message, notes in messages.items()
    )


def _parameters(group: str) -> str:
    page = parameters.GROUPS[group]
    rows = items(
        (code(row.name), f"{row.kind.expected}; default: {row.default_text}", f"{row.help}{_models(row)}")
        for row in parameters.TABLE.values()
        if row.group == group
    )
    return f"See [{page.partition('#')[0]}]({page}).\n\n{rows}"


def _models(row: parameters.ServerParameter[Any]) -> str:
    """For which models, unless those are all but ensembles."""
    models = ", ".join(row.backends) or row.models
    return "" if models == EVERY_MODEL else f" For {models}."


def _errors() -> str:
    def rows(kind: type[errors.ServeError]) -> Iterable[tuple[str, ...]]:
        if kind is not errors.ServeError:
            http, grpc = STATUSES[kind.code]
            yield f"`{kind.__name__}`", f"`{kind.code}`", str(http), f"`{grpc}`", str(kind.__doc__)
        for child in kind.__subclasses__():
            if child.__module__ == errors.__name__:
                yield from rows(child)

    return table(("Exception", "Code", "HTTP", "gRPC", "Meaning"), rows(errors.ServeError))


def _peers() -> str:
    """The latest result of `make compare`, without its heading."""
    newest = max((ROOT / "bench" / "results").glob("*-peers.md"))
    heading, _, rest = newest.read_text().partition("\n- ")
    date = heading.partition(", ")[2].split()[0]
    return f"{date}, requests per second, median and (99th percentile) in ms:\n\n- {rest.strip()}"


def _tuned() -> str:
    """The result of `python -m bench.suites.tune simulated --write`: model, share of the best rate, share of time."""
    lines = (ROOT / "bench" / "results" / "tune.md").read_text().splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return table(("Model", "Rate", "Time"), [(row[0], row[4], row[7]) for row in rows])


PARTS = (
    DocPart("settings.md", "the flags", lambda: sections({**SERVER, **ENDPOINTS}, _flags)),
    DocPart("settings.md", "the differences", _differences),
    DocPart("settings.md", "Triton's flags", _flags_of_triton),
    DocPart("settings.md", "Triton's defaults", _defaults_of_triton),
    DocPart("metrics.md", "the metrics", lambda: sections(metric_definitions.GROUPS, _metrics)),
    DocPart("llm.md", "the metrics", _language_metrics),
    DocPart("security.md", "the limits", lambda: _limits(limits.NAMED, limits.Limits())),
    DocPart("security.md", "the limits of a gateway", lambda: _limits(GATEWAY_LIMITS, GatewayLimits())),
    DocPart("http.md", "the paths", _paths),
    DocPart("grpc.md", "the calls", _calls),
    DocPart("onnx.md", "the parameters", lambda: _onnx(PARAMETERS)),
    DocPart("onnx.md", "the settings", lambda: _onnx(SETTINGS)),
    DocPart("repository.md", "the fields", _support),
    DocPart("parameters.md", "the model parameters", lambda: sections(parameters.GROUPS, _parameters)),
    DocPart("errors.md", "the errors", _errors),
    DocPart("compare.md", "the result", _peers),
    DocPart("sizing.md", "the proof", _tuned),
)


def with_part(page: str, part: DocPart) -> str:
    """The text of a page with the current text of a part."""
    begin, end = f"<!-- begin of {part.name}: written by make docs -->", f"<!-- end of {part.name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    text, found = pattern.subn(lambda match: f"{begin}\n\n{part.make()}\n\n{end}", page)
    if found != 1:
        raise ValueError(f"{part.page} has {found} times the markers {begin} and {end}, expected once")
    return text


def main() -> None:
    for part in PARTS:
        page = DOCS / part.page
        page.write_text(with_part(page.read_text(), part))
    terminal.FILE.write_text(terminal.recording())


if __name__ == "__main__":
    main()

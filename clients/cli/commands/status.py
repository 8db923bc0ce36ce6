"""The read-only commands: models, stats, config."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from shmserve.clients.cli.commands import history
from shmserve.clients.cli.commands.base import connected, output
from shmserve.clients.cli.commands.operate import counts, instances_of
from shmserve.clients.waiting import failed_change
from shmserve.llm.figures import FIGURES, figures_of
from shmserve.terminal.console import BAD, FAINT, WARN, Column, Screen, faint, nonzero, state_style
from shmserve.terminal.errors import Failed, Misuse
from shmserve.terminal.tables import bytes_text, duration_text

if TYPE_CHECKING:
    from shmserve.clients.queries import BlockingQueries

US = 1000
"""Nanoseconds in a microsecond."""


def models(args: argparse.Namespace) -> int:
    with connected(args) as client:
        return output(
            args,
            lambda: _chosen(args.model, client.models()),
            lambda index, screen: models_text(index, args.instances, screen),
        )


def _chosen(names: Sequence[str], index: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The models with these names, which may be patterns such as 'p05*'; all if there are no names."""
    there = {entry["name"] for entry in index}
    for name in names:
        if name not in there and not any(fnmatchcase(other, name) for other in there):
            near = get_close_matches(name, there, 1)
            hint = f"; did you mean '{near[0]}'?" if near else "; `shmserve models` lists the models"
            raise Failed(f"unknown model '{name}'{hint}")
    return [
        entry for entry in index if not names or any(entry["name"] == n or fnmatchcase(entry["name"], n) for n in names)
    ]


def models_text(index: Sequence[Mapping[str, Any]], instances: bool, screen: Screen) -> str:
    if not index:
        return "no models: add one to the repository, which is read when the server starts"
    if not instances:
        return models_table(index, screen)
    rows = [row for entry in index for row in instance_rows(entry)]
    text = screen.table(INSTANCES, rows) if rows else "no model has a process"
    return "\n".join([text, *last_words(index)])


MODELS = (
    Column("model"),
    Column("version", right=True),
    Column("state", style=state_style),
    Column("instances", right=True, rank=1),
    Column("queued", right=True, style=nonzero(WARN)),
    Column("in flight", right=True),
    Column("pid", rank=5),
    Column("device", rank=3),
    Column("memory", right=True, rank=2),
    Column("loaded in", right=True, rank=4),
    Column("reason", free=True),
)
SHARE = Column("share", right=True)
INSTANCES = (
    Column("model", rank=2),
    Column("version", right=True, rank=1),
    Column("instance"),
    Column("state", style=state_style),
    Column("in flight", right=True, rank=2),
    Column("device", rank=4),
    Column("pid", right=True, rank=5),
    Column("memory", right=True, rank=3),
    Column("restarts", right=True, rank=1, style=nonzero(WARN)),
    Column("reason", free=True),
)


def models_table(index: Sequence[Mapping[str, Any]], screen: Screen) -> str:
    """The table of versions; the default version is marked if a model has several, and shares are shown if requests
    are divided."""
    versions = Counter(entry["name"] for entry in index)
    rows = [model_row(entry, versions[entry["name"]] > 1) for entry in index]
    columns: tuple[Column, ...] = MODELS
    if any(0 < entry.get("share", 0) < 100 for entry in index):
        columns = (*MODELS[:3], SHARE, *MODELS[3:])
        for row, entry in zip(rows, index, strict=True):
            several = versions[entry["name"]] > 1 and entry.get("share") is not None
            row.insert(3, f"{entry['share']:g} %" if several else "-")
    text = screen.table(columns, rows)
    marked = any(row[1].endswith("*") for row in rows)
    return f"{text}\n\n* default version" if marked else text


def model_row(entry: Mapping[str, Any], several: bool) -> list[str]:
    instances = instances_of(entry)
    ready, wanted = counts(instances)
    pids = [str(instance["pid"]) for instance in instances if instance["pid"]]
    memory = sum(instance["memory_bytes"] or 0 for instance in instances)
    seconds = entry.get("loading_seconds") if entry["state"] in ("READY", "LOADING") else None
    state = entry["state"] or "not loaded"
    if entry.get("degraded"):
        state += " (degraded)"
    elif entry.get("asleep"):
        state += " (asleep)"
    return [
        entry["name"],
        (entry["version"] or "-") + ("*" if several and entry.get("default") else ""),
        f"{state} (reloading)" if entry.get("reloading") else state,
        _instances(ready, wanted, entry.get("scaled")),
        f"{entry.get('queued', 0):,}",
        f"{entry.get('in_flight', 0):,}",
        _few(pids),
        _few(list(dict.fromkeys(map(_device, instances)))),
        bytes_text(memory) if memory else "-",
        duration_text(seconds) if seconds else "-",
        _reason(entry),
    ]


def _instances(ready: int, wanted: int, scaled: Sequence[int] | None) -> str:
    if not wanted:
        return "-"
    return f"{ready}/{wanted} ({scaled[0]}-{scaled[1]})" if scaled else f"{ready}/{wanted}"


def _reason(entry: Mapping[str, Any]) -> str:
    failed = entry.get("last_failed_change")
    changed = "changed on disk" if entry.get("changed_on_disk") else ""
    busy = [f"{i['name']} {busy_text(i['busy_seconds'])}" for i in instances_of(entry) if i.get("busy_seconds")]
    return "; ".join(text for text in (entry["reason"], *busy, failed and failed_change(failed), changed) if text)


def busy_text(seconds: float) -> str:
    return f"busy for {seconds:.0f} s"


def _few(texts: Sequence[str]) -> str:
    return " ".join(texts[:3]) + (f" +{len(texts) - 3}" if len(texts) > 3 else "") if texts else "-"


def _device(instance: Mapping[str, Any]) -> str:
    return f"gpu {instance['device']}" if instance["kind"] == "KIND_GPU" else "cpu"


def instance_rows(entry: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            entry["name"],
            entry["version"],
            instance["name"],
            _state(instance),
            f"{instance.get('in_flight', 0):,}",
            _device(instance),
            str(instance["pid"] or "-"),
            bytes_text(instance["memory_bytes"]) if instance["memory_bytes"] else "-",
            f"{instance['restarts']:,}",
            _attempt(instance),
        ]
        for instance in instances_of(entry)
    ]


def _state(instance: Mapping[str, Any]) -> str:
    notes = [note for note in ("passive", "quarantined") if instance.get(note)]
    notes += [busy_text(instance["busy_seconds"])] if instance.get("busy_seconds") else []
    return f"{instance['state']} ({', '.join(notes)})" if notes else str(instance["state"])


def _attempt(instance: Mapping[str, Any]) -> str:
    seconds = instance.get("retry_seconds")
    return f"{instance['reason']}; next attempt in {seconds:g} s" if seconds else str(instance["reason"])


def last_words(index: Sequence[Mapping[str, Any]]) -> list[str]:
    """The last output of the processes of instances that are not ready."""
    return [
        "\n".join([f"\n{entry['name']} version {entry['version']}, {instance['name']}, last output:", *words])
        for entry in index
        for instance in instances_of(entry)
        if (words := [f"  {line}" for line in instance.get("last_words", ())]) and instance["state"] != "ready"
    ]


def config(args: argparse.Namespace) -> int:
    """Prints the configuration with origins as text; the JSON is in Triton's format, for compatibility with its
    tools.
    """
    if args.origins and not args.json:
        raise Misuse("--origins needs --json; without --json the origins are always shown")
    with connected(args) as client:

        def ask() -> dict[str, Any]:
            if args.json and not args.origins:
                return client.config(args.model, args.version)
            result = client.origins(args.model, args.version)
            return {"config": result["config"], "origins": result["origins"]} if args.json else result

        return output(args, ask, lambda result, screen: config_text(result["text"].rstrip(), screen))


def config_text(text: str, screen: Screen) -> str:
    """Dims the origins, which are comments at the ends of lines."""
    lines = (line.partition("  # ") for line in text.split("\n"))
    return "\n".join(value + screen.styled(mark + origin, FAINT) for value, mark, origin in lines)


def stats(args: argparse.Namespace) -> int:
    if args.prometheus:
        if any((args.model, args.version, args.json, args.history, args.callers, args.watch)):
            raise Misuse("--prometheus covers the whole server and cannot be combined with a model or another format")
        with connected(args) as client:
            print(client.metrics(), end="")
        return 0
    if args.callers and (args.model or args.version or args.history):
        raise Misuse("--callers covers the whole server and cannot be combined with a model or --history")
    if args.version and not _is_one(args.model):
        raise Misuse("--version needs the name of one model")
    with connected(args) as client:
        if args.callers:
            return output(args, lambda: {"caller_stats": callers_of(client.activity())}, callers_text)
        if args.history:
            recorder = history.recorder_of(client)
            return output(args, lambda: history.read(recorder, _named(args, client)), history.text)
        rates = LanguageRates()

        def text(statistics: dict[str, Any], screen: Screen) -> str:
            return "\n".join([stats_text(statistics, screen), *rates.text(statistics, screen, time.monotonic())])

        return output(args, lambda: _statistics(args, client), text)


def _is_one(models: Sequence[str]) -> bool:
    """Whether the arguments are the name of one model, not a pattern."""
    return len(models) == 1 and not set("*?[").intersection(models[0])


def _statistics(args: argparse.Namespace, client: BlockingQueries) -> dict[str, Any]:
    if _is_one(args.model):
        return client.statistics(args.model[0], args.version)
    return {"model_stats": _chosen(args.model, client.statistics()["model_stats"])}


def _named(args: argparse.Namespace, client: BlockingQueries) -> list[tuple[str, str]]:
    entries = _statistics(args, client)["model_stats"] if args.model else []
    return [(entry["name"], entry["version"]) for entry in entries]


CALLERS = (
    Column("number", right=True),
    Column("caller", free=True),
    Column("queued", right=True, style=nonzero(WARN)),
    Column("in flight", right=True),
    Column("requests", right=True),
    Column("seconds", right=True),
    Column("mean us", right=True, rank=1),
)


def callers_of(activity: Mapping[str, Any]) -> list[dict[str, Any]]:
    keys = ("number", "user", "queued", "in_flight", "requests", "request_ns")
    return [{key: client[key] for key in keys} for client in activity["clients"] if "request_ns" in client]


def callers_text(document: Mapping[str, Any], screen: Screen) -> str:
    """Times are from arrival to the end, of all requests that have ended."""
    rows = [
        [
            str(entry["number"]),
            entry["user"] or "-",
            f"{entry['queued']:,}",
            f"{entry['in_flight']:,}",
            f"{entry['requests']:,}",
            f"{entry['request_ns'] / 1e9:,.1f}",
            f"{entry['request_ns'] / entry['requests'] / US:,.0f}" if entry["requests"] else "-",
        ]
        for entry in document["caller_stats"]
    ]
    return screen.table(CALLERS, rows)


STATS = (
    Column("model"),
    Column("version", right=True, rank=3),
    Column("queued", right=True, style=nonzero(WARN)),
    Column("in flight", right=True, rank=2),
    Column("requests", right=True),
    Column("failed", right=True, style=nonzero(BAD)),
    Column("batches", right=True, rank=4),
    Column("mean batch", right=True, rank=2),
    Column("queue us", right=True, rank=1),
    Column("compute us", right=True, rank=1),
    Column("batches formed because", free=True, style=faint),
)


def stats_text(statistics: Mapping[str, Any], screen: Screen) -> str:
    texts = [screen.table(STATS, [stats_row(entry) for entry in statistics["model_stats"]])]
    for entry in statistics["model_stats"]:
        if entry.get("elements"):
            texts.append(f"{entry['name']} version {entry['version']}: {padding_text(entry)}")
        if entry.get("stream_stats"):
            texts.append(f"{entry['name']} version {entry['version']}: {streams_text(entry['stream_stats'])}")
        for name, seconds in entry.get("busy", {}).items():
            texts.append(f"{entry['name']} version {entry['version']}: {name} is {busy_text(seconds)}")
    return "\n".join(texts)


class LanguageRates:
    """The figures of language models: since the version was loaded, then since the previous statistics (--watch)."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], Mapping[str, Any]] = {}
        self._at = 0.0

    def text(self, statistics: Mapping[str, Any], screen: Screen, now: float) -> list[str]:
        """A table, after an empty line; nothing without language models."""
        entries = {(entry["name"], entry["version"]): entry.get("language") for entry in statistics["model_stats"]}
        known = {key: one for key, one in entries.items() if one}
        values = [
            (*key, *map(_figure_text, figures_of(self._before.get(key), one, now - self._at).items()))
            for key, one in known.items()
        ]
        self._before, self._at = known, now
        return ["", screen.table(LANGUAGE, values)] if values else []


def _figure_text(figure: tuple[str, Any]) -> str:
    key, value = figure
    return "-" if value in (None, {}) else _FIGURE_TEXTS[_UNITS[key]](value)


_UNITS = {figure.key: figure.unit for figure in FIGURES}
_FIGURE_TEXTS: Mapping[str, Callable[[Any], str]] = {
    "count": lambda value: f"{value:,.0f}",
    "rate": lambda value: f"{value:,.1f}",
    "share": lambda value: f"{value:.0%}",
    "duration": duration_text,
    "counts": lambda value: ", ".join(f"{reason} {count:,.0f}" for reason, count in value.items()),
}
LANGUAGE = (
    Column("model"),
    Column("version", right=True, rank=20),
    *(
        Column(figure.head, right=figure.unit != "counts", free=figure.unit == "counts", rank=figure.rank)
        for figure in FIGURES
    ),
)


def streams_text(stats: Mapping[str, Any]) -> str:
    """The times of a decoupled model to the first response and between responses."""
    texts = []
    for name, label in (("first_response", "first response after"), ("between_responses", "between responses")):
        times = stats[name]
        if times["count"]:
            mean = duration_text(times["ns"] / times["count"] / 1e9)
            texts.append(f"{label} {mean} (mean), {duration_text(times['p95_ns'] / 1e9)} (p95)")
    return "; ".join(texts) or "no responses yet"


def padding_text(entry: Mapping[str, Any]) -> str:
    """The share of padding, and the number of batches cut to reduce it."""
    share = entry["padded_elements"] / entry["elements"]
    cut = entry.get("batch_reasons", {}).get("shape", 0)
    elements = f"{entry['elements']:,} elements (rows x padded length)"
    return f"{share:.1%} of {elements} were padding, {cut:,} batches were cut by shape"


def stats_row(entry: Mapping[str, Any]) -> list[str]:
    """The number of requests includes failed ones; the mean batch is in rows; times are means over successful
    requests."""
    times = entry["inference_stats"]
    good, failed, batches = times["success"]["count"], times["fail"]["count"], entry["execution_count"]
    compute = sum(times[part]["ns"] for part in ("compute_input", "compute_infer", "compute_output"))
    reasons = sorted(entry.get("batch_reasons", {}).items(), key=lambda item: -item[1])
    return [
        entry["name"],
        entry["version"],
        f"{entry.get('queued', 0):,}",
        f"{entry.get('in_flight', 0):,}",
        f"{good + failed:,}",
        f"{failed:,}",
        f"{batches:,}",
        f"{entry['inference_count'] / batches:.1f}" if batches else "-",
        f"{times['queue']['ns'] / good / US:,.0f}" if good else "-",
        f"{compute / good / US:,.0f}" if good else "-",
        ", ".join(f"{reason} {count:,}" for reason, count in reasons) or "-",
    ]

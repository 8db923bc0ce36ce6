"""Builds the answers to queries about the server and its models. Only reads the core's tables."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import msgspec

from shmserve import histogram
from shmserve.broker.admin import report
from shmserve.broker.models.catalog import Catalog
from shmserve.broker.models.remote_changes import RemoteChanges
from shmserve.core.core import Core
from shmserve.core.models import sizes
from shmserve.core.owners import activity
from shmserve.core.owners.model import Model
from shmserve.core.records import Instance, Version
from shmserve.core.states import UNLOADED, InstanceState, VersionState
from shmserve.core.stats.statistics import COUNTERS, Statistics
from shmserve.errors import Internal, InvalidRequest, NotFound, ServeError
from shmserve.llm.figures import with_queue
from shmserve.protocol.bodies import answers_of, pieces_of
from shmserve.protocol.messages import Answer, Ask, Fail
from shmserve.protocol.namespaces import plain
from shmserve.protocol.rates import MEMORY_STEP
from shmserve.protocol.roles import OPERATE, OPERATIONS, remove_private
from shmserve.repo.config.schema import as_triton_json
from shmserve.system import procfs

log = logging.getLogger("shmserve")

EXTENSIONS = (
    "classification",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "parameters",
    "sequence",
    "statistics",
    "trace",
    "logging",
)
"""Extensions of the KServe protocol that are supported."""
METRICS_PERIOD_S = 1.0
METRICS_SHARE = 0.05
"""Maximum share of the broker's time spent on building metrics."""
_PASSING = (VersionState.LOADING, VersionState.UNLOADING)
Shared = dict[tuple[str, str, int, bytes, bool], list[bytes]]


class ControlSettings(NamedTuple):
    """`strict`: ready only when every model is. `failed`: the initialization failed; the server is not live, and runs
    only so that operators can query the reason."""

    name: str
    version: str
    strict: bool
    failed: bool = False


class MetricsPage:
    """The metrics, as the texts of all providers in this order. Building them takes at most METRICS_SHARE of the time,
    if that is `limited`; beyond it, clients get the last text."""

    def __init__(
        self, providers: Sequence[Callable[[], str]], limited: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._providers = providers
        self._limited = limited
        self._clock = clock
        self._text = msgspec.Raw(b'""')
        self._spent = 0.0
        """Seconds since the budget was renewed."""
        self._renewal = 0.0

    def answer(self, _: Ask) -> msgspec.Raw:
        began = self._clock()
        if began >= self._renewal:
            self._renewal, self._spent = began + METRICS_PERIOD_S, 0.0
        if self._spent < METRICS_SHARE * METRICS_PERIOD_S or not self._limited:
            self._text = msgspec.Raw(msgspec.json.encode("".join([text() for text in self._providers])))
            took = self._clock() - began
            self._spent += took
            self._renewal = max(self._renewal, began + took / METRICS_SHARE)
        return self._text


class Control:
    """`process_of(peer)` returns the pid of a worker, and `memory_of(pid)` its proportional memory. `language()`: what
    engines of language models have counted, by model and version. `remote`: what is being downloaded."""

    def __init__(
        self,
        core: Core,
        catalog: Catalog,
        settings: ControlSettings,
        process_of: Callable[[int], int],
        memory_of: Callable[[int], int],
        language: Callable[[], dict[tuple[str, str], dict[str, Any]]],
        remote: RemoteChanges | None = None,
    ) -> None:
        self._changed_on_disk: Set[int] = frozenset()
        """The sources of versions that differ from the repository, as of the last check."""
        self._core = core
        self._catalog = catalog
        self._settings = settings
        self._process_of = process_of
        self._memory_of = memory_of
        self._language = language
        self._remote = remote
        self._answers: dict[str, Callable[[Ask], Any]] = {
            "live": lambda ask: {"live": not (self._settings.failed or self._core.state.draining)},
            "ready": self._ready,
            "loaded": lambda ask: {"loaded": True},
            "models": self._models,
            "metadata": self._metadata,
            "config": self._config,
            "origins": self._origins,
            "report": self._report,
            "statistics": self._statistics,
            "text_models": self._text_models,
        }

    def add(self, answers: Mapping[str, Callable[[Ask], Any]]) -> None:
        """Adds queries and small operations that other modules answer."""
        self._answers.update(answers)

    def answer(self, ask: Ask, roles: int, shared: Shared) -> Sequence[Answer | Fail]:
        """The messages of the answer, in order. `shared`: answers that are still valid, reused for equal queries."""
        operator = bool(roles & OPERATE)
        key = (ask.what, ask.model, ask.version, ask.body, operator)
        pieces = shared.get(key)
        if pieces is None:
            try:
                pieces = self._build(ask, operator)
            except ServeError as error:
                return [Fail(ask.request, error.code, error.message)]
            except Exception:
                log.exception("internal error in the query '%s'", ask.what)
                text = f"'{ask.what}' failed: internal error; the server's log has the details"
                return [Fail(ask.request, Internal.code, text)]
            if ask.what not in OPERATIONS:
                shared[key] = pieces
        return answers_of(ask.request, pieces)

    def _build(self, ask: Ask, operator: bool) -> list[bytes]:
        if ask.more:
            raise InvalidRequest(f"the body of '{ask.what}' is too long")
        document = self._answers[ask.what](ask)
        if not operator:
            remove_private(ask.what, document)
        return pieces_of(msgspec.json.encode(document))

    # ------------------------------------------------------------------------------------ queries

    def full_name(self, name: str) -> str:
        """The name with its namespace. Raises InvalidRequest if it is ambiguous."""
        return self._core.state.full_name(name)

    def serves(self, name: str) -> bool:
        """Whether a version serves requests for this model or alias."""
        return name in self._core.state.ready

    def server_ready(self) -> bool:
        """Whether the server is ready. Strict: every version is READY; otherwise: loading has finished. Ignores
        versions that are unloaded or being unloaded, and versions that load while others of their model are served."""
        states = [
            version.state
            for model in self._core.state.models.values()
            for version in model.versions.values()
            if version.reason != UNLOADED
            and version.state is not VersionState.UNLOADING
            and not (version.state is VersionState.LOADING and model.loads_while_served)
        ]
        stopping = self._core.state.draining or self._core.state.out_of_service
        if self._settings.failed or stopping or VersionState.LOADING in states or self._is_starting:
            return False
        # A model that continues to be served because its replacement cannot be read does not count.
        refused = any(model.reason and model.default() is None for model in self._core.state.models.values())
        all_ready = (
            not refused
            and (self._remote is None or self._remote.is_complete)
            and all(state is VersionState.READY for state in states)
        )
        return not self._settings.strict or all_ready

    @property
    def _is_starting(self) -> bool:
        """Whether models to load at start are being downloaded."""
        return self._remote is not None and self._remote.starting

    def _downloads(self) -> Mapping[str, str]:
        return self._remote.downloads() if self._remote is not None else {}

    def on_disk(self, changed: Set[int]) -> None:
        """Takes the result of a comparison with the repository."""
        self._changed_on_disk = changed

    def is_loading(self, name: str = "") -> bool:
        """Whether a model that was not served before is loading, so that callers that wait for loading must wait.
        `name`: only this model."""
        models = self._core.state.models
        chosen = models.values() if not name else [models[name]] if name in models else []
        return (not name and self._is_starting) or any(
            version.state is VersionState.LOADING
            for model in chosen
            if model.default() is None
            for version in model.versions.values()
        )

    def _versions(self) -> list[Version]:
        return [version for model in self._core.state.models.values() for version in model.versions.values()]

    def _ready(self, ask: Ask) -> Any:
        if not ask.model:
            ready, out_of_service = self.server_ready(), self._core.state.out_of_service
            settled = ready or (not out_of_service and self._are_settled(self._core.state.models.values()))
            return {"ready": ready, "settled": settled, "out_of_service": out_of_service}
        if ask.model not in self._core.state.models and ask.model in self._downloads():
            return {"ready": False, "settled": False}
        versions = self._find(ask)
        ready = any(version.healthy for version in versions)
        model = self._core.state.models[versions[0].model if versions else ask.model]
        # An ensemble may become READY when any other model does.
        ensemble = not self._core.state.ensembles.keys().isdisjoint(model.versions.values())
        others = self._core.state.models.values() if ensemble else (model,)
        failed = model.default() is None and _has_failed(model)
        return {"ready": ready, "settled": ready or (failed and self._are_settled(others))}

    def _are_settled(self, models: Iterable[Model]) -> bool:
        """Whether none of the models is being loaded, restarted or unloaded, so that no other version becomes READY
        without an operation."""
        return not self._core.state.draining and not any(
            model.operation is not None
            or any(version.state in _PASSING or version.recovering for version in model.generations())
            for model in models
        )

    def serving(self, ask: Ask) -> list[int]:
        """The workers of the model's READY instances."""
        try:
            versions = self._find(ask)
        except NotFound:
            return []
        return [
            instance.peer
            for version in versions
            for instance in version.instances
            if instance.state is InstanceState.READY and not instance.spec.passive
        ]

    def _models(self, ask: Ask) -> Any:
        return self.index()

    def about(self) -> dict[str, Any]:
        return {
            "name": self._settings.name,
            "version": self._settings.version,
            "ready": self.server_ready(),
            "out_of_service": self._core.state.out_of_service,
        }

    def index(self, chosen: Container[str] | None = None) -> list[dict[str, Any]]:
        """All versions of the chosen models, or of all, by name."""
        known, downloads, on_disk = self._core.state.models, self._downloads(), self._catalog.repositories.names
        index = [
            _without_version(name, "", "", downloads)
            for name in dict.fromkeys([*on_disk, *downloads])
            if name not in known and (chosen is None or name in chosen)
        ]
        for model in known.values():
            if chosen is not None and model.name not in chosen:
                continue
            default, shares = model.default(), model.shares_now()
            shown = [version for version in model.versions.values() if self._is_listed(version)]
            if not shown and (model.reason or model.name in on_disk or model.name in downloads):
                state = "UNAVAILABLE" if model.reason else ""
                index.append(_without_version(model.name, state, model.reason, downloads))
            for version in sorted(shown, key=lambda version: version.number):
                entry: dict[str, Any] = {
                    "name": model.name,
                    "version": str(version.number),
                    "state": version.state.value,
                    "reason": version.reason or _degraded(version) or downloads.get(model.name, ""),
                    "degraded": version.state is VersionState.READY and bool(version.degraded_reason),
                    "asleep": version.asleep,
                    "scaled": _scaled(version),
                    "default": version is default,
                    "share": shares.get(version.number, 0.0),
                    "loading_seconds": _loading_seconds(version),
                    "reloading": version.number in model.coming,
                    "changed_on_disk": version.state is VersionState.READY and version.source in self._changed_on_disk,
                    "last_failed_change": _failed_change(model) if version.state is VersionState.READY else None,
                }
                same_number = [other for other in model.generations() if other.number == version.number]
                generations = list(dict.fromkeys([version, *same_number]))
                entry["queued"] = activity.queued(generations)
                entry["in_flight"] = activity.in_flight(generations)
                entry["instances"] = [
                    self._instance(generation, instance)
                    for generation in generations
                    for instance in generation.instances
                ]
                index.append(entry)
        return sorted(index, key=lambda entry: entry["name"])

    def marks(self, gpu_bytes: Callable[[int], int]) -> Iterator[tuple[str, object]]:
        """The models with their marks. If the mark is the same, the model's entries and counters have not changed,
        except for CPU times and less than MEMORY_STEP of memory. None: they change as time passes."""
        known, downloads, on_disk = self._core.state.models, self._downloads(), self._catalog.repositories.names
        for name in dict.fromkeys([*on_disk, *downloads]):
            if name not in known:
                yield name, downloads.get(name, "")
        now = time.monotonic_ns()
        for name, model in known.items():
            yield name, self._mark_of(model, name in on_disk, downloads.get(name), gpu_bytes, now)

    def _mark_of(
        self, model: Model, is_on_disk: bool, download: str | None, gpu_bytes: Callable[[int], int], now: int
    ) -> list[object] | None:
        if model.coming or model.leaving or model.comparisons:
            return None
        mark: list[object] = [model.reason, model.failed, model.traffic, is_on_disk, download]
        for version in model.versions.values():
            version_mark = _mark(version, now)
            if version_mark is None:
                return None
            mark += version_mark
            mark.append(version.source in self._changed_on_disk)
            for instance in version.instances:
                if instance.peer:
                    pid = self._process_of(instance.peer)
                    mark.append(self._memory_of(pid) // MEMORY_STEP)
                    if instance.spec.kind == "KIND_GPU":
                        mark.append(gpu_bytes(pid))
        return mark

    def _is_listed(self, version: Version) -> bool:
        """Whether to list the version. An unloaded one is listed only while it could be loaded again."""
        return version.reason != UNLOADED or version.model in self._catalog.repositories.names

    def _instance(self, version: Version, instance: Instance) -> dict[str, Any]:
        pid = self._process_of(instance.peer) if instance.peer else 0
        used = procfs.usage(pid) if pid else procfs.NO_USAGE
        running, waiting, now = instance.running, instance.waiting, time.monotonic_ns()
        return {
            "name": instance.spec.name,
            "state": instance.state.value,
            "kind": instance.spec.kind,
            "device": instance.spec.device,
            "passive": instance.spec.passive,
            "pid": pid,
            "memory_bytes": self._memory_of(pid) if pid else 0,
            "cpu_seconds": used.cpu_seconds,
            "restarts": version.statistics.restarts.get(instance.spec.name, 0),
            "in_flight": activity.running(instance),
            "busy_seconds": round(activity.busy_ns(version, instance, now) / 1e9, 3),
            "batch_rows": running.rows if running is not None else 0,
            "batch_seconds": round(max(0, now - running.began) / 1e9, 6) if running is not None else 0.0,
            "waiting_rows": waiting.rows if waiting is not None else 0,
            "quarantined": instance.quarantined,
            "retry_seconds": _retry_seconds(instance),
            "reason": instance.reason,
            "last_words": instance.last_words.splitlines(),
        }

    def _find(self, ask: Ask) -> list[Version]:
        model = self._core.state.models.get(ask.model)
        if model is None and (aliased := self._core.state.ready.get(ask.model)) is not None:
            return [aliased]
        if model is None:
            known = ask.model in self._catalog.repositories.names
            hint = f", but it is in the repository: load it first (shmserve load {ask.model})" if known else ""
            raise NotFound(f"Request for unknown model: '{ask.model}' is not found{hint}")
        if not ask.version:
            default = model.default()
            return [default] if default else list(model.versions.values())
        version = model.versions.get(ask.version)
        if version is None:
            raise NotFound(f"Request for unknown model: '{ask.model}' version {ask.version} is not found")
        return [version]

    def _find_one(self, ask: Ask) -> Version:
        versions = self._find(ask)
        if not versions:
            reason = self._core.state.models[ask.model].reason
            raise NotFound(f"Request for unknown model: '{ask.model}' has no available versions: {reason}")
        latest = max(versions, key=lambda version: version.number)
        if latest.reason == UNLOADED:
            raise NotFound(
                f"Request for unknown model: '{ask.model}' has no available versions: it was unloaded; load it first "
                f"(shmserve load {ask.model})"
            )
        return latest

    def _metadata(self, ask: Ask) -> Any:
        if not ask.model:
            return {"name": self._settings.name, "version": self._settings.version, "extensions": EXTENSIONS}
        version = self._find_one(ask)
        config = self._catalog.config(version.source)
        policy = version.policy
        assert policy is not None
        models = self._core.state.models[version.model].versions
        served = sorted(number for number, other in models.items() if other.state is VersionState.READY)
        lead = (-1,) if policy.max_batch else ()
        return {
            "name": plain(version.model),
            "versions": [str(number) for number in served or [version.number]],
            "platform": config.platform or config.backend,
            "inputs": [{"name": t.name, "datatype": t.dtype, "shape": lead + t.dims} for t in policy.inputs],
            "outputs": [{"name": t.name, "datatype": t.dtype, "shape": lead + t.dims} for t in policy.outputs],
        }

    def _config(self, ask: Ask) -> Any:
        return self._catalog.config_json(self._find_one(ask).source)

    def _text_models(self, ask: Ask) -> Any:
        """Names and aliases of READY models with text inputs, each with the configuration of the version that it
        selects. `created`: when that version was loaded, in seconds since 1970. If the query names a model, only that
        one. `context`: the tokens that a text of a language model and its prompt may have."""
        now, language = time.time() - time.monotonic(), self._language()
        ready = self._core.state.ready
        chosen = (
            sorted(ready.items()) if not ask.model else [(name, ready[name]) for name in {ask.model} & ready.keys()]
        )
        return [
            {
                "name": name,
                "version": str(version.number),
                "created": int(now + version.began / 1e9),
                "context": language.get((version.model, str(version.number)), {}).get("context"),
                "config": self._catalog.config_json(version.source),
            }
            for name, version in chosen
            if version.policy is not None and any(tensor.dtype == "BYTES" for tensor in version.policy.inputs)
        ]

    def _origins(self, ask: Ask) -> Any:
        version = self._find_one(ask)
        origins, text = self._catalog.origins(version.source)
        return {"config": as_triton_json(self._catalog.config(version.source)), "origins": origins, "text": text}

    def _report(self, ask: Ask) -> Any:
        version = self._find_one(ask)
        origins = self._origins(ask)
        metadata = self._metadata(ask) if version.policy is not None else None
        warnings = self._catalog.warnings_about(version.source)
        return report.document(version, metadata, origins["config"], origins["text"], warnings)

    def _statistics(self, ask: Ask) -> Any:
        versions = self._find(ask) if ask.model else list(filter(self._is_listed, self._versions()))
        if ask.model and not ask.version:
            loaded = [
                one for one in self._core.state.models[ask.model].versions.values() if one.state is VersionState.READY
            ]
            versions = sorted(loaded, key=lambda version: version.number) or versions
        language = self._language()
        return {
            "model_stats": [
                self._version_statistics(version, language.get((version.model, str(version.number)), {}))
                for version in versions
            ]
        }

    def _memory_bytes(self, version: Version) -> int:
        """The proportional memory of all processes that run this version."""
        pids = [self._process_of(instance.peer) for instance in version.instances if instance.peer]
        return sum(self._memory_of(pid) for pid in pids if pid)

    def _version_statistics(self, version: Version, language: dict[str, Any]) -> dict[str, Any]:
        counted = version.statistics
        all_generations = self._core.state.models[version.model].generations()
        generations = [other for other in all_generations if other.number == version.number]
        last_ns = 0
        if counted.last_inference_ns:  # convert from the monotonic clock to wall-clock time
            last_ns = time.time_ns() - (time.monotonic_ns() - counted.last_inference_ns)
        queued = activity.queued(generations)
        return {
            "name": plain(version.model),
            "version": str(version.number),
            "last_inference": last_ns // 1_000_000,
            **{counter.field: getattr(counted, counter.field) for counter in COUNTERS},
            "inference_stats": {
                "success": _duration(counted.success_count, counted.success_ns),
                "fail": _duration(counted.fail_count, counted.fail_ns),
                "queue": _duration(counted.success_count, counted.queue_ns),
                "compute_input": _duration(counted.success_count, counted.input_ns),
                "compute_infer": _duration(counted.success_count, counted.infer_ns),
                "compute_output": _duration(counted.success_count, counted.output_ns),
                "cache_hit": _duration(counted.cache_hits, counted.cache_hit_ns),
                "cache_miss": _duration(counted.cache_misses, counted.cache_miss_ns),
            },
            "response_stats": {
                str(index): {name: _duration(*getattr(count, name)) for name in count.__struct_fields__}
                for index, count in enumerate(counted.responses)
            },
            "stream_stats": _stream_stats(counted),
            "batch_stats": [
                {
                    "batch_size": rows,
                    "compute_input": _duration(batch.count, batch.input_ns),
                    "compute_infer": _duration(batch.count, batch.infer_ns),
                    "compute_output": _duration(batch.count, batch.output_ns),
                }
                for rows, batch in sorted(counted.batches.items())
            ],
            "memory_usage": [{"type": "CPU", "id": 0, "byte_size": self._memory_bytes(version)}],
            "batch_reasons": {reason.value: count for reason, count in counted.reasons.items()},
            "elements": counted.elements,
            "padded_elements": counted.padded_elements,
            "rejected": counted.rejected,
            "cancelled": counted.cancelled,
            "queued": queued,
            "in_flight": activity.in_flight(generations),
            "language": with_queue(language, queued, version.service.prompt_tokens) if language else {},
            "busy": {
                instance.spec.name: round(ns / 1e9, 3)
                for generation in generations
                for instance in generation.instances
                if (ns := activity.busy_ns(generation, instance, time.monotonic_ns()))
            },
        }


def _mark(version: Version, now: int) -> list[object] | None:
    """None: it has work, or a state with an age or a remaining time."""
    if version.state in _PASSING or version.users or version.waits:
        return None
    counted, slots = version.statistics, version.service.sequence_slots
    mark: list[object] = [
        version,
        version.state,
        version.reason,
        version.asleep,
        version.policy,
        slots.count if slots is not None else 0,
        _scaled(version),
        counted.success_count + counted.execution_count + counted.cache_hits + counted.cache_misses,
        *counted.failures,
        *counted.restarts.values(),
    ]
    for one in version.instances:
        if one.running is not None or one.waiting is not None or one.lease or one.streams or one.retry_at > now:
            return None
        flags = (one.quarantined, one.held, one.loaded, one.sleeping, one.retiring, one.joining)
        mark += (one, one.peer, one.state, one.reason, one.replaces, *flags)
    return mark


def _without_version(name: str, state: str, reason: str, downloads: Mapping[str, str]) -> dict[str, Any]:
    """The entry of a model without known versions, for example because it is being downloaded."""
    if name in downloads:
        state, reason = VersionState.LOADING.value, downloads[name]
    return {"name": name, "version": "", "state": state, "reason": reason}


def _degraded(version: Version) -> str:
    """For a READY version that lacks instances: how many serve, and why the others do not."""
    reason = version.degraded_reason if version.state is VersionState.READY else ""
    ready, wanted = version.counts
    return f"degraded, {ready} of {wanted} instances: {reason}" if reason else ""


def _loading_seconds(version: Version) -> float:
    if version.state is VersionState.LOADING:
        return round((time.monotonic_ns() - version.began) / 1e9, 3)
    return round(version.took_ns / 1e9, 3)


def _retry_seconds(instance: Instance) -> float:
    """Time until the instance restarts, or may be woken; 0: it may be woken now, or no restart is planned."""
    if instance.state not in (InstanceState.BACKOFF, InstanceState.ASLEEP):
        return 0.0
    return round(max(instance.retry_at - time.monotonic_ns(), 0) / 1e9, 1)


def _has_failed(model: Model) -> bool:
    """Whether the model should be served, but none of its versions can be."""
    wanted = [version for version in model.versions.values() if version.reason != UNLOADED]
    return bool(model.reason or wanted) and all(version.state is VersionState.UNAVAILABLE for version in wanted)


def _scaled(version: Version) -> list[int] | None:
    """The minimum and maximum number of instances of a version that is scaled automatically; None for others."""
    return list(sizes.bounds(version, version.scaler.policy)) if version.scaler is not None else None


def _failed_change(model: Model) -> dict[str, Any] | None:
    """Time (seconds since 1970) and reason of the last change if it failed, otherwise None."""
    if model.failed is None:
        return None
    seconds_ago = (time.monotonic_ns() - model.failed.at) / 1e9
    return {"time": round(time.time() - seconds_ago, 3), "reason": model.failed.reason}


def _stream_stats(counted: Statistics) -> dict[str, Any]:
    """Times of responses; empty unless the model is decoupled."""
    if counted.streams is None:
        return {}
    first, between = counted.streams.first, counted.streams.between
    return {
        name: {
            **_duration(times.count, times.sum_ns),
            **{f"p{share:g}_ns": round(histogram.quantile(times.counts, share / 100)) for share in (50, 95, 99)},
        }
        for name, times in (("first_response", first), ("between_responses", between))
    }


def _duration(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}

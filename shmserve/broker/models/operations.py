"""Operations on models that clients request. A thread reads the models; the core decides.

Invariant: the loop never waits for a disk.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence, Set
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shmserve.broker.models.catalog import Catalog
from shmserve.broker.models.differences import Differences
from shmserve.broker.models.ensemble_members import Companions, OperationDependencies, needs
from shmserve.broker.models.overrides import RestartBody, RollbackBody, UnloadBody, Upload
from shmserve.broker.models.reader import OperationJob, Reader, ReaderThread
from shmserve.broker.models.remote import NotDownloaded, RemoteModels
from shmserve.broker.models.repositories import KeptConfig, ModelReading
from shmserve.broker.observability.logs import log_record
from shmserve.core import effects, events
from shmserve.core.core import Core
from shmserve.core.models.deployment import OVERTAKEN
from shmserve.core.owners import activity
from shmserve.core.states import VersionState
from shmserve.errors import InvalidRequest, ServeError, Unavailable
from shmserve.protocol.bodies import answers_of, decode_body, pieces_of
from shmserve.protocol.messages import Ask, Fail

log = logging.getLogger("shmserve")

OPERATIONS = frozenset({"load", "unload", "restart", "rollback"})
ALWAYS = frozenset({"restart", "rollback"})
"""Operations allowed in every mode, as they serve nothing that was not served before."""
DEPLOYS = frozenset({"load", "rollback"})
"""Operations of which one at a time runs for a model; further ones are queued."""
LOADS = 16
"""Limit of operations queued for one model."""
UPLOADS = 16
"""Limit of bodies being received, for all clients together."""
REFUSED = "explicit model load / unload is not allowed"
POLLING = "if polling is enabled"
"""The rest of Triton's text, which Triton also uses in mode none."""


class LoadSettings(NamedTuple):
    """`place`: directory for the files of load calls. `mode`: of --model-control-mode. `compatible`: use Triton's
    texts, even where they are misleading."""

    place: Path
    mode: str = "none"
    compatible: bool = False


class ClientOperations:
    """`thread` reads the models. `put` passes an event to the core, `send` a message to a client. `remote`: the models
    of remote repositories."""

    def __init__(
        self,
        loop: Any,
        core: Core,
        catalog: Catalog,
        thread: ReaderThread,
        put: Callable[[Any], None],
        send: Callable[[int, Any], None],
        settings: LoadSettings,
        remote: RemoteModels | None = None,
    ) -> None:
        self._loop = loop
        self._core = core
        self._catalog = catalog
        self._repositories = catalog.repositories
        self._put = put
        self._send = send
        self._settings = settings
        self._remote = remote
        self.reader = Reader(loop, thread, remote, lambda model: bool(self._served(model)), self._failed)
        self._numbers = count(1)
        self._uploads: dict[tuple[int, int], tuple[Ask, Upload]] = {}
        self._jobs: dict[int, OperationJob] = {}
        self._deploys: dict[str, deque[tuple[OperationJob, Upload, bytes | None]]] = {}
        """Models with a load or rollback in progress -> those queued behind it."""
        self._replacing: dict[int, tuple[str, set[int]]] = {}
        """Operation -> the model, and the sources that were served when it began."""
        self._following: dict[int, tuple[str, float]] = {}
        """Operation -> the model that has changed on disk, and when that was seen."""
        self._name_waiters: list[Callable[[], None]] = []
        self._names_running = False
        self.untidy = False
        """Versions may have ended. Call `tidy` when the core has handled all events."""
        self._companions = Companions()
        self._dependencies = OperationDependencies()
        self._differences = Differences(loop, catalog.loaded)

    # ------------------------------------------------------------------------------------ requested by clients

    def handle(self, peer: int, ask: Ask) -> bool:
        """Handles an operation or a piece of its body. False: the query is not an operation."""
        begun = self._uploads.pop((peer, ask.request), None)
        if begun is None and ask.what not in OPERATIONS:
            return not ask.what  # a further piece of a refused body
        upload = None
        try:
            first, upload = begun or (ask, self._begin(ask.what))
            upload.add(ask.body)
            if ask.more:
                self._uploads[peer, ask.request] = (first, upload)
                return True
            self._start(OperationJob(peer, first, time.monotonic()), upload, ask.body if begun is None else None)
        except ServeError as error:
            if upload is not None:
                upload.close()
            self._send(peer, Fail(ask.request, error.code, error.message))
        return True

    def _begin(self, what: str) -> Upload:
        """Checks the operation when its first piece arrives, before receiving hundreds of megabytes."""
        if what not in ALWAYS and not self.explicit:
            mode = self._settings.mode
            why = POLLING if mode == "poll" or self._settings.compatible else f"in mode {mode}"
            raise Unavailable(f"{REFUSED} {why}; start the server with --model-control-mode explicit")
        if len(self._uploads) >= UPLOADS:
            raise Unavailable(
                f"{UPLOADS} load calls are already being received; try again when one of them is complete"
            )
        return Upload(self._settings.place, self._core.state.limits.override_bytes)

    def cancelled(self, peer: int, request: int) -> None:
        """Drops the partly received body of a cancelled operation."""
        begun = self._uploads.pop((peer, request), None)
        if begun is not None:
            begun[1].close()

    def peer_disconnected(self, peer: int) -> None:
        """Drops partly received bodies of a disconnected client. Its complete operations continue."""
        for key in [key for key in self._uploads if key[0] == peer]:
            self._uploads.pop(key)[1].close()

    def _start(self, job: OperationJob, upload: Upload, body: bytes | None) -> None:
        what, model = job.ask.what, job.ask.model
        if what in DEPLOYS:
            queued = self._deploys.get(model)
            if queued is not None:
                if len(queued) >= LOADS:
                    raise Unavailable(f"failed to {what} '{model}': {LOADS} operations are queued; try again later")
                queued.append((job, upload, body))
                return
        if what == "load":
            self._deploys[model] = deque()
            kept = self._catalog.kept_config(self._served(model))
            self.reader.load(lambda: self._read(model, upload, kept), lambda result: self._deploy(job, *result), job)
            return
        upload.close()
        if body is None:
            raise InvalidRequest(f"the body of '{what}' is too long")
        if what == "restart":
            instance: str = decode_body(body, RestartBody).instance
            self._put(events.Restart(model, job.ask.version, instance, self._register(job)))
            return
        if what == "rollback":
            decode_body(body, RollbackBody)
            self._deploys[model] = deque()
            self.reader.run(lambda: None, lambda _: self._roll_back(job), job)
            return
        options: UnloadBody = decode_body(body, UnloadBody)
        self._drop_queued(model)
        # Queue it in the thread, behind earlier loads.
        self.reader.run(lambda: None, lambda _: self._unload(job, options), job)

    def _start_next(self, ended: OperationJob) -> None:
        """Starts the next queued operation of a model when a load or rollback has ended."""
        if ended.ask.what not in DEPLOYS:
            return
        queued = self._deploys.pop(ended.ask.model)
        while queued and ended.ask.model not in self._deploys:
            job, upload, body = queued.popleft()
            try:
                self._start(job, upload, body)
            except ServeError as error:
                upload.close()
                self._send(job.peer, Fail(job.ask.request, error.code, error.message))
        if queued:
            self._deploys[ended.ask.model].extend(queued)

    def _drop_queued(self, model: str) -> None:
        """Fails queued operations, because the model is unloaded."""
        queued = self._deploys.get(model)
        while queued:
            job, upload, _ = queued.popleft()
            upload.close()
            text = f"failed to load '{model}': {OVERTAKEN}"
            self._send(job.peer, Fail(job.ask.request, Unavailable.code, text))

    def _unload(self, job: OperationJob, options: UnloadBody) -> None:
        number = self._register(job)
        self.reader.end_downloads(job.ask.model)
        same = [model.name for model in self._core.state.namesakes.get(job.ask.model, ())] or [job.ask.model]
        alone = [other for name in same for other in self._companions.unloaded(name)]
        for name in [*same, *(alone if options.unload_dependents else ())]:
            self._catalog.forget(name)
            self._put(events.Unload(name, number if name == same[0] else 0, options.force))
            if self._remote is not None and self.explicit:
                self._remote.release(name)
        if not options.wait:
            self.settled(effects.Settled(number))
        elif options.timeout is not None:
            remaining = max(0.0, job.began + options.timeout - time.monotonic())
            self._loop.call_later(remaining, self._unload_late, number, options.timeout)

    def _unload_late(self, number: int, seconds: float) -> None:
        job = self._jobs.pop(number, None)
        if job is None:
            return
        name = job.ask.model
        model = self._core.state.models.get(name)
        waits = activity.waits_for(model.generations(), time.monotonic_ns()) if model is not None else "nothing"
        text = (
            f"unload of '{name}' did not finish within {seconds:g} s and continues: waiting for {waits}; "
            f"to end them now, unload with force (shmserve unload --force {name})"
        )
        self._send(job.peer, Fail(job.ask.request, "DEADLINE_EXCEEDED", text))

    def _roll_back(self, job: OperationJob) -> None:
        """Deploys the versions that were served before the last load."""
        number = self._register(job)
        try:
            deploy = self._catalog.previous(job.ask.model, number, self._served(job.ask.model))
        except ServeError as error:
            self.settled(effects.Settled(number, error.code, error.message))
            return
        self._put_deploy(deploy)

    def _put_deploy(self, deploy: events.Deploy) -> None:
        """Passes a Deploy to the core, and records which served sources it replaces."""
        served = self._served(deploy.model)
        if served and served != {target.source for target in deploy.targets}:
            self._replacing[deploy.operation] = (deploy.model, served)
        self._put(deploy)

    def _served(self, name: str) -> set[int]:
        """The sources of the model's READY versions."""
        model = self._core.state.models.get(self._core.state.resolve(name))
        versions = model.versions.values() if model is not None else ()
        return {version.source for version in versions if version.state is VersionState.READY}

    def _register(self, job: OperationJob) -> int:
        number = next(self._numbers)
        self._jobs[number] = job
        return number

    def _read(
        self, model: str, upload: Upload, kept: KeptConfig | None
    ) -> tuple[list[ModelReading], list[tuple[str, ModelReading]]]:
        """The model, in each namespace that has it, and the models that ensembles among them need."""
        try:
            override = upload.unpack(self._settings.place, model)
            names = self._repositories.namesakes(model)
            readings = [self._repositories.read(name, override, kept, upload.versions) for name in names]
            result = readings, [pair for reading in readings for pair in needs(reading, self._repositories, names)]
        except NotDownloaded:  # retried after the download
            raise
        except BaseException:
            upload.close()
            raise
        upload.close()
        return result

    def _load_companions(self, needed: Collection[tuple[str, ModelReading]]) -> set[int]:
        """Deploys models that ensembles need and that are not served yet. Returns the operations in progress."""
        operations: set[int] = set()
        for ensemble, reading in needed:
            name = reading.scanned.name
            model = self._core.state.models.get(name)
            if model is not None and (model.operation is not None or model.default() is not None):
                self._companions.needed(name, ensemble)
                operations.update(model.operation.numbers[-1:] if model.operation is not None else ())
            else:
                log_record("info", f"also loading model '{name}', which '{ensemble}' needs", {"model": name})
                self._companions.loaded_for(name, ensemble)
                operations |= self.adopt(reading)
            for other in self._companions.replaced(name, ensemble):
                self._catalog.forget(other)
                self._put(events.Unload(other))
        return operations

    def _deploy(
        self, job: OperationJob, readings: Sequence[ModelReading], needed: Collection[tuple[str, ModelReading]]
    ) -> None:
        """Deploys the models that were read for a client's load, or reports why the first one cannot be served."""
        reading, *namesakes = readings
        scanned = reading.scanned
        self._warn(reading)
        text = self._catalog.failed_load(scanned)
        if text:
            for event in self._catalog.adopt(reading):
                self._put(event)
            log_record("error", text, {"model": scanned.name})
            self._send(job.peer, Fail(job.ask.request, "INVALID_ARG", text))
            self._start_next(job)
            return
        self._companions.requested(scanned.name)
        others = self._load_companions(needed)
        for other in namesakes:
            self._companions.requested(other.scanned.name)
            others |= self.adopt(other)
        job.warnings = job.notes + tuple(text for text, _ in self._catalog.warnings(reading))
        number = self._register(job)
        self._dependencies.add(number, others)
        served = self._catalog.configs(self._served(scanned.name))
        adopted = self._catalog.adopt(reading, number)
        sources = [target.source for event in adopted if isinstance(event, events.Deploy) for target in event.targets]
        job.changed = served != self._catalog.configs(sources)
        self._put_all(adopted)

    def _put_all(self, adopted: Collection[events.Deploy | events.Refuse]) -> None:
        for event in adopted:
            if isinstance(event, events.Deploy):
                self._put_deploy(event)
            else:
                self._put(event)

    def _warn(self, reading: ModelReading) -> None:
        for text, hint in self._catalog.warnings(reading):
            more = f" -> {hint}" if hint else ""
            log_record("warning", f"model '{reading.scanned.name}': {text}{more}", {"model": reading.scanned.name})

    def settled(self, effect: effects.Settled) -> None:
        """Reports a finished operation. The load of an ensemble finishes only when those of its models have."""
        for finished in self._dependencies.finish(effect):
            self._report(finished)

    def _report(self, effect: effects.Settled) -> None:
        job = self._jobs.pop(effect.operation, None)
        model_and_sources = self._replacing.pop(effect.operation, None)
        if model_and_sources is not None and not effect.code:
            self._catalog.replaced(*model_and_sources)
        self.untidy = True
        followed = self._following.pop(effect.operation, None)
        if followed is not None and not effect.code:  # the core logs failures
            name, since = followed
            text = f"model '{name}' serves the change after {time.monotonic() - since:.2f} s"
            log_record("info", text, {"model": name})
        if job is None:
            return
        self._answer(job, effect)
        self._start_next(job)

    def _answer(self, job: OperationJob, effect: effects.Settled) -> None:
        if effect.code:
            self._send(job.peer, Fail(job.ask.request, effect.code, effect.text))
            return
        model = self._core.state.models.get(self._core.state.resolve(job.ask.model))
        seconds = time.monotonic() - job.began
        versions = [
            {"version": str(version.number), "state": version.state.value, "seconds": round(version.took_ns / 1e9, 3)}
            for version in sorted(model.versions.values() if model else (), key=lambda version: version.number)
        ]
        text = f"{job.ask.what} of model '{job.ask.model}' finished in {seconds:.2f} s"
        log_record("info", text, {"model": job.ask.model, "operation": job.ask.what})
        answer = {"model": job.ask.model, "versions": versions, "changed": job.changed, "warnings": job.warnings}
        for message in answers_of(job.ask.request, pieces_of(msgspec.json.encode(answer))):
            self._send(job.peer, message)

    def _failed(self, job: OperationJob | None, error: Exception) -> None:
        """Reports an error to the job's client, or logs it if there is no job."""
        if job is None:
            log.error("cannot read the repositories; models are served unchanged", exc_info=error)
            return
        if isinstance(error, ServeError):
            code, text = error.code, error.message
        elif isinstance(error, OSError):
            code, text = "UNAVAILABLE", f"disk error: {error.strerror}"
        else:
            log.error("%s of model '%s' failed", job.ask.what, job.ask.model, exc_info=error)
            self._jobs = {number: known for number, known in self._jobs.items() if known is not job}
            code, text = "INTERNAL", "internal error; the server's log has the details"
        if not text.startswith("failed to"):
            text = f"failed to {job.ask.what} '{job.ask.model}': {text}"
        self._send(job.peer, Fail(job.ask.request, code, text))
        self._start_next(job)

    def tidy(self) -> None:
        """Prunes sources that no version uses. Do not call while a Deploy is queued, as no version uses its sources
        yet."""
        self.untidy = False
        if self.reader.closed:
            return
        versions = (version for model in self._core.state.models.values() for version in model.generations())
        self._catalog.prune(v.source for v in versions if not (v.gone and v.state is VersionState.UNAVAILABLE))
        if self._remote is not None:
            self._remote.drop_unused(self._catalog.trees())

    def compose(self, effect: effects.Compose) -> None:
        """Checks an ensemble with the versions that are served now."""
        models = self._core.state.models.values()
        served = [v for model in models for v in model.versions.values() if v.state is VersionState.READY]
        problem = self._catalog.compose(effect.source, served)
        self._put(events.Composed(effect.source, effect.number, problem))

    # ------------------------------------------------------------------------------------ deployment

    def begin(self, readings: Collection[ModelReading], needed: Collection[tuple[str, ModelReading]] = ()) -> None:
        """Deploys the models to serve from the start. `needed`: models that ensembles among them need."""
        for reading in readings:
            self._companions.requested(reading.scanned.name)
            self.adopt(reading)
        self._load_companions(needed)

    def follow(self, reading: ModelReading) -> None:
        """Deploys a model that has changed on disk."""
        name, now = reading.scanned.name, time.monotonic()
        log_record("info", f"model '{name}' has changed in the repository", {"model": name})
        self._following |= dict.fromkeys(self.adopt(reading), (name, now))

    def adopt(self, reading: ModelReading) -> set[int]:
        """Deploys or refuses a model that was read. Returns the operations that this starts."""
        self._warn(reading)
        adopted = self._catalog.adopt(reading, next(self._numbers))
        refused = {event.reason for event in adopted if isinstance(event, events.Refuse)}
        name = reading.scanned.name
        served = (model := self._core.state.models.get(name)) is not None and model.default() is not None
        for reason in refused.difference(reading.scanned.missing.values()):  # _warn has logged those
            text = f"model '{name}' is not served: {reason}"
            if served:
                text = f"load failed for model '{name}': {reason}; the previous version is still served"
            log_record("error", text, {"model": name})
        self._put_all(adopted)
        return {event.operation for event in adopted if isinstance(event, events.Deploy)}

    # ------------------------------------------------------------------------------------ models on disk

    @property
    def explicit(self) -> bool:
        return self._settings.mode == "explicit"

    def refresh_from_disk(self, then: Callable[[Set[int]], None]) -> None:
        """Lists the models on disk (in mode explicit), then calls `then` with the sources of the loaded versions that
        differ from the disk."""
        if self.explicit:
            self.names(lambda: self._differences.check(then))
        else:
            self._differences.check(then)

    def names(self, then: Callable[[], None]) -> None:
        """Lists the models on disk, then calls `then`. Only one listing runs at a time, as the thread also reads models
        for loads; it serves all callers that waited when it began."""
        self._name_waiters.append(then)
        if not self._names_running:
            self._list_names()

    def _list_names(self) -> None:
        if self._remote is not None:
            self._remote.list()
        waiters, self._name_waiters = self._name_waiters, []
        self._names_running = True

        def known(names: Collection[str]) -> None:
            self._names_running = False
            self._repositories.names = names
            for then in waiters:
                then()
            if self._name_waiters and not self._names_running:
                self._list_names()

        self.reader.run(self._names_now, known)

    def _names_now(self) -> Collection[str]:
        try:
            return self._repositories.names_now()
        except Exception:
            log.exception("cannot list the repositories; using the names from the last listing")
            return self._repositories.names

    def close(self) -> None:
        self._differences.close()
        for _, upload in self._uploads.values():
            upload.close()
        for queued in self._deploys.values():
            for _, upload, _ in queued:
                upload.close()
        self.reader.close()

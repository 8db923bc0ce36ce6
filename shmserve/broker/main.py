"""The broker process: settings, signals, start and stop. Exit codes: 0 stopped normally, 1 failed, 2 usage error."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from shmserve.broker.admin.activity import ActivityReport
from shmserve.broker.admin.queries import Control
from shmserve.broker.admin.service import ServiceControl
from shmserve.broker.config import settings as setting
from shmserve.broker.loop import Broker
from shmserve.broker.models.catalog import Catalog
from shmserve.broker.models.disk_changes import DiskChanges
from shmserve.broker.models.ensemble_members import needs
from shmserve.broker.models.poller import Poll
from shmserve.broker.models.remote import open_remote
from shmserve.broker.models.remote_changes import RemoteChanges
from shmserve.broker.models.repositories import Reading, Repositories
from shmserve.broker.models.traffic import TrafficControl
from shmserve.broker.observability import service_status
from shmserve.broker.observability.log_settings import LogSettings
from shmserve.broker.observability.logs import log_record, set_up
from shmserve.broker.observability.progress import LoadProgress, first_steps, hints
from shmserve.broker.observability.recent_records import RecentRecords
from shmserve.broker.observability.recordings import Recordings
from shmserve.broker.observability.traces import TraceFile, TraceSettings, otel_settings
from shmserve.broker.observability.traces import merged as merged_traces
from shmserve.broker.processes.cpus import survey
from shmserve.broker.processes.gateways import Gateways
from shmserve.broker.processes.gpus.monitor import GpuMonitor
from shmserve.broker.processes.span_exporter import SpanExporter
from shmserve.broker.processes.stop_deadline import Deadline
from shmserve.broker.startup import (
    AGENTS,
    GENERATIONS,
    CannotStart,
    RuntimeDir,
    find_gpus,
    gateway_settings,
    generations,
    model_files,
    require_exporter,
    worker_settings,
)
from shmserve.core import events
from shmserve.core.core import Core
from shmserve.errors import ServeError
from shmserve.paths import LANE, default_runtime_dir
from shmserve.repo.agents.chains import AgentChains
from shmserve.repo.backends import DIRECTORY
from shmserve.repo.check import repository_findings
from shmserve.repo.gpus import Gpus
from shmserve.repo.storage.generation import Generations
from shmserve.repo.storage.store import ScannedModel
from shmserve.shm.extents import posix
from shmserve.system.process import keep_freed_memory
from shmserve.system.service_manager import ServiceManager, of_this_process
from shmserve.terminal import streams
from shmserve.version import version

log = logging.getLogger("shmserve")

POLL_S = 0.05
"""Interval at which the end of the loads that SIGHUP started is polled."""


def main(argv: Sequence[str] | None = None) -> int:
    with streams.errors_in_one_line("shmserve serve"):  # parsing prints `--help`
        settings = setting.parse(sys.argv[1:] if argv is None else argv)
    try:
        return _start(settings)
    except KeyboardInterrupt:  # before `run` handles the signal
        print("shmserve: interrupted", file=sys.stderr)
        return 130


def _start(settings: argparse.Namespace) -> int:
    recent = RecentRecords()
    try:
        set_up(settings, recent)
    except OSError as error:
        print(f"shmserve: cannot write to --log-file {settings.log_file}: {error.strerror}", file=sys.stderr)
        return 1
    for text in settings.warnings:
        log.warning("%s", text)
    for text in settings.notes:
        log.info("%s", text)
    try:
        with RuntimeDir(settings.runtime_dir), contextlib.closing(of_this_process()) as manager:
            return _serve(settings, manager, recent)
    except CannotStart as error:
        print(f"shmserve: {error}", file=sys.stderr)
        return 1


class ServerProcess:
    """The whole server, from start to stop: broker, gateways, signal handlers and progress reports."""

    def __init__(self, settings: argparse.Namespace, loop: Any, manager: ServiceManager, recent: RecentRecords) -> None:
        self._settings = settings
        self._loop = loop
        self._exit_code = 0
        self._stopping = False
        self._drain_deadline = 0.0
        """Loop time at which requests in flight fail, once the server is stopping."""
        self._core = Core(f"shmserve {version()}", setting.limits(settings), settings.log_verbose > 1, survive=True)
        self._mode: str = settings.model_control_mode
        gpus = find_gpus()
        kept = generations(settings)
        place = settings.runtime_dir.absolute() / AGENTS
        self._agents = AgentChains(place, setting.agent_settings(settings), _agent_printed)
        cores = survey(setting.host_policies(settings), gpus.places())
        busy_poll_ns = setting.busy_poll_ns(cores)
        self._files = model_files(settings)
        self._gateways = self._make_gateways(settings, busy_poll_ns)
        self._remote = open_remote(loop, setting.remote_settings(settings), self._gateways.pids)
        self._repositories = self._make_repositories(settings, kept, gpus.numbers)
        self._catalog = Catalog(
            self._repositories,
            setting.backend_settings(settings),
            cores,
            resources=settings.rate_limit_resource if settings.rate_limit == "execution_count" else None,
            worker_defaults=setting.worker_defaults(settings),
        )
        self._control = self._make_control(settings)
        self._gpu_monitor = self._make_gpu_monitor(settings, gpus)
        self._broker = Broker(
            loop,
            self._core,
            self._catalog,
            self._control,
            runtime_dir=settings.runtime_dir,
            arena_bytes=settings.broker_arena_bytes,
            access=setting.access(settings, self._gateways.pids),
            workers=worker_settings(settings, gpus.uuids(), self._gpu_monitor.used_by, busy_poll_ns, self._is_ready),
            metrics=setting.metrics(settings),
            mode=self._mode,
            overrides_dir=settings.runtime_dir / GENERATIONS,
            other_children=self._gateways.pids,
            busy_poll_ns=busy_poll_ns,
            triton_compatible=settings.triton_compatible,
            remote=self._remote,
        )
        self._operations = self._broker.operations
        kept.discard = self._operations.discard
        self._agents.discard = self._operations.reader.submit
        self._control.process_of = self._broker.workers.process_of
        self._control.memory_of = self._broker.workers.memory.bytes_of
        self._disk_changes = DiskChanges(loop, self._core.state, self._catalog, self._operations, self._broker.put)
        self._remote_changes = self._follow_remote()
        self._progress = LoadProgress(self._core, self._loaded, log_record, self._is_downloading)
        self._control.metrics += [self._gpu_monitor.text, self._gateways.metrics]
        self._add_activity_query()
        self._span_exporter = self._make_span_exporter(settings)
        self._trace_file = self._add_setting_queries(settings, recent)
        self._pending_phases = {"models", "gateways"}
        """Startup phases that must finish before the server is ready."""
        self._rereads = 0
        """Number of repository scans started by SIGHUP that have not finished."""
        state = self._core.state
        self._announcer = service_status.Announcer(
            loop, manager, state.models.values, lambda: len(state.requests), lambda: state.out_of_service
        )
        self._service = self._make_service()

    def _make_gateways(self, settings: argparse.Namespace, busy_poll_ns: int) -> Gateways:
        return Gateways(
            self._loop,
            gateway_settings(settings, busy_poll_ns),
            f"unix://{settings.runtime_dir.absolute() / LANE}",
            settings.exit_timeout_secs,
            self._gateways_opened,
            self._gateways_failed,
            log_record,
        )

    def _make_gpu_monitor(self, settings: argparse.Namespace, gpus: Gpus) -> GpuMonitor:
        report = self._gpu_changed if settings.gpu_health else None
        interval_s = setting.metrics_interval_s(settings)
        return GpuMonitor(gpus.found, settings.allow_gpu_metrics, interval_s, report, settings.gpu_xid)

    def _make_repositories(
        self, settings: argparse.Namespace, kept: Generations, gpus: Collection[int]
    ) -> Repositories:
        return Repositories(
            [*settings.model_repository, *(self._remote.folders if self._remote is not None else ())],
            setting.backend_settings(settings).get(DIRECTORY, ""),
            settings.model_config_name,
            kept,
            gpus,
            self._files,
            self._agents,
        )

    def _follow_remote(self) -> RemoteChanges | None:
        remote = self._remote
        if remote is None:
            return None
        self._control.downloads = remote.downloads
        self._control.is_starting = self._is_downloading
        self._control.is_complete = lambda: not remote.unreadable
        remote.retired = self._schedule_tidy
        return RemoteChanges(remote, self._repositories, self._operations, self._disk_changes, self._downloaded)

    def _is_downloading(self) -> bool:
        """Whether models to serve from the start are being downloaded."""
        return self._remote_changes is not None and self._remote_changes.starting

    def _schedule_tidy(self) -> None:
        self._operations.untidy = True
        self._broker.put(events.Closed(0))  # a no-op event, for a turn

    def _downloaded(self) -> None:
        self._broker.put(events.Closed(0))  # a no-op event: after its turn, the server may be ready

    def _make_control(self, settings: argparse.Namespace) -> Control:
        control = Control(self._core, self._catalog, settings.id, version(), settings.strict_readiness)
        control.failed = bool(settings.failed)
        control.metrics_budget = settings.metrics_interval_ms > 0
        return control

    def _add_activity_query(self) -> None:
        control, gpus = self._control, self._gpu_monitor
        state, operations = self._core.state, self._operations

        def compare() -> None:
            operations.refresh_from_disk(lambda changed: setattr(control, "changed_on_disk", changed))

        def about() -> dict[str, Any]:
            return control.about() | {"ports": dict(self._gateways.ports)}

        report = ActivityReport(state, control.index, about, gpus.document, gpus.used_by, compare)
        control.add({"activity": lambda ask: report.document()})

    def _make_service(self) -> ServiceControl:
        service = ServiceControl(self._loop, self._core.state, self._broker.put, self._announcer.check_status)
        self._control.add(
            {"service": lambda ask: service.document(), "set_service": lambda ask: service.change(ask.body)}
        )
        return service

    def _make_span_exporter(self, settings: argparse.Namespace) -> SpanExporter | None:
        """Exports traces for OpenTelemetry, if that is the mode."""
        otel = otel_settings(settings.trace_config)
        if otel is None:
            return None
        require_exporter(otel.protocol)
        traces = self._core.state.observers.traces
        traces.contexts_per_second = otel.contexts_per_second
        exporter = SpanExporter(self._loop, otel, lambda: traces.contexts_over_limit, self._gateways.pids)
        self._control.metrics.append(exporter.metrics)
        return exporter

    def _add_setting_queries(self, settings: argparse.Namespace, recent: RecentRecords) -> TraceFile:
        """Registers the queries about log and traces. Returns the trace file."""
        state = self._core.state
        options = merged_traces(settings.trace_config)
        traces = TraceSettings(options, state.observers.traces.samples, state.models.keys)
        place = Path(options["trace_file"]).absolute() if "trace_file" in options else None
        file = TraceFile(self._loop, place, lambda model: traces.of(model).log_frequency or 0, self._broker.read)
        self._broker.traced = file.write if self._span_exporter is None else self._span_exporter.write
        recordings = Recordings(self._loop, state)
        traffic = TrafficControl(state, self._broker.put)
        logged = LogSettings(settings, lambda tracing: setattr(state, "tracing", tracing), recent)
        self._control.add(
            {
                "log": lambda ask: logged.document(),
                "logs": lambda ask: recent.document(ask.model, ask.version),
                "set_log": lambda ask: logged.change(ask.body),
                "trace": lambda ask: traces.document(ask.model),
                "set_trace": lambda ask: traces.change(ask.model, ask.body),
                "record": lambda ask: recordings.change(ask.body),
                "traffic": lambda ask: traffic.document(ask.model),
                "set_traffic": lambda ask: traffic.change(ask.model, ask.body),
            }
        )
        return file

    def run(self) -> int:
        # With a terminal as stdin, SIGHUP means that the terminal was closed; otherwise it requests a reload.
        hang_up = (self._stop, "SIGHUP") if os.isatty(0) else (self._reread,)
        self._loop.add_signal_handler(signal.SIGHUP, *hang_up)
        try:
            self._gpu_monitor.start()
            for number, reason in self._gpu_monitor.out_of_service().items():  # before the first model is deployed
                self._broker.put(events.DeviceHealth(number, reason))
            self._gateways.start()
            if self._span_exporter is not None:
                self._span_exporter.start()
            self._announcer.begin()
            self._begin_or_stop()
            self._broker.on_turn = self._on_turn
            self._broker.put(events.Closed(0))  # a no-op event, so that one turn runs even without models
            gc.collect()
            gc.freeze()
            gc.set_threshold(50_000, 20, 50)  # requests create no reference cycles
            self._loop.run_forever()
        finally:
            self._announcer.close()
            self._service.close()
            self._gateways.close()
            self._agents.interrupt()
            if self._remote is not None:
                self._remote.close()
            self._disk_changes.close()
            self._broker.close()
            self._agents.close()
            self._trace_file.close()
            if self._span_exporter is not None:
                self._span_exporter.close()
            self._gpu_monitor.close()
        return self._exit_code

    def _begin_or_stop(self) -> None:
        """Handles signals without the loop, which does not run yet, as repository agents may take long."""
        early: list[str] = []

        def interrupt(number: int, frame: object) -> None:
            early.append(signal.Signals(number).name)
            self._agents.interrupt()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupt)
        self._begin()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._stop, signal.Signals(number).name)
        if early:
            self._loop.call_soon(self._stop, early[0])

    def _begin(self) -> None:
        """Reads and deploys the models to serve initially."""
        settings = self._settings
        self._agents.recover()
        if settings.failed:
            for text in settings.failed:
                log.error("%s: serving no models; the server is neither live nor ready", text)
            self._operations.begin([])
            return
        for finding in [finding for root in settings.model_repository for finding in repository_findings(root)]:
            hint = f" -> {finding.hint}" if finding.hint else ""
            log.warning("%s: %s%s", finding.where, finding.text, hint)
        needed: list[tuple[str, Reading]] = []
        if self._mode == "poll" and settings.repository_poll_secs:
            poll = Poll(self._repositories, setting.settle_s(settings))
            changes = poll.check(at_start=True)
            readings, names = changes.readings, changes.names
            self._disk_changes.poll(poll, settings.repository_poll_secs, changes.recheck_s)
        else:
            names = self._repositories.names_on_disk()
            every = self._mode != "explicit" or settings.load_model == ["*"]
            if self._remote is not None and self._mode == "explicit":
                readings = []  # these models may need others that have to be downloaded
            elif every:
                readings = self._repositories.read_all()
            else:
                readings = [self._read(name) for name in settings.load_model]
                named = {reading.scanned.name for reading in readings}
                needed = [found for reading in readings for found in needs(reading, self._repositories.read, named)]
        self._repositories.names = names
        log.info("serving %s; loading %d of %d model(s)", settings.runtime_dir, len(readings), len(names))
        self._operations.begin(readings, needed)
        if self._remote_changes is not None:
            log.info("downloading models from %s", ", ".join(map(str, settings.remote_repositories)))
            self._remote_changes.begin(settings.load_model)

    def _read(self, name: str) -> Reading:
        try:
            return self._repositories.read(name)
        except ServeError as error:
            return Reading(ScannedModel.failed(name, Path(), error.message))

    def _on_turn(self) -> None:
        if self._progress.report():
            self._broker.on_turn = None
        self._announcer.check_status()

    def _reread(self) -> None:
        if not self._core.state.draining:
            log.info("SIGHUP: rereading the repositories")
            self._rereads += 1
            self._announcer.reloading()
            self._gateways.reread()
            (self._remote_changes or self._disk_changes).reread(self._reread_finished)

    def _reread_finished(self) -> None:
        self._rereads -= 1
        self._loop.call_soon(self._await_loading)  # after the turn that deploys the changes

    def _await_loading(self) -> None:
        """Reports the end of the reload. Polls, so that turns that serve requests need no check."""
        if self._rereads:
            return
        census = service_status.Census.of(self._core.state.models.values())
        if census.loading:
            self._loop.call_later(POLL_S, self._await_loading)
        elif self._announcer.reloaded():
            log.info("repositories reread: %s", census.text())

    def _loaded(self, failed: int) -> None:
        """Called when the initial loading has finished. `failed`: number of models or versions that did not load."""
        failed += len(self._remote.unreadable) if self._remote is not None else 0
        if failed and self._settings.exit_on_error:
            log.error("%d model(s) failed to load and --exit-on-error is set: stopping", failed)
            self._exit_code = 1
            self._stop("exit-on-error")
            return
        self._phase_finished("models")

    def _gateways_opened(self, ports: Mapping[str, int]) -> None:
        """Called when all gateways are listening."""
        self._phase_finished("gateways")

    def _gateways_failed(self, code: int, why: str) -> None:
        hint = "--no-gateway serves only clients on this machine"
        if "cannot listen on" in why:
            hint = "use other ports (--http-port, --grpc-port, --metrics-port) or addresses, or --no-gateway"
        log.error("%s; %s", why, hint)
        self._exit_code = code
        self._stop("the gateway did not start")

    def _gpu_changed(self, number: int, reason: str) -> None:
        """Called by the threads that watch the GPUs."""
        self._loop.call_soon_threadsafe(self._broker.put, events.DeviceHealth(number, reason))

    def _is_ready(self) -> bool:
        """Whether the initial loading has finished."""
        return "models" not in self._pending_phases

    def _phase_finished(self, phase: str) -> None:
        self._pending_phases.discard(phase)
        if self._pending_phases or self._stopping:
            return
        log.info("ready: %s", service_status.Census.of(self._core.state.models.values()).text())
        self._announcer.ready()
        ports = self._gateways.ports
        if self._settings.ready_fd >= 0:
            endpoints = "".join(f" {endpoint}={port}" for endpoint, port in ports.items())
            os.write(self._settings.ready_fd, f"READY{endpoints}\n".encode())
            os.close(self._settings.ready_fd)
        where = self._settings.runtime_dir
        if self._settings.hints:
            print(hints(where, where == default_runtime_dir(), ports), file=sys.stderr, flush=True)
        elif self._files is not None and sys.stderr.isatty():
            model = next(iter(self._files.names()))
            print(first_steps(model, where, where == default_runtime_dir(), ports), file=sys.stderr, flush=True)

    def _stop(self, why: str) -> None:
        """Stops the gateways before the broker, as they still forward requests that they are receiving."""
        if self._stopping:
            if why == "SIGINT":
                self._stop_now()
            return
        self._stopping = True
        limit_s = self._settings.exit_timeout_secs
        again = "; Ctrl-C again fails them" if why == "SIGINT" and limit_s else ""
        log.info("%s: finishing the requests in flight, for up to %g s%s", why, limit_s, again)
        self._announcer.stopping(limit_s)
        Deadline(
            lambda: self._broker.workers.names() | self._gateways.names(),
            lambda: len(self._core.state.requests),
            lambda: self._loop.call_soon_threadsafe(self._loop.stop),
        ).start(limit_s)
        self._drain_deadline = self._loop.time() + limit_s
        self._gateways.stop(limit_s, self._drain)

    def _stop_now(self) -> None:
        """Handles a second Ctrl-C."""
        log.warning("SIGINT again: failing the %d request(s) in flight", len(self._core.state.requests))
        self._drain_deadline = self._loop.time()
        if self._gateways.pids:
            self._gateways.fail_requests()  # calls `_drain` after they have answered their clients and exited
        else:
            self._drain()

    def _drain(self) -> None:
        self._broker.put(events.Drain(max(0, int((self._drain_deadline - self._loop.time()) * 1e9))))


def _agent_printed(line: str, model: str) -> None:
    log_record("info", f"[repository agents of model '{model}'] {line}", {"model": model})


def _serve(settings: argparse.Namespace, manager: ServiceManager, recent: RecentRecords) -> int:
    keep_freed_memory()
    removed = posix.sweep()
    if removed:
        log.info("removed %d shared memory segment(s) of processes that have exited", removed)
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        return ServerProcess(settings, loop, manager, recent).run()
    except ServeError as error:
        raise CannotStart(str(error)) from None
    finally:
        asyncio.set_event_loop(None)
        loop.close()
        log.info("stopped")


if __name__ == "__main__":
    sys.exit(main())

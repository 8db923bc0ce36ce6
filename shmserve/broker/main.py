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
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from shmserve.broker.admin.activity import ActivityReport
from shmserve.broker.admin.answers import QueryAnswers
from shmserve.broker.admin.queries import Control, ControlSettings, MetricsPage
from shmserve.broker.admin.readiness_probes import Probes
from shmserve.broker.admin.service import ServiceControl
from shmserve.broker.broker_memory import BrokerMemory
from shmserve.broker.config import settings as setting
from shmserve.broker.instance_workers import InstanceWorkers
from shmserve.broker.loop import Broker, BrokerSettings
from shmserve.broker.models.catalog import Catalog
from shmserve.broker.models.disk_changes import DiskChanges
from shmserve.broker.models.ensemble_members import needs
from shmserve.broker.models.operations import ClientOperations, LoadSettings
from shmserve.broker.models.poller import Poll
from shmserve.broker.models.reader import ReaderThread
from shmserve.broker.models.remote import open_remote
from shmserve.broker.models.remote_changes import RemoteChanges
from shmserve.broker.models.repositories import ModelReading, Repositories
from shmserve.broker.models.traffic import TrafficControl
from shmserve.broker.observability import service_status
from shmserve.broker.observability.log_settings import LogSettings
from shmserve.broker.observability.logs import log_record, set_up
from shmserve.broker.observability.metrics import Metrics
from shmserve.broker.observability.progress import LoadProgress, first_steps, hints
from shmserve.broker.observability.recent_records import RecentRecords
from shmserve.broker.observability.recordings import Recordings
from shmserve.broker.observability.traces import TraceFile, TraceSettings, otel_settings
from shmserve.broker.observability.traces import merged as merged_traces
from shmserve.broker.peers import Inbox, Peers
from shmserve.broker.processes.cpus import survey
from shmserve.broker.processes.gateways import Gateways
from shmserve.broker.processes.gpus.monitor import GpuMonitor
from shmserve.broker.processes.span_exporter import SpanExporter
from shmserve.broker.processes.stop_deadline import Deadline
from shmserve.broker.processes.workers import WorkerSettings
from shmserve.broker.segments import Segments
from shmserve.broker.startup import (
    AGENTS,
    GENERATIONS,
    CannotStart,
    RuntimeDir,
    find_gpus,
    gateway_settings,
    model_files,
    require_exporter,
)
from shmserve.core import events
from shmserve.core.core import Core
from shmserve.core.state import State
from shmserve.errors import ServeError
from shmserve.paths import LANE, default_runtime_dir
from shmserve.repo.agents.chains import AgentChains
from shmserve.repo.backends import DIRECTORY
from shmserve.repo.check import repository_findings
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


class BrokerProcess:
    """The whole server, from start to stop: broker, gateways, signal handlers and progress reports."""

    def __init__(self, settings: argparse.Namespace, loop: Any, manager: ServiceManager, recent: RecentRecords) -> None:
        """Builds the parts, each from those above it. Nothing runs before `run`."""
        self._settings = settings
        self._loop = loop
        self._exit_code = 0
        self._stopping = False
        self._drain_deadline = 0.0
        """Loop time at which requests in flight fail, once the server is stopping."""
        self._pending_phases = {"models", "gateways"}
        """Startup phases that must finish before the server is ready."""
        self._rereads = 0
        """Number of repository scans started by SIGHUP that have not finished."""
        directory = settings.runtime_dir.absolute()

        core = Core(f"shmserve {version()}", setting.limits(settings), settings.log_verbose > 1, survive=True)
        state = core.state
        inbox = Inbox(loop)
        peers = Peers(inbox)
        gpus = find_gpus()
        cores = survey(setting.host_policies(settings), gpus.places())
        poll_ns = setting.busy_poll_ns(cores)

        # Processes
        gpu_monitor = GpuMonitor(
            gpus.devices,
            settings.allow_gpu_metrics,
            setting.metrics_interval_s(settings),
            self._gpu_changed if settings.gpu_health else None,
            settings.gpu_xid,
        )
        gateways = Gateways(
            loop,
            gateway_settings(settings, poll_ns),
            f"unix://{directory / LANE}",
            settings.exit_timeout_secs,
            self._gateways_opened,
            self._gateways_failed,
            log_record,
        )
        remote = open_remote(loop, setting.remote_settings(settings), gateways.pids)
        exporter = self._make_span_exporter(state, gateways)

        # Models
        thread = ReaderThread()
        agents = AgentChains(directory / AGENTS, setting.agent_settings(settings), _agent_printed, thread.submit)
        files = model_files(settings)
        repositories = Repositories(
            [*settings.model_repository, *(remote.folders if remote is not None else ())],
            setting.backend_settings(settings).get(DIRECTORY, ""),
            settings.model_config_name,
            Generations(directory / GENERATIONS, discard=thread.remove),
            gpus.numbers,
            files,
            agents,
            settings.model_namespacing,
        )
        catalog = Catalog(
            repositories,
            setting.backend_settings(settings),
            cores,
            resources=settings.rate_limit_resource if settings.rate_limit == "execution_count" else None,
            worker_defaults=setting.worker_defaults(settings),
        )
        loads = LoadSettings(
            settings.runtime_dir / GENERATIONS, settings.model_control_mode, settings.triton_compatible
        )
        operations = ClientOperations(loop, core, catalog, thread, inbox.put, peers.send, loads, remote)
        disk_changes = DiskChanges(loop, state, catalog, operations, inbox.put)
        remote_changes = (
            RemoteChanges(remote, repositories, operations, disk_changes, inbox.wake) if remote is not None else None
        )

        # Memory and workers
        memory = BrokerMemory(
            Segments(),
            settings.broker_arena_bytes,
            state.limits.cache_bytes,
            lambda segment: inbox.put(events.OwnSegment(segment)),
        )
        state.cache.copy_with(memory, time.monotonic_ns)
        workers = InstanceWorkers(
            loop,
            state,
            catalog,
            peers.links,
            inbox.put,
            WorkerSettings(settings.model_environment, gpus.uuids(), gpu_monitor.used_by, poll_ns, self._has_loaded),
            gateways.pids,
        )

        # Queries
        control = Control(
            core,
            catalog,
            ControlSettings(settings.id, version(), settings.strict_readiness, bool(settings.failed)),
            workers.process_of,
            workers.memory.bytes_of,
            workers.language,
            remote_changes,
        )
        server_metrics = Metrics(
            state,
            memory.frames,
            settings.broker_arena_bytes,
            workers.process_of,
            workers.memory.bytes_of,
            control.server_ready,
            setting.metrics(settings),
        )
        providers = [server_metrics.text, workers.metrics, gpu_monitor.text, gateways.metrics]
        if exporter is not None:
            providers.append(exporter.metrics)
        page = MetricsPage(providers, limited=settings.metrics_interval_ms > 0)
        announcer = service_status.Announcer(
            loop, manager, state.models.values, lambda: len(state.requests), lambda: state.out_of_service
        )
        service = ServiceControl(loop, state, inbox.put, announcer.check_status)
        activity = ActivityReport(
            state,
            control.index,
            control.marks,
            lambda: control.about() | {"ports": dict(gateways.ports)},
            gpu_monitor.document,
            gpu_monitor.used_by,
            workers.language,
            lambda: operations.refresh_from_disk(control.on_disk),
        )
        options = merged_traces(settings.trace_config)
        traces = TraceSettings(options, state.observers.traces, state.models.keys)
        path = Path(options["trace_file"]).absolute() if "trace_file" in options else None
        trace_file = TraceFile(loop, path, lambda model: traces.of(model).log_frequency or 0, memory.read)
        recordings = Recordings(loop, state)
        traffic = TrafficControl(state, inbox.put)
        logged = LogSettings(settings, core.log_batches, recent)
        control.add(
            {
                "metrics": page.answer,
                "activity": lambda ask: activity.answer(ask.body),
                "service": lambda ask: service.document(),
                "set_service": lambda ask: service.change(ask.body),
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
        answers = QueryAnswers(control, Probes(loop, peers.send), operations, peers.send, core.roles_of)

        # The loop
        broker = BrokerSettings(
            settings.runtime_dir,
            setting.access(settings, gateways.pids),
            poll_ns,
            trace_file.write if exporter is None else exporter.write,
        )
        self._broker = Broker(loop, core, peers, memory, workers, operations, answers, broker)
        self._progress = LoadProgress(core, self._loaded, log_record, self._is_downloading)
        self._state = state
        self._inbox = inbox
        self._gpu_monitor = gpu_monitor
        self._gateways = gateways
        self._remote = remote
        self._span_exporter = exporter
        self._agents = agents
        self._files = files
        self._repositories = repositories
        self._operations = operations
        self._disk_changes = disk_changes
        self._remote_changes = remote_changes
        self._workers = workers
        self._announcer = announcer
        self._service = service
        self._trace_file = trace_file

    def _make_span_exporter(self, state: State, gateways: Gateways) -> SpanExporter | None:
        """Exports traces for OpenTelemetry, if that is the mode."""
        otel = otel_settings(self._settings.trace_config, self._settings.triton_compatible)
        if otel is None:
            return None
        require_exporter(otel.protocol)
        return SpanExporter(self._loop, otel, lambda: state.observers.traces.contexts_over_limit, gateways.pids)

    def _is_downloading(self) -> bool:
        """Whether models to serve from the start are being downloaded."""
        return self._remote_changes is not None and self._remote_changes.starting

    def run(self) -> int:
        # With a terminal as stdin, SIGHUP means that the terminal was closed; otherwise it requests a reload.
        hang_up = (self._stop, "SIGHUP") if os.isatty(0) else (self._reread,)
        self._loop.add_signal_handler(signal.SIGHUP, *hang_up)
        try:
            self._gpu_monitor.start()
            for number, reason in self._gpu_monitor.out_of_service().items():  # before the first model is deployed
                self._inbox.put(events.DeviceHealth(number, reason))
            self._gateways.start()
            if self._span_exporter is not None:
                self._span_exporter.start()
            self._announcer.begin()
            self._begin_or_stop()
            self._broker.begin(self._on_turn)
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
        needed: list[tuple[str, ModelReading]] = []
        if settings.model_control_mode == "poll" and settings.repository_poll_secs:
            poll = Poll(self._repositories, setting.settle_s(settings))
            changes = poll.check(at_start=True)
            for text in changes.problems:
                log.error("%s", text)
            readings, names = changes.readings, changes.names
            self._disk_changes.poll(poll, settings.repository_poll_secs, changes.recheck_s)
        else:
            names = self._repositories.names_on_disk()
            every = settings.model_control_mode != "explicit" or settings.load_model == ["*"]
            if self._remote is not None and settings.model_control_mode == "explicit":
                readings = []  # these models may need others that have to be downloaded
            elif every:
                readings = self._repositories.read_all()
            else:
                chosen = [name for requested in settings.load_model for name in self._repositories.namesakes(requested)]
                readings = [self._read(name) for name in chosen]
                named = {reading.scanned.name for reading in readings}
                needed = [member for reading in readings for member in needs(reading, self._repositories, named)]
        self._repositories.names = names
        log.info("serving %s; loading %d of %d model(s)", settings.runtime_dir, len(readings), len(names))
        self._operations.begin(readings, needed)
        if self._remote_changes is not None:
            log.info("downloading models from %s", ", ".join(map(str, settings.remote_repositories)))
            self._remote_changes.begin(settings.load_model)

    def _read(self, name: str) -> ModelReading:
        try:
            return self._repositories.read(name)
        except ServeError as error:
            return ModelReading(ScannedModel.failed(name, Path(), error.message))

    def _on_turn(self) -> bool:
        """Returns whether models to serve from the start are still loading."""
        has_ended = self._progress.report()
        self._announcer.check_status()
        return not has_ended

    def _reread(self) -> None:
        if not self._state.draining:
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
        census = service_status.Census.of(self._state.models.values())
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
        self._loop.call_soon_threadsafe(self._inbox.put, events.DeviceHealth(number, reason))

    def _has_loaded(self) -> bool:
        """Whether the models to serve from the start have been loaded."""
        return "models" not in self._pending_phases

    def _phase_finished(self, phase: str) -> None:
        self._pending_phases.discard(phase)
        if self._pending_phases or self._stopping:
            return
        log.info("ready: %s", service_status.Census.of(self._state.models.values()).text())
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
            lambda: self._workers.names() | self._gateways.names(),
            lambda: len(self._state.requests),
            lambda: self._loop.call_soon_threadsafe(self._loop.stop),
        ).start(limit_s)
        self._drain_deadline = self._loop.time() + limit_s
        self._gateways.stop(limit_s, self._drain)

    def _stop_now(self) -> None:
        """Handles a second Ctrl-C."""
        log.warning("SIGINT again: failing the %d request(s) in flight", len(self._state.requests))
        self._drain_deadline = self._loop.time()
        if self._gateways.pids:
            self._gateways.fail_requests()  # calls `_drain` after they have answered their clients and exited
        else:
            self._drain()

    def _drain(self) -> None:
        self._inbox.put(events.Drain(max(0, int((self._drain_deadline - self._loop.time()) * 1e9))))


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
        return BrokerProcess(settings, loop, manager, recent).run()
    except ServeError as error:
        raise CannotStart(str(error)) from None
    finally:
        asyncio.set_event_loop(None)
        loop.close()
        log.info("stopped")


if __name__ == "__main__":
    sys.exit(main())

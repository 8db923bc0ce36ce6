"""Starts the worker processes of the core's instances, and handles their completed configurations, metrics and memory
use."""

from __future__ import annotations

import os
from collections.abc import Callable, Set
from typing import Any

from msgspec.structs import replace

from shmserve.broker.models.catalog import Catalog, read_descriptor
from shmserve.broker.observability.logs import log_record
from shmserve.broker.observability.model_metrics import ModelCounters
from shmserve.broker.processes.cgroups import take_over_own_group
from shmserve.broker.processes.memory_meter import MemoryMeter
from shmserve.broker.processes.process_memory import ProcessMemory
from shmserve.broker.processes.workers import WorkerHost, Workers, WorkerSettings
from shmserve.core import events
from shmserve.core.effects import Spawn
from shmserve.core.internal_errors import INTERNAL_ERROR
from shmserve.core.state import State
from shmserve.errors import ServeError
from shmserve.protocol.bodies import MALFORMED
from shmserve.protocol.worker_messages import Counted, LoadFailed


class InstanceWorkers:
    """Adds the link of each worker to `links`. `put` passes an event to the core. `settings` and `other_children` are
    passed to Workers."""

    def __init__(
        self,
        loop: Any,
        state: State,
        catalog: Catalog,
        links: dict[int, Any],
        put: Callable[[Any], None],
        settings: WorkerSettings,
        other_children: Set[int],
    ) -> None:
        self._state = state
        self._catalog = catalog
        self._links = links
        self._put = put
        self._workers = Workers(loop, log_record, settings, take_over_own_group(), other_children)
        self._counters = ModelCounters(lambda name: any(one.model == name for one, _ in state.instances.values()))
        self.memory = ProcessMemory(loop, self._pids)
        self._meter = (
            MemoryMeter(loop, state, self.process_of, settings.used_on_gpu, put) if state.memory.limited else None
        )
        """None without memory budgets."""

    def names(self) -> dict[int, str]:
        """Names of workers by pid."""
        return self._workers.names()

    def process_of(self, peer: int) -> int:
        """The pid of a worker, 0 if it has exited."""
        worker = self._workers.get(peer)
        return worker.pid if worker is not None else 0

    def _pids(self) -> set[int]:
        return {pid for peer in self._state.instances if (pid := self.process_of(peer))}

    def metrics(self) -> str:
        """The metrics that models define."""
        return self._counters.text()

    def language(self) -> dict[tuple[str, str], dict[str, Any]]:
        """What the engines of language models have counted, by model and version."""
        return self._counters.language()

    # ------------------------------------------------------------------------------------ effects

    def spawn(self, effect: Spawn, host: WorkerHost) -> None:
        """Starts a worker. Any failure leads to an Exited event, because the core expects one for each Spawn."""
        reason = f"{INTERNAL_ERROR} while starting its process"
        try:
            self._start(effect, host)
            reason = ""
        except OSError as error:
            reason = f"cannot start a process: {error.strerror}"
        finally:
            if reason and self._workers.get(effect.peer) is None:
                self._put(events.Exited(effect.peer, reason))
            elif reason:
                self._workers.kill(effect.peer, reason)

    def _start(self, effect: Spawn, host: WorkerHost) -> None:
        load, descriptor = self._catalog.load_order(effect)
        try:
            resources, folders = self._catalog.worker_resources(effect), self._catalog.copied_folders(effect)
            worker = self._workers.spawn(effect, host, resources, folders)
            self._links[effect.peer] = worker.link
            worker.link.send_now([load], [descriptor])
            if self._meter is not None:
                self._meter.worker_started()
        finally:
            os.close(descriptor)

    def kill(self, peer: int, reason: str) -> None:
        self._workers.kill(peer, reason)

    # ------------------------------------------------------------------------------------ messages of workers

    def compiled(self, peer: int, streams: int, descriptor: int) -> Any:
        """The event for a Loaded, from its number of streams and the completed configuration in `descriptor`. Closes
        the descriptor. Raises InvalidRequest."""
        config = read_descriptor(descriptor)
        known = self._state.instances.get(peer)
        if known is None:
            return events.Garbled(0, "Loaded from a worker whose instance has ended")
        version, _ = known
        try:
            policy, warnings = self._catalog.complete(version.source, config)
            for text in warnings:
                log_record("warning", f"{version.label}: {text}", {"model": version.model, "version": version.number})
            self.memory.loaded(self.process_of(peer))
            if self._meter is not None:
                self._meter.measure()
            return events.Compiled(replace(policy, streams=streams or policy.streams))
        except (ServeError, *MALFORMED) as error:
            self._workers.kill(peer, "its completed configuration is invalid")
            return LoadFailed("INVALID_ARG", f"invalid completed configuration: {error}")

    def add_counters(self, peer: int, message: Counted, descriptors: list[int]) -> None:
        """Adds a page of the model's metrics. Takes its descriptor out of `descriptors`."""
        worker = self._workers.get(peer)
        if worker is None or not descriptors:
            return
        try:
            self._counters.add(peer, worker.log_fields["model"], descriptors.pop(0), message.size)
        except ServeError as error:
            log_record("warning", f"{worker.name}: cannot read its metrics: {error}", worker.log_fields)

    def keep_counters(self, peer: int) -> None:
        """Keeps the counters of a worker that has exited for as long as its model is served."""
        self._counters.worker_exited(peer)

    def close(self) -> None:
        self._counters.close()
        self._workers.close()
        self.memory.close()
        if self._meter is not None:
            self._meter.close()

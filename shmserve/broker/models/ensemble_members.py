"""Companions: models that were loaded only because an ensemble needs them, and that may be unloaded with it.

Invariant: a model that was loaded by its own name is not a companion of any ensemble.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from shmserve.broker.models.repositories import ModelReading, Repositories
from shmserve.core.effects import Settled
from shmserve.errors import ServeError
from shmserve.protocol.namespaces import plain
from shmserve.repo.rules.ensemble_steps import steps_of


class Companions:
    def __init__(self) -> None:
        self._loaded_for: dict[str, set[str]] = {}
        """Model -> the ensembles for which it was loaded."""
        self._needs: dict[str, set[str]] = {}
        """Ensemble -> its companions."""

    def requested(self, model: str) -> None:
        """Records that the model is loaded by its own name."""
        self._loaded_for.pop(model, None)

    def loaded_for(self, model: str, ensemble: str) -> None:
        """Records that the model is loaded because the ensemble needs it."""
        self._loaded_for.setdefault(model, set()).add(ensemble)
        self._needs.setdefault(ensemble, set()).add(model)

    def needed(self, model: str, ensemble: str) -> None:
        """Records that the ensemble needs a model that is already served. A companion of other ensembles also becomes a
        companion of this one."""
        if model in self._loaded_for:
            self.loaded_for(model, ensemble)

    def replaced(self, model: str, ensemble: str) -> list[str]:
        """Records that the ensemble needs this model. Returns companions of the same name in other namespaces that no
        ensemble needs any more."""
        others = [other for other in self._needs.get(ensemble, ()) if other != model and plain(other) == plain(model)]
        return self._released(ensemble, others)

    def unloaded(self, model: str) -> list[str]:
        """Records that the model is unloaded. Returns companions that no other ensemble needs and that may be unloaded
        as well."""
        self._loaded_for.pop(model, None)
        return self._released(model, self._needs.pop(model, ()))

    def _released(self, ensemble: str, companions: Collection[str]) -> list[str]:
        alone = []
        for name in sorted(companions):
            self._needs.get(ensemble, set()).discard(name)
            ensembles = self._loaded_for.get(name)
            if ensembles is not None:
                ensembles.discard(ensemble)
                if not ensembles:
                    alone += [name, *self.unloaded(name)]
        return alone


class OperationDependencies:
    """Operations that are reported only after the operations they depend on have finished."""

    def __init__(self) -> None:
        self._unfinished: dict[int, set[int]] = {}
        """Operation -> the unfinished operations that it depends on. The sets are never empty."""
        self._finished: dict[int, Settled] = {}
        """Finished operations that still depend on others."""

    def add(self, operation: int, others: set[int]) -> None:
        if others:
            self._unfinished[operation] = set(others)

    def finish(self, effect: Settled) -> list[Settled]:
        """Returns the operations that can be reported now. A failure is reported at once."""
        reportable = []
        if effect.operation in self._unfinished and not effect.code:
            self._finished[effect.operation] = effect
        else:
            self._unfinished.pop(effect.operation, None)
            reportable.append(effect)
        for operation in [number for number, others in self._unfinished.items() if effect.operation in others]:
            others = self._unfinished[operation]
            others.discard(effect.operation)
            if not others:
                del self._unfinished[operation]
                if operation in self._finished:
                    reportable.append(self._finished.pop(operation))
        return reportable


def needs(
    reading: ModelReading, repositories: Repositories, named: Collection[str] = ()
) -> Iterator[tuple[str, ModelReading]]:
    """The models of an ensemble's steps, recursively, each with the ensemble that names it. Omits models that cannot be
    read, as the ensemble itself reports missing models, and models in `named`, which are loaded by their own names,
    with the models that those need."""
    seen = {reading.scanned.name, *named}
    todo = [reading]
    while todo:
        ensemble = todo.pop()
        for step in steps_of(ensemble.scanned.config) if ensemble.scanned.config is not None else ():
            name = repositories.resolve(step.model_name, ensemble.scanned.name)
            if name in seen:
                continue
            seen.add(name)
            try:
                member = repositories.read(name)
            except (ServeError, OSError):
                continue
            yield ensemble.scanned.name, member
            todo.append(member)

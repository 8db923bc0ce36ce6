"""Models that were loaded only because an ensemble needs them: they come with it, and may go with it.

The rule of the file: a model that somebody has asked for by its name is nobody's companion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shmserve.broker.models.catalog import Reading
from shmserve.core.effects import Settled
from shmserve.errors import ServeError
from shmserve.repo.rules.ensemble_steps import steps_of


class Companions:
    def __init__(self) -> None:
        self._loaded_for: dict[str, set[str]] = {}
        """Model -> the ensembles that it was loaded for."""
        self._needs: dict[str, set[str]] = {}
        """Ensemble -> the models that its steps name."""

    def asked(self, reading: Reading) -> None:
        """It is loaded by its own name."""
        self._loaded_for.pop(reading.found.name, None)
        self._note(reading)

    def brought(self, reading: Reading, ensemble: str) -> None:
        """It is loaded as the ensemble needs it."""
        self._loaded_for.setdefault(reading.found.name, set()).add(ensemble)
        self._note(reading)

    def needed(self, model: str, ensemble: str) -> None:
        """It is served already. As a companion of another ensemble, it is one of this too."""
        if model in self._loaded_for:
            self._loaded_for[model].add(ensemble)

    def _note(self, reading: Reading) -> None:
        if reading.found.config is not None:
            self._needs[reading.found.name] = {step.model_name for step in steps_of(reading.found.config)}

    def unloaded(self, model: str) -> list[str]:
        """The model goes. Gives those that nobody needs any more, which may go with it."""
        self._loaded_for.pop(model, None)
        alone = []
        for name in sorted(self._needs.pop(model, ())):
            ensembles = self._loaded_for.get(name)
            if ensembles is not None:
                ensembles.discard(model)
                if not ensembles:
                    alone += [name, *self.unloaded(name)]
        return alone


class Together:
    """Operations that are reported only when others are over too."""

    def __init__(self) -> None:
        self._others: dict[int, set[int]] = {}
        """Operation -> those that it still waits for. Never empty."""
        self._over: dict[int, Settled] = {}
        """Operations that wait for nothing else any more."""

    def add(self, operation: int, others: set[int]) -> None:
        if others:
            self._others[operation] = set(others)

    def over(self, effect: Settled) -> list[Settled]:
        """Gives what can be reported now. A failure is reported at once."""
        found = []
        if effect.operation in self._others and not effect.code:
            self._over[effect.operation] = effect
        else:
            self._others.pop(effect.operation, None)
            found.append(effect)
        for operation in [number for number, others in self._others.items() if effect.operation in others]:
            others = self._others[operation]
            others.discard(effect.operation)
            if not others:
                del self._others[operation]
                if operation in self._over:
                    found.append(self._over.pop(operation))
        return found


def needs(reading: Reading, read: Callable[[str], Reading]) -> Iterator[tuple[str, Reading]]:
    """The models of an ensemble's steps, and of the ensembles among those: each with the ensemble that names it. What
    cannot be read is left out: the ensemble says itself what it lacks."""
    seen = {reading.found.name}
    todo = [reading]
    while todo:
        ensemble = todo.pop()
        for step in steps_of(ensemble.found.config) if ensemble.found.config is not None else ():
            if step.model_name in seen:
                continue
            seen.add(step.model_name)
            try:
                found = read(step.model_name)
            except (ServeError, OSError):
                continue
            yield ensemble.found.name, found
            todo.append(found)

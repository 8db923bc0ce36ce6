"""What scenario files say of sequences: their ids, and where each of them is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shmserve.core.records import Version

if TYPE_CHECKING:
    from tests.support.core.scenarios import Scenario


def sequence_id(text: str) -> int | str:
    """A number is one, everything else is a string."""
    return int(text) if text.lstrip("-").isdigit() else text


def told_of_sequences(scenario: Scenario, version: Version) -> Iterator[str]:
    places = version.places
    assert places is not None
    for sequence in places.all():
        worker = scenario.workers.get(sequence.instance.peer) if sequence.instance is not None else None
        where = f"slot {sequence.slot} of {worker.name}" if worker is not None else "in the backlog"
        yield f"sequence {sequence.id}: {where}, {len(sequence.requests)} wait"

"""Digests of all effects of the core in simulated runs, and the command `python -m tests.sim.effect_digests`, which
writes them to effect_digests.json. The commit that writes them again says which runs differ, and why.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from shmserve.core.core import Core
from shmserve.sim import simulate
from tests.sim.plans import calling, some_models, some_plan

RECORDED = Path(__file__).with_suffix(".json")
KINDS = {"models": some_models, "calls": calling}
SEEDS = 50


class _Recorder:
    """Replaces the methods of `Core` by which effects leave it."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._handle, self._tick = Core.handle, Core.tick

    def __enter__(self) -> _Recorder:
        recorder = self

        def handle(core: Core, turn: Iterable[Any], now: int) -> list[Any]:
            return recorder._note(now, recorder._handle(core, turn, now))

        def tick(core: Core, now: int) -> list[Any]:
            return recorder._note(now, recorder._tick(core, now))

        Core.handle, Core.tick = handle, tick  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *_: object) -> None:
        Core.handle, Core.tick = self._handle, self._tick  # type: ignore[method-assign]

    def _note(self, now: int, effects: list[Any]) -> list[Any]:
        self._hash.update(f"{now} {effects!r}\n".encode())
        return effects

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()[:16]


def digest(kind: str, seed: int) -> str:
    plan = some_plan(seed, check_every=0, kind=KINDS[kind])
    with _Recorder() as recorder:
        simulate(replace(plan, seconds=0.25))
    return recorder.digest


def recorded() -> dict[str, str]:
    found: dict[str, str] = json.loads(RECORDED.read_text())
    return found


def main() -> None:
    digests = {f"{kind} {seed}": digest(kind, seed) for kind in KINDS for seed in range(SEEDS)}
    changed = [run for run, value in recorded().items() if digests.get(run) != value] if RECORDED.exists() else []
    RECORDED.write_text(json.dumps(digests, indent=1) + "\n")
    print(f"{len(changed)} of {len(digests)} runs differ from the recorded ones: {', '.join(changed) or 'none'}")


if __name__ == "__main__":
    main()

"""The effects of the core in simulated runs equal the recorded ones."""

from __future__ import annotations

import pytest

from tests.sim.effect_digests import KINDS, SEEDS, digest, recorded


@pytest.mark.parametrize("kind", KINDS)
def test_the_core_decides_as_it_did_when_its_effects_were_recorded(kind: str) -> None:
    """If a change of decisions is intended, `python -m tests.sim.effect_digests` records the new ones."""
    known = recorded()
    differ = [f"{kind} {seed}" for seed in range(SEEDS) if digest(kind, seed) != known[f"{kind} {seed}"]]
    assert not differ

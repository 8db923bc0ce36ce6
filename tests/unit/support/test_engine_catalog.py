"""The catalog of `make test-engines` matches setup.cfg, the conformance suite and the files."""

from __future__ import annotations

import pytest

from tests import ROOT
from tests.engines.__main__ import requirements
from tests.engines.catalog import CONFORMANCE, ENGINES, Engine
from tests.support.workers.models.worker_models import KINDS


def test_names_are_unique() -> None:
    assert len({engine.name for engine in ENGINES}) == len(ENGINES)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_an_engine_is_complete(engine: Engine) -> None:
    assert requirements(engine)
    assert not engine.kind or engine.kind in {kind.name for kind in KINDS}
    assert engine.kind or engine.tests
    files = [word.partition("::")[0] for word in engine.tests if "/" in word]
    assert all((ROOT / path).exists() for path in (*files, *CONFORMANCE))

"""Ensembles whose own inputs and outputs have a reshape: the steps see the other shape."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shmserve.testing import Server
from tests.process.pipelines.test_ensembles import ADD, BATCHES, ensemble, model, numbers

pytestmark = pytest.mark.process

FLAT = ":FP32:[2,1,-1]:reshape{shape:[2,-1]}"
OUTER = ":FP32:[2,1,-1]"


def test_steps_see_the_other_shape(tmp_path: Path) -> None:
    for name, more in (("square1", ""), ("squares1", BATCHES)):
        model(tmp_path, name, ADD, more, ("y:FP32:[2,-1]",), "[2,-1]")
        batches = "max_batch_size: 8" if more else ""
        ensemble(tmp_path, f"flat_{name}", f"x{FLAT}", f"y{FLAT}", f"{name}(x:x)->(y:y)", more=batches)
    twice = "flat_square1(x:x)->(y:t)", "flat_square1(x:t)->(y:y)"
    ensemble(tmp_path, "nested", f"x{OUTER}", f"y{OUTER}", *twice)
    with Server(tmp_path, "--exit-on-error", "true") as server, server.client() as client:
        for name, lead, added in (("flat_square1", (), 1), ("flat_squares1", (4,), 1), ("nested", (), 2)):
            x = numbers(*lead, 2, 1, 3)
            assert np.array_equal(client.infer(name, {"x": x})["y"], x + added), name

"""`Predictor` in `map_batches` on three nodes: every row is processed exactly once, even if a server is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
from tests.ray.load import write_times
from tests.support.living import group
from tests.support.load import config
from tests.support.model_files import python_model, write_model

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("ray")]
ROWS = 3000
KILLS = """
if x[0, 0] <= {row} < x[0, 0] + len(x) and not os.path.exists({marker!r}):
    open({marker!r}, "w").close()
    pid = os.getpid()
    while b"shmserve.ray.host" not in open(f"/proc/{{pid}}/cmdline", "rb").read():
        pid = int(open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[1])
    os.kill(pid, signal.SIGKILL)
    select.select([], [], [])
return self.respond(np.concatenate([x * 2, np.full_like(x, os.getpid())], axis=1))
"""
"""A predictor that kills the host of its own server once."""


def numbers(blocks: int = 12) -> Any:
    import ray

    return ray.data.range(ROWS, override_num_blocks=blocks).map_batches(
        lambda batch: {"id": batch["id"], "x": batch["id"].astype(np.float32)[:, None]}
    )


def checked(dataset: Any, column: str = "y") -> set[int]:
    """Checks that every row occurs once, with the right output. Returns the processes of the model that answered."""
    rows = dataset.to_pandas()
    assert sorted(rows["id"]) == list(range(ROWS))
    outputs = np.stack(rows[column].to_numpy())
    np.testing.assert_array_equal(outputs[:, 0], rows["id"].to_numpy(np.float32) * 2)
    return set(outputs[:, 1].astype(int))


def test_actors_of_a_node_share_a_server(place: Any, tmp_path: Path) -> None:
    import ray

    from shmserve.ray import Predictor

    write_times(tmp_path, "twice", seconds=0.0)
    found = numbers().map_batches(
        Predictor,
        fn_constructor_kwargs={"model": "twice", "models": str(tmp_path), "outputs": {"y": "answer"}},
        batch_size=100,
        compute=ray.data.ActorPoolStrategy(size=4),
        num_cpus=0.5,
    )
    assert 1 <= len(checked(found, "answer")) <= 3, "one process per server, one server per node"


def test_every_row_is_returned_once_if_a_server_is_killed(place: Any, tmp_path: Path) -> None:
    import ray

    from shmserve.ray import Predictor

    marker = tmp_path / "killed"
    source = python_model(KILLS.format(row=ROWS // 2, marker=str(marker)))
    write_model(tmp_path / "models", "twice", config(group(1)), source)
    found = numbers().map_batches(
        Predictor,
        fn_constructor_kwargs={"model": "twice", "models": str(tmp_path / "models")},
        batch_size=100,
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=0.5,
    )
    checked(found)
    assert marker.exists()


def test_invalid_arguments_are_refused(place: Any, tmp_path: Path) -> None:
    import ray

    from shmserve.ray import Predictor

    write_times(tmp_path, "twice", seconds=0.0)
    arguments = {"model": "twice", "models": str(tmp_path), "inputs": {"x": "pixels"}}
    with pytest.raises(Exception, match="the dataset has no column 'pixels', only id; name the columns with inputs="):
        ray.data.range(8).map_batches(
            Predictor, fn_constructor_kwargs=arguments, compute=ray.data.ActorPoolStrategy(size=1), num_cpus=0.5
        ).materialize()
    with pytest.raises(shmserve.InvalidRequest, match="in_flight=0 must be at least 1"):
        Predictor("twice", str(tmp_path), in_flight=0)

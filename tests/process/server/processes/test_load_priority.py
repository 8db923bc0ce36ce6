"""The priority of workers: low while they load, afterwards that of the server, including the processes that a model has
started.

Nice values and autogroups are read from the kernel. Whether a process may restore its nice value depends on its
privileges, so the tests that need root drop them in a child process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shmserve
from shmserve.broker.processes.workers import LOAD_NICE
from shmserve.workers.process.load_priority import HIGHEST_NICE
from tests.support.launch import Launched
from tests.support.living import ONE, PYTHON
from tests.support.model_files import python_model, write_model
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.process

SCRIPT = """
import json, os, resource, subprocess, sys, threading
from shmserve.system.process import prctl
from shmserve.broker.processes.workers import LOAD_NICE
from shmserve.workers.process.load_priority import AUTOGROUP, LoadPriority

def look(others):
    found = [os.getpriority(os.PRIO_PROCESS, number) for number in (0, *others)]
    group = open(AUTOGROUP).read().split()[-1:] if os.path.exists(AUTOGROUP) else []
    print(json.dumps([found, list(map(int, group))]), flush=True)

nice, limit = int(sys.argv[1]), int(sys.argv[2])
if limit >= 0:
    try:
        resource.setrlimit(resource.RLIMIT_NICE, (limit, limit))
    except ValueError:
        sys.exit(77)  # without CAP_SYS_RESOURCE
    os.setgroups([])
    os.setresuid(65534, 65534, 65534)
    assert prctl(4, 1) == 0  # PR_SET_DUMPABLE, as after the exec of a service manager: else /proc/self belongs to root
look(())
priority = LoadPriority(nice, None)
priority.lower()
if "again" in sys.argv:
    priority = LoadPriority(nice, priority.normal)
    priority.lower()
ended = threading.Event()
thread = threading.Thread(target=ended.wait)
thread.start()
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
apart = subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True)
others = thread.native_id, child.pid, apart.pid
look(others)
priority.restore()
look(others)
ended.set()
child.communicate()
apart.communicate()
"""


def looks(*words: str | int, new_session: bool = True) -> list[tuple[list[int], list[int]]]:
    """Nice values and autogroup before, during and after loading: of the process itself, a thread, a child, and a child
    in its own session."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, words)],
        stdout=subprocess.PIPE,
        check=False,
        timeout=PATIENCE_S,
        start_new_session=new_session,
    )
    if done.returncode == 77:
        pytest.skip("this user may not raise the limit of nice values")
    assert not done.returncode
    found: list[tuple[list[int], list[int]]] = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    return found


def may_restore() -> bool:
    """Whether a process of this user may lower its nice value to what it was."""
    script = "import os; os.setpriority(os.PRIO_PROCESS, 0, os.nice(0) + 1); os.setpriority(os.PRIO_PROCESS, 0, {})"
    normal = os.getpriority(os.PRIO_PROCESS, 0)
    return (
        subprocess.run([sys.executable, "-c", script.format(normal)], check=False, capture_output=True).returncode == 0
    )


AS_OTHERS = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user, with another limit")


@pytest.mark.parametrize("more", [(), ("again",)], ids=["once", "in a second interpreter"])
@pytest.mark.parametrize("limit", [-1, pytest.param(20, marks=AS_OTHERS)], ids=["as we are", "with RLIMIT_NICE"])
def test_the_priority_is_lowered_while_a_model_loads(limit: int, more: tuple[str, ...]) -> None:
    if limit < 0 and not may_restore():
        pytest.skip("this user may not restore a nice value")
    ((normal,), group), (loading, group_loading), (after, group_after) = looks(LOAD_NICE, limit, *more)
    assert loading == [min(normal + LOAD_NICE, HIGHEST_NICE)] * 4
    assert after == [normal] * 4
    # Without CAP_SYS_ADMIN, the kernel refuses to lower a group if another one was changed just before.
    assert group_loading in (group, [LOAD_NICE])
    assert group_after == group


@AS_OTHERS
def test_a_priority_that_cannot_be_restored_is_not_lowered() -> None:
    ((normal,), group), (loading, _), (after, group_after) = looks(LOAD_NICE, 0)
    assert loading == after == [normal] * 4
    assert group_after == group


@pytest.mark.parametrize(("nice", "new_session"), [(LOAD_NICE, False), (0, True)], ids=["shared session", "not set"])
def test_no_priority_is_changed(nice: int, new_session: bool) -> None:
    """A worker that shares its session, or its process group, with other processes does not change theirs."""
    ((normal,), group), *later = looks(nice, -1, new_session=new_session)
    assert later == [([normal] * 4, group)] * 2


MODEL = python_model(
    "return self.respond(np.array([[self.loading, os.getpriority(os.PRIO_PROCESS, 0)]], np.float32))",
    "self.loading = os.getpriority(os.PRIO_PROCESS, 0)",
)


def test_a_model_loads_with_low_priority_and_serves_with_the_servers(tmp_path: Path) -> None:
    """Models that load at the server's start have the server's priority."""
    for name in ("first", "later"):
        write_model(tmp_path / "models", name, PYTHON, MODEL)
    options = ("--model-control-mode", "explicit", "--load-model", "first")
    with (
        Launched(tmp_path / "models", tmp_path / "run", *options) as server,
        shmserve.Client(f"unix://{server.lane}") as client,
    ):
        client.load("later")
        normal = os.getpriority(os.PRIO_PROCESS, server.process.pid)
        first, later = (
            client.infer(name, {"x": ONE}, timeout=PATIENCE_S)["y"][0].tolist() for name in ("first", "later")
        )
    lowered = min(normal + LOAD_NICE, HIGHEST_NICE) if may_restore() else normal
    assert (first, later) == ([normal, normal], [lowered, normal])

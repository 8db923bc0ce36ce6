"""The life of a worker process: its environment, its exit codes, its shared memory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmserve.protocol import codec
from shmserve.protocol.messages import Handle, Map, Options, Return, Tensor, Unmap
from shmserve.protocol.worker_messages import Execute, Load, Loaded, Stop, WorkerReport
from shmserve.repo.config.schema import ModelConfig, encode_config
from shmserve.shm.extents import memfd
from shmserve.workers.process.exit_codes import Exit
from tests.support.patience import PATIENCE_S
from tests.support.system.huge_pages import supported
from tests.support.workers.models.worker_models import python_model
from tests.support.workers.worker_harness import (
    CLIENT,
    WORKER,
    WorkerProcess,
    assert_failed,
    config,
    gone,
    running,
    work,
)

pytestmark = pytest.mark.process

X = Tensor("x", "FP32", (1, 2), b"\0\0\0\0\0\0\x80\x3f")
XY = {"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,))}

REPORTER = """\
import os
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

print("loading", flush=True)
# A thread that a model leaves running does not keep the worker from its end.
threading.Thread(target=threading.Event().wait).start()


class TritonPythonModel:
    def execute(self, requests):
        print("on stdout", flush=True)
        facts = {
            "cpus": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "descriptors": ",".join(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                                    if os.path.exists(f"/proc/self/fd/{fd}")),
            "privileges": open("/proc/self/status").read().partition("NoNewPrivs:")[2].split()[0],
            "name": open("/proc/self/comm").read().strip(),
        }
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", np.zeros((1, 2), np.float32))], parameters=facts)
            for _ in requests
        ]

    def finalize(self):
        pb_utils.Logger.log_info("finalized")
"""


TEMPORARY_ARRAYS = """\
import resource

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for size in (1_200_000, 20_000_000):
            np.ones(size, np.uint8)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        y = np.full((1, 2), faults, np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]) for _ in requests]
"""


WEIGHTS = """\
import re

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.weights = np.ones(12 << 20, np.uint8)

    def execute(self, requests):
        huge = re.search("AnonHugePages: *([0-9]+)", open("/proc/self/smaps_rollup").read())[1]
        y = np.full((1, 2), int(huge) / 1024, np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]) for _ in requests]
"""


def reporter(folder: Path) -> ModelConfig:
    python_model(folder, REPORTER)
    return config("python", *XY, max_batch=4)


def identity(**parameters: str) -> ModelConfig:
    return config("identity", *XY, max_batch=4, parameters=parameters)


def facts(worker: WorkerProcess) -> dict[str, object]:
    (row,) = worker.run(work(1, X))
    assert row.parameters is not None
    return dict(row.parameters)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with running(identity(), tmp_path_factory.mktemp("model")) as worker:
        # Creates the segments that the tests need, so that the leak check sees none of them appear in a test.
        (row,) = worker.run(work(1, worker.tensor("x", np.zeros((1, 3000), np.float32))))
        worker.send(Return(row.outputs[0].data))  # type: ignore[arg-type]
        yield worker


def test_cores_privileges_name_and_descriptors_of_a_worker(tmp_path: Path) -> None:
    cpu = str(min(os.sched_getaffinity(0)))
    with running(reporter(tmp_path), tmp_path, cpus=cpu, instance="m_0_0") as worker:
        found = facts(worker)
        assert (found["cpus"], found["privileges"], found["name"]) == (cpu, "1", "m_0_0")
        # stdin, stdout and stderr, and the link; the descriptor of /proc/self/fd itself is already closed.
        links = [name for name in str(found["descriptors"]).split(",") if name.startswith("socket:")]
        assert len(links) == 1
        assert worker.stop() == Exit.STOPPED
        for line in ("loading", "on stdout", "info: finalized"):
            assert line in worker.said()


def test_large_temporary_arrays_of_a_model_reuse_their_memory(tmp_path: Path) -> None:
    python_model(tmp_path, TEMPORARY_ARRAYS)
    with running(config("python", *XY, max_batch=4), tmp_path) as worker:
        faults = [float(worker.value(worker.run(work(number, X))[0])[0, 0]) for number in range(1, 5)]
    assert max(faults[1:]) < 100 < faults[0], faults


def test_the_weights_of_a_model_lie_on_huge_pages(tmp_path: Path) -> None:
    if not supported():
        pytest.skip("no transparent huge pages, or Linux before 6.1")
    python_model(tmp_path, WEIGHTS)
    with running(config("python", *XY, max_batch=4), tmp_path) as worker:
        (row,) = worker.run(work(1, X))
        assert worker.value(row)[0, 0] >= 8


def test_sigterm_and_sigint_are_ignored(shared: WorkerProcess) -> None:
    shared.process.send_signal(signal.SIGTERM)
    shared.process.send_signal(signal.SIGINT)
    (row,) = shared.run(work(1, X))
    assert row.outputs[0].data == X.data


def test_the_end_of_the_link_ends_the_worker(tmp_path: Path) -> None:
    with running(reporter(tmp_path), tmp_path) as worker:
        worker.sock.shutdown(socket.SHUT_RDWR)
        assert worker.process.wait(PATIENCE_S) == Exit.LINK_LOST
        assert "finalized" in worker.said()


@pytest.mark.parametrize(
    ("orders", "code", "text"),
    [([Stop()], Exit.BAD_ORDER, b"the first order must be Load"), ([], Exit.LINK_LOST, b"")],
    ids=["another order", "the end of the link"],
)
def test_the_first_message_must_be_load(orders: list[object], code: Exit, text: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "shmserve.workers.main", "--link", str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE) as process:
        theirs.close()
        if orders:
            ours.send(codec.encode(orders))
        ours.close()
        _, stderr = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == code
        assert text in stderr


STARTER = """\
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-m", "shmserve.workers.main", "--link", sys.argv[1]],
                          pass_fds=[int(sys.argv[1])])
print(worker.pid, flush=True)
sys.stdin.read()
"""


def test_a_worker_exits_with_its_parent() -> None:
    """Even if its link is still open, and while it runs an endless batch."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(PATIENCE_S)
    parent = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with ours, theirs, parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        pidfd = os.pidfd_open(pid)
        descriptor = os.memfd_create("config")
        os.pwrite(descriptor, encode_config(identity(triggers="1")), 0)
        socket.send_fds(ours, [codec.encode([Load(WORKER, "m", 1, "m_0_0", "", {})])], [descriptor])
        os.close(descriptor)
        data, descriptors, _, _ = socket.recv_fds(ours, 1 << 18, 4)
        for descriptor in descriptors:
            os.close(descriptor)
        assert isinstance(codec.Codec(WorkerReport).decode(data)[0], Loaded)
        ours.send(codec.encode([Execute(1, 0, (work(1, X, options=Options(parameters={"hang": True})),))]))
        parent.kill()
        assert gone(pidfd)
        os.close(pidfd)
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        return  # another process has inherited the link


@pytest.mark.parametrize(
    "packet",
    [codec.encode([Load(WORKER, "m", 1, "m_0_0", "", {})]), codec.encode([Map((CLIENT << 32) + 1, 4096)]), b"\xc1\xc1"],
    ids=["load again", "no descriptor", "garbage"],
)
def test_an_invalid_message_ends_the_worker(tmp_path: Path, packet: bytes) -> None:
    with running(identity(), tmp_path) as worker:
        worker.sock.send(packet)
        assert worker.ended() == Exit.BAD_ORDER
        assert "broke the protocol" in worker.said()


@pytest.mark.parametrize("arguments", ["--link 3 --cpus 99999", "--link 0", "--link 3 --cpus x"])
def test_an_invalid_command_line_has_its_own_exit_code(arguments: str) -> None:
    command = [sys.executable, "-m", "shmserve.workers.main", *arguments.split()]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == Exit.USAGE
    assert b"cannot start" in done.stderr


def test_an_exception_in_finalize_has_its_own_exit_code(tmp_path: Path) -> None:
    python_model(tmp_path, REPORTER.replace('pb_utils.Logger.log_info("finalized")', 'raise ValueError("at the end")'))
    with running(config("python", *XY, max_batch=4), tmp_path) as worker:
        assert worker.stop() == Exit.FINALIZE_FAILED
        assert "at the end" in worker.said()


def test_an_unmapped_segment_leaks_no_descriptors_or_mappings(shared: WorkerProcess) -> None:
    proc = Path(f"/proc/{shared.process.pid}")

    def usage() -> tuple[int, int]:
        return len(list((proc / "fd").iterdir())), (proc / "maps").read_text().count("memfd:")

    shared.run(work(1, X))
    before = usage()
    for number in range(100, 140):
        segment = (CLIENT << 32) + number
        extent = memfd.create(8192)
        shared.send(Map(segment, 8192), descriptors=[extent.fd])
        extent.close()
        tensor = Tensor("x", "FP32", (1, 2000), (Handle(segment, 64, 8000),))
        (row,) = shared.run(work(number, tensor))
        assert row.error is None
        shared.send(Return(row.outputs[0].data), Unmap(segment))  # type: ignore[arg-type]
        (row,) = shared.run(work(number, tensor))
        assert_failed(row, "HANDLE_LOST")
    assert usage() == before

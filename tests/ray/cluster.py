"""Ray clusters of several nodes on this machine, and the sudden loss of a node."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shmserve.system import procfs
from tests.support.patience import CLUSTER_PATIENCE_S
from tests.support.system.ports import free_ports

STORE_BYTES = 200 << 20
SETTINGS = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "600",  # a proxy on a busy machine needs more than the default of 5 s
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "600",
    "RAY_prestart_worker_first_driver": "0",  # each node would start two processes that nothing uses
}
"""For all processes of Ray."""
RAYLET = b"RAY_RAYLET_PID="


class Place:
    """The cluster, and the ports of Ray Serve on it."""

    def __init__(self, cluster: Any, http: int, grpc: int) -> None:
        self.cluster = cluster
        self.http = http
        self.grpc = grpc

    def start_serve(self) -> None:
        """With a proxy on the head. On a busy machine, the proxy needs longer than Ray waits in one call."""
        from ray import serve

        grpc = {"port": self.grpc, "grpc_servicer_functions": ["shmserve.ray:add_kserve_servicer_to_server"]}
        end = time.monotonic() + CLUSTER_PATIENCE_S
        while True:
            try:
                serve.start("HeadOnly", {"host": "127.0.0.1", "port": self.http}, grpc_options=grpc)
                return
            except TimeoutError:
                if time.monotonic() > end:
                    raise

    def add_node(self) -> Any:
        return self.cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)

    def worker_node(self) -> Any:
        """A node without the head and the proxy."""
        return next(node for node in self.cluster.list_all_nodes() if node is not self.cluster.head_node)

    def kill(self, node: Any) -> None:
        """Kills all processes of a node at once, as in a power failure."""
        for pid in processes_of(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.cluster.remove_node(node, allow_graceful=False)


def processes_of(node: Any) -> set[int]:
    """The node's own processes, Ray's workers, and the servers that the workers have started."""
    raylet = node.all_processes["raylet"][0].process.pid
    found = {one.process.pid for kind in node.all_processes.values() for one in kind}
    return found | {pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if raylet_of(pid) == raylet}


def raylet_of(pid: int) -> int:
    """The raylet of a process. Ray's workers and their children have it in their environment."""
    while pid > 1:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return 0
        for entry in environment:
            if entry.startswith(RAYLET):
                return int(entry.removeprefix(RAYLET))
        pid = procfs.parent(pid)
    return 0


def kill_server(model: int) -> None:
    pid = model
    while "shmserve.broker.main" not in procfs.command_line(pid):
        pid = procfs.parent(pid)
    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def started(nodes: int) -> Iterator[Place]:
    """A cluster with Ray Serve, whose proxy is on the head."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as sessions:
        settings = SETTINGS | {"RAY_TMPDIR": sessions}  # the last one also for the file that names the running cluster
        os.environ.update(settings)
        Path(sessions, "ray").mkdir()
        head = {"num_cpus": 2, "object_store_memory": STORE_BYTES, "include_dashboard": False, "temp_dir": sessions}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            made = Place(cluster, *free_ports(2))
            for _ in range(nodes - 1):
                made.add_node()
            ray.init(address=cluster.address, log_to_driver=False, logging_level="WARNING")
            made.start_serve()
            yield made
            serve.shutdown()
        finally:
            ray.shutdown()
            cluster.shutdown()
            for name in settings:
                del os.environ[name]

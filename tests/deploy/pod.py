"""A pod of one container, run by Podman as its manifest says: user, capabilities, volumes, limits, probes, preStop.

Differences from a cluster: the pod uses the machine's network, and listens on a separate loopback address, with the
ports of the manifest; its CPU and memory limits suit a smaller machine.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import re
import ssl
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.deploy import image
from tests.deploy.manifests import Thing
from tests.support.patience import PATIENCE_S

PAUSE_S = 0.05
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
STORED = 0o2777
"""Mode of an emptyDir: it belongs to root, and to the group fsGroup."""
LISTENS = ("SHMSERVE_HTTP_ADDRESS", "SHMSERVE_GRPC_ADDRESS")
_NUMBERS = itertools.count()


class Answer(NamedTuple):
    status: int
    body: bytes


class Pod:
    """`spec` is the spec of a pod with one container. `files`: the directory of each volume that is not an emptyDir."""

    def __init__(self, root: Path, spec: Thing, files: Mapping[str, Path]) -> None:
        self.root = root
        self.spec = spec
        (self.container,) = spec["containers"]
        self.name = f"shmserve-{os.getpid()}-{root.name}"
        self.address = f"127.{64 + next(_NUMBERS) % 128}.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
        """Unique to this pod, because the ports are those of the manifest."""
        self.log = root / "log"
        self._files = files
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = [
            *("run", "--rm", "--name", self.name, "--network", "host", "--read-only-tmpfs=false"),
            *("--image-volume", "ignore", "--log-driver", "none", *image.limits()),
            *self._security(),
            *self._environment(),
            *self._volumes(),
            image.build(),
            *self.container["args"],
        ]
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                image.podman(*words), stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=image.podman_environment()
            )

    def _security(self) -> Iterator[str]:
        own, shared = self.container["securityContext"], self.spec.get("securityContext", {})
        assert {**shared, **own}["runAsNonRoot"]
        user, group = ({**shared, **own}.get(key) for key in ("runAsUser", "runAsGroup"))
        yield from ("--user", f"{user}:{group or 0}")
        if own["readOnlyRootFilesystem"]:
            yield "--read-only"
        if not own["allowPrivilegeEscalation"]:
            yield from ("--security-opt", "no-new-privileges")
        yield from (f"--cap-drop={name}" for name in own["capabilities"]["drop"])
        if "fsGroup" in shared:
            yield from ("--group-add", str(shared["fsGroup"]))

    def _environment(self) -> Iterator[str]:
        for entry in self.container.get("env", ()):
            yield from ("--env", f"{entry['name']}={entry['value']}")
        for name in LISTENS:
            yield from ("--env", f"{name}={self.address}")

    def _volumes(self) -> Iterator[str]:
        sources = {volume["name"]: volume for volume in self.spec["volumes"]}
        for mount in self.container["volumeMounts"]:
            source, path = sources[mount["name"]], mount["mountPath"]
            if source.get("emptyDir", {}).get("medium") == "Memory":
                size = in_bytes(source["emptyDir"]["sizeLimit"])
                yield from ("--mount", f"type=tmpfs,destination={path},tmpfs-size={size},tmpfs-mode=1777")
                continue
            folder = self._files.get(mount["name"]) or self.root / mount["name"]
            if "emptyDir" in source:
                folder.mkdir()
                folder.chmod(STORED)
                group = self.spec.get("securityContext", {}).get("fsGroup", 0)
                os.chown(folder, 0, group)
            yield from ("--volume", f"{folder}:{path}:{'ro' if mount.get('readOnly') else 'rw'}")

    # ------------------------------------------------------------------------------------ what a kubelet does

    def probe(self, name: str) -> int:
        """The HTTP status that a probe gets."""
        asked = self.container[name]["httpGet"]
        return self.ask(asked["path"], self.port(asked["port"]), tls=asked.get("scheme") == "HTTPS").status

    def port(self, name: str | int) -> int:
        if isinstance(name, int):
            return name
        (found,) = (port["containerPort"] for port in self.container["ports"] if port["name"] == name)
        assert isinstance(found, int)
        return found

    def ask(
        self,
        path: str,
        port: int,
        body: bytes | None = None,
        tls: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """GET, or POST of `body`. Like a kubelet, it does not verify a certificate."""
        unverified = ssl.create_default_context()
        unverified.check_hostname = False
        unverified.verify_mode = ssl.CERT_NONE
        kind: Any = http.client.HTTPSConnection if tls else http.client.HTTPConnection
        more = {"context": unverified} if tls else {}
        with contextlib.closing(kind(self.address, port, timeout=PATIENCE_S, **more)) as connection:
            connection.request("GET" if body is None else "POST", path, body, dict(headers or {}))
            answer = connection.getresponse()
            return Answer(answer.status, answer.read())

    def until_ready(self) -> None:
        """Waits until the startup probe, then the readiness probe, succeeds."""
        for name in ("startupProbe", "readinessProbe"):
            end = time.monotonic() + PATIENCE_S
            while True:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    if self.probe(name) == 200:
                        break
                assert self._process is not None
                try:
                    self._process.wait(PAUSE_S)
                except subprocess.TimeoutExpired:
                    assert time.monotonic() < end, f"{name} fails\n{self.log.read_text()}"
                else:
                    raise AssertionError(self.log.read_text())

    def until_logged(self, text: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while text not in (log := self.log.read_text()):
            assert self._process is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(PAUSE_S)
            assert self._process.poll() is None, log
            assert time.monotonic() < end, log

    def execute(self, *command: str) -> subprocess.Popen[str]:
        """Starts a command in the container."""
        words = image.podman("exec", self.name, *command)
        return subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=image.podman_environment()
        )

    def output(self, *command: str) -> str:
        process = self.execute(*command)
        said, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, said
        return said

    def pre_stop(self) -> subprocess.Popen[str]:
        return self.execute(*self.container["lifecycle"]["preStop"]["exec"]["command"])

    def signal(self, name: str) -> None:
        image.call("kill", "--signal", name, self.name)

    def terminate(self) -> int:
        """Sends SIGTERM. Returns the exit status."""
        self.signal("TERM")
        return self.wait()

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait(PATIENCE_S)

    def close(self) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            with contextlib.suppress(image.Failed):
                self.signal("KILL")
        self._process.wait(PATIENCE_S)


def in_bytes(quantity: str) -> int:
    match = re.fullmatch(r"(\d+)(Ki|Mi|Gi)", quantity)
    assert match, quantity
    return int(match[1]) * UNITS[match[2]]


@contextlib.contextmanager
def running(root: Path, spec: Thing, files: Mapping[str, Path]) -> Iterator[Pod]:
    """A pod that is ready."""
    pod = Pod(root, spec, files)
    try:
        pod.start()
        pod.until_ready()
        yield pod
    finally:
        pod.close()

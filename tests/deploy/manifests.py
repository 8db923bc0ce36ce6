"""The manifests of deploy/, rendered by kubectl."""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT
from tests.deploy import programs
from tests.fleet.programs import need

KUBERNETES = ROOT / "deploy" / "kubernetes"
KSERVE = ROOT / "deploy" / "kserve"
OVERLAYS = ("base", *sorted(f"overlays/{path.name}" for path in (KUBERNETES / "overlays").iterdir()))
Thing = dict[str, Any]
"""An object of Kubernetes."""


def read(path: Path) -> list[Thing]:
    return [thing for thing in yaml.safe_load_all(path.read_text()) if thing is not None]


@functools.cache
def rendered(overlay: str) -> str:
    command = [str(need("kubectl")), "kustomize", str(KUBERNETES / overlay)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def things(overlay: str) -> list[Thing]:
    return list(yaml.safe_load_all(rendered(overlay)))


def one(overlay: str, kind: str, name: str = "") -> Thing:
    (found,) = (thing for thing in things(overlay) if thing["kind"] == kind and name in ("", thing["metadata"]["name"]))
    return found


def triggers() -> dict[str, tuple[str, float]]:
    """Trigger of the component keda -> its query and its threshold."""
    (scaled,) = read(KUBERNETES / "components/keda/scaledobject.yaml")
    made = [(trigger["name"], trigger["metadata"]) for trigger in scaled["spec"]["triggers"]]
    return {name: (about["query"], float(about["threshold"])) for name, about in made}


def container(thing: Thing) -> Thing:
    """The container of the server in a Deployment."""
    (found,) = thing["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def validate(objects: list[Thing], *versions: str) -> list[list[str]]:
    """The problems of each object."""
    interpreter = programs.cluster()
    if interpreter is None:
        pytest.skip("the schemas are not installed; `make test-fleet` installs them")
    script = Path(__file__).with_name("of_schemas.py")
    done = subprocess.run(
        [str(interpreter), str(script), *versions], input=json.dumps(objects), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert len(answer) == len(objects)
    return [[str(problem) for problem in problems] for problems in answer]

"""The Helm chart: it renders what the manifests have, objects that are valid for all values, and refuses others."""

from __future__ import annotations

import functools
import re
import subprocess
from typing import Any

import pytest
import yaml

from tests import ROOT
from tests.deploy import manifests
from tests.deploy.manifests import Thing, container, things
from tests.fleet.programs import need

CHART = ROOT / "deploy" / "helm" / "shmserve"
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
VALUES: dict[str, Any] = {
    "default": [],
    "gpu": ["gpus.count=2", "nodeSelector.pool=gpu", "tolerations[0].key=dedicated", "image.pullSecrets={registry}"],
    "mig": ["gpus.count=1", "gpus.resource=nvidia.com/mig-1g.10gb"],
    "remote": ["models.url=s3://bucket/models", "models.credentials=store"],
    "secure": ["tls.secret=tls", "tokens.secret=tokens", "tokens.metricsSecret=metrics", "podMonitor.enabled=true"],
    "scaled": ["autoscaling.enabled=true", "autoscaling.max=4", "networkPolicy.enabled=false"],
}


def helm(command: str, *settings: str) -> subprocess.CompletedProcess[str]:
    words = [str(need("helm")), *command.split(), str(CHART), *(f"--set={one}" for one in settings)]
    return subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)


@functools.cache
def rendered(values: str) -> list[Thing]:
    done = helm("template shmserve", *VALUES[values])
    assert done.returncode == 0, done.stderr
    return [thing for thing in yaml.safe_load_all(done.stdout) if thing]


def deployment(values: str) -> Thing:
    (found,) = (thing for thing in rendered(values) if thing["kind"] == "Deployment")
    return found


@pytest.mark.parametrize("values", VALUES)
def test_the_chart_has_no_warning(values: str) -> None:
    done = helm("lint --strict", *VALUES[values])
    assert done.returncode == 0, done.stdout


def test_the_objects_are_valid_for_kubernetes() -> None:
    objects = [thing for values in VALUES for thing in rendered(values)]
    assert [problems for problems in manifests.validate(objects, "1.29", "1.37") if problems] == []


def bare(thing: Any) -> Any:
    """Without what names the release, or the manifests' configuration."""
    if isinstance(thing, list):
        return [bare(one) for one in thing]
    if not isinstance(thing, dict):
        return thing
    left_out = ("labels", "annotations", "matchLabels", "selector", "configMap", "image", "imagePullPolicy")
    return {key: bare(value) for key, value in thing.items() if key not in left_out}


def test_the_default_is_what_the_manifests_have() -> None:
    expected = {
        (one["kind"], one["metadata"]["name"]): bare(one) for one in things("base") if one["kind"] != "ConfigMap"
    }
    found = {(one["kind"], one["metadata"]["name"]): bare(one) for one in rendered("default")}
    del found["ConfigMap", "shmserve"]
    assert found == expected


def test_values_change_the_pod() -> None:
    gpu, mig = container(deployment("gpu")), container(deployment("mig"))
    assert gpu["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert gpu["image"].endswith("-gpu")
    assert mig["resources"]["limits"]["nvidia.com/mig-1g.10gb"] == "1"
    secure = container(deployment("secure"))
    variables = {entry["name"] for entry in secure["env"]}
    assert variables == {"SHMSERVE_TLS_CERT", "SHMSERVE_TLS_KEY", "SHMSERVE_TOKENS_FILE"}
    assert secure["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    remote = container(deployment("remote"))
    assert remote["args"][-2:] == ["--model-repository", "s3://bucket/models"]
    assert "models" not in {mount["name"] for mount in remote["volumeMounts"]}
    assert "replicas" not in deployment("scaled")["spec"]


def test_the_command_of_the_page() -> None:
    (line,) = re.findall(r"^helm install shmserve deploy/helm/shmserve (.*)$", PAGE, re.MULTILINE)
    assert helm("template shmserve", *re.findall(r"--set (\S+)", line)).returncode == 0


@pytest.mark.parametrize("setting", ["replica=3", "gpus.count=many", "models.url=ftp://models", "models.claim="])
def test_wrong_values_are_refused(setting: str) -> None:
    assert helm("template shmserve", setting).returncode != 0

"""The manifests: valid for Kubernetes and the operators, and in agreement with the server and with each other."""

from __future__ import annotations

import re
from typing import Any

import pytest

from shmserve.broker.config.settings import parse
from shmserve.broker.observability.metric_definitions import FAMILIES
from tests.deploy import manifests
from tests.deploy.manifests import KSERVE, KUBERNETES, OVERLAYS, Thing, container, one, read, things, triggers

VERSIONS = ("1.29", "1.33", "1.37")
"""Versions of Kubernetes. 1.29 is the oldest that supports everything in the manifests."""
PATHS = {"startupProbe": "/v2/health/live", "readinessProbe": "/v2/health/ready", "livenessProbe": "/v2/health/live"}
KILL_S = 4.0
"""Maximum time from exit-timeout-secs to the server's exit: docs/operations.md."""


def broken() -> list[Thing]:
    """Objects with one error each, of the kinds whose schemas differ."""
    deployment = one("base", "Deployment")
    container(deployment)["readinesProbe"] = {}
    monitor = one("overlays/production", "PodMonitor")
    monitor["spec"]["podMetricsEndpoints"][0]["pots"] = "metrics"
    scaled = one("overlays/production", "ScaledObject")
    scaled["spec"]["minReplicaCount"] = "two"
    (runtime,) = read(KSERVE / "clusterservingruntime.yaml")
    runtime["spec"]["containers"][0]["volumeMounts"][0]["mountpath"] = "/run"
    (service,) = read(KSERVE / "inferenceservice.yaml")
    service["spec"]["predictor"]["model"]["storageUrl"] = "s3://models"
    return [deployment, monitor, scaled, runtime, service]


def test_manifests_match_the_kubernetes_schemas() -> None:
    objects = [thing for overlay in OVERLAYS for thing in things(overlay)]
    objects += read(KUBERNETES / "components/hpa/hpa.yaml")
    objects += [thing for path in sorted(KSERVE.glob("*.yaml")) for thing in read(path)]
    found = manifests.validate([*objects, *broken()], *VERSIONS)
    names = [f"{thing['kind']} {thing['metadata']['name']}" for thing in objects]
    assert {name: problems for name, problems in zip(names, found, strict=False) if problems} == {}
    assert all(found[len(objects) :]), "an invalid object has passed"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_and_ports(overlay: str) -> None:
    made = container(one(overlay, "Deployment"))
    assert {name: made[name]["httpGet"]["path"] for name in PATHS} == PATHS
    assert {made[name]["httpGet"]["port"] for name in PATHS} == {"http"}
    ports = {port["name"]: port["containerPort"] for port in made["ports"]}
    assert ports == {"http": 8000, "grpc": 8001, "metrics": 8002}
    for thing in things(overlay):
        if thing["kind"] == "Service":
            assert [(port["targetPort"], port["port"]) for port in thing["spec"]["ports"]] == [
                ("http", 8000),
                ("grpc", 8001),
            ]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_select_the_pods(overlay: str) -> None:
    """Selectors select no other pods: an empty selector would select all pods of the namespace."""
    labels = one(overlay, "Deployment")["spec"]["template"]["metadata"]["labels"]
    for kind, key in (
        ("PodDisruptionBudget", "selector"),
        ("NetworkPolicy", "podSelector"),
        ("Deployment", "selector"),
    ):
        selected = one(overlay, kind)["spec"][key]["matchLabels"]
        assert selected
        assert selected.items() <= labels.items(), kind
    for thing in things(overlay):
        if thing["kind"] in ("PodMonitor", "Service"):
            selector = thing["spec"]["selector"]
            assert selector.get("matchLabels", selector).items() <= labels.items()
            assert labels[thing["spec"].get("jobLabel", "app.kubernetes.io/name")] == "shmserve"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_mount_has_its_volume(overlay: str) -> None:
    spec = one(overlay, "Deployment")["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in spec["volumes"]}
    assert ("models" in mounts) == (overlay != "overlays/production")
    written = {"state": "/var/lib/shmserve", "run": "/run", "shm": "/dev/shm"}
    assert written.items() <= mounts.items()
    read_only = {mount["name"] for mount in spec["containers"][0]["volumeMounts"] if mount.get("readOnly")}
    assert read_only == set(mounts) - set(written)


def settings_of(overlay: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """The server's settings, from the arguments, the variables and the file of the ConfigMap."""
    made = container(one(overlay, "Deployment"))
    file = tmp_path / "shmserve.toml"
    file.write_text(one(overlay, "ConfigMap")["data"]["shmserve.toml"].replace("/models", str(tmp_path)))
    words = [str(file) if word == "/etc/shmserve/shmserve.toml" else word for word in made["args"]]
    for entry in made.get("env", ()):
        if entry["name"].startswith("SHMSERVE_"):
            monkeypatch.setenv(entry["name"], entry["value"])
    assert words.pop(0) == "serve"
    return parse(words)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_server_accepts_the_settings(overlay: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The pod's grace period covers the time that its server may take to stop."""
    settings = settings_of(overlay, monkeypatch, tmp_path)
    spec = one(overlay, "Deployment")["spec"]["template"]["spec"]
    command = container(one(overlay, "Deployment"))["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:3] == ["shmserve", "drain", "--timeout"]
    assert float(command[3]) + settings.exit_timeout_secs + KILL_S < spec["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_restricted(overlay: str) -> None:
    """As required by the profile "restricted" of Kubernetes' pod security standards, and more."""
    spec = one(overlay, "Deployment")["spec"]["template"]["spec"]
    shared, own = spec["securityContext"], spec["containers"][0]["securityContext"]
    assert (shared["runAsNonRoot"], shared["runAsUser"]) == (True, 10001)
    assert shared["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert not spec["automountServiceAccountToken"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)


def test_gpu_and_mig_overlays_request_one_device() -> None:
    """A pod has a GPU or a slice, and a rollout needs no more than exist."""
    asked = {}
    for name in ("gpu", "mig"):
        deployment = one(f"overlays/{name}", "Deployment")
        limits = container(deployment)["resources"]["limits"]
        asked[name] = {key: value for key, value in limits.items() if key.startswith("nvidia.com/")}
        assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
        assert container(deployment)["image"] == "shmserve:0.1.0-gpu"
    assert asked == {"gpu": {"nvidia.com/gpu": "1"}, "mig": {"nvidia.com/mig-1g.10gb": "1"}}


def test_a_changed_setting_replaces_the_pods() -> None:
    name = one("base", "ConfigMap")["metadata"]["name"]
    assert re.fullmatch(r"shmserve-config-[a-z0-9]{10}", name)
    volumes = {volume["name"]: volume for volume in one("base", "Deployment")["spec"]["template"]["spec"]["volumes"]}
    assert volumes["config"]["configMap"]["name"] == name


def test_prometheus_scrapes_with_a_token_over_tls() -> None:
    (endpoint,) = one("overlays/production", "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert (endpoint["scheme"], endpoint["port"]) == ("https", "metrics")
    assert endpoint["authorization"]["credentials"]["name"] == "shmserve-metrics-token"
    made = container(one("overlays/production", "Deployment"))
    assert {made[name]["httpGet"]["scheme"] for name in PATHS} == {"HTTPS"}


def test_hpa_and_keda_use_the_same_queries_and_thresholds() -> None:
    (scaled,) = read(KUBERNETES / "components/keda/scaledobject.yaml")
    (hpa,) = read(KUBERNETES / "components/hpa/hpa.yaml")
    (rules,) = read(KUBERNETES / "components/hpa/adapter-rules.yaml")
    by_adapter = [rule["metricsQuery"].replace(",<<.LabelMatchers>>", "") for rule in rules["rules"]["external"]]
    queries, thresholds = zip(*triggers().values(), strict=True)
    assert by_adapter == list(queries)
    metrics = [metric["external"] for metric in hpa["spec"]["metrics"]]
    assert [metric["metric"]["name"] for metric in metrics] == [
        rule["name"]["as"] for rule in rules["rules"]["external"]
    ]
    thousandths = [float(metric["target"]["value"].removesuffix("m")) for metric in metrics]
    assert thousandths == [threshold * 1000 for threshold in thresholds]
    behavior = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior == hpa["spec"]["behavior"]
    for component in ("keda", "hpa"):
        (found,) = read(KUBERNETES / f"components/{component}/kustomization.yaml")
        assert any("/spec/replicas" in patch["patch"] for patch in found["patches"])
    assert "replicas" not in one("overlays/autoscaling", "Deployment")["spec"]


def test_metrics_in_the_queries_exist() -> None:
    known = {family.name for family in FAMILIES}
    for query, _ in triggers().values():
        named = {re.sub("_(bucket|sum)$", "", name) for name in re.findall(r"(?:shmserve|nv)_\w+", query)}
        assert named
        assert named <= known

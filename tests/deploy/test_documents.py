"""docs/kubernetes.md and the compose file agree with the files that they name."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests import ROOT
from tests.deploy import manifests
from tests.deploy.manifests import KUBERNETES, OVERLAYS, container, one, read
from tests.fleet.programs import need

NAME = "kubernetes"
PAGE = (ROOT / "docs" / f"{NAME}.md").read_text()
CONTAINER = ROOT / "deploy" / "container"
PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARDS = ROOT / "deploy/grafana/provisioning/dashboards/shmserve.yml"


def test_commands_of_the_page() -> None:
    rendered = re.findall(r"kubectl (?:apply -k|kustomize) (\S+)", PAGE)
    assert len(rendered) >= 2
    for folder in rendered:
        assert manifests.rendered(str(Path(folder).relative_to("deploy/kubernetes")))
    applied = re.findall(r"kubectl apply -f (\S+)", PAGE)
    assert len(applied) == 2
    assert all(read(ROOT / name) for name in applied)
    for name in re.findall(r"--file (\S+)", PAGE):
        assert (ROOT / name).is_file()


def test_the_overlay_on_the_page_can_be_built(tmp_path: Path) -> None:
    """Uses the paths of an overlay beside deploy/."""
    program = need("kubectl")
    (text,) = re.findall(r"```yaml\n(apiVersion: kustomize.*?)```", PAGE, re.DOTALL)
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    (tmp_path / "kustomization.yaml").write_text(text)
    made = subprocess.run([str(program), "kustomize", str(tmp_path)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert "image: registry.example/shmserve:0.1.0\n" in made.stdout
    assert "kind: PodMonitor\n" in made.stdout


def test_the_page_lists_all_components_and_overlays() -> None:
    listed = re.findall(r"^\| `([a-z-]+)` \| ", PAGE, re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (KUBERNETES / "components").iterdir())
    (sentence,) = re.findall(r"The overlays (.*?) are combinations", PAGE)
    assert sorted(re.findall(r"`(\w+)`", sentence)) == sorted(name.split("/")[1] for name in OVERLAYS[1:])


def test_numbers_on_the_page_match_the_manifests() -> None:
    spec = one("base", "Deployment")["spec"]["template"]["spec"]
    command = container(one("base", "Deployment"))["lifecycle"]["preStop"]["exec"]["command"]
    assert f"`{' '.join(command)}`" in PAGE
    assert f"`terminationGracePeriodSeconds` ({spec['terminationGracePeriodSeconds']})" in PAGE
    (_, queue), (_, busy) = manifests.triggers().values()
    assert f"| {queue:g} s |" in PAGE
    assert f"| {busy:g} |" in PAGE


def test_build_arguments_on_the_page_match_the_dockerfile() -> None:
    recipe = (CONTAINER / "Dockerfile").read_text()
    for name, default in re.findall(r"^\| `([A-Z_]+)` \| (.*?) \| ", PAGE, re.MULTILINE):
        assert f"\nARG {name}={default.strip().strip('`')}\n" in recipe


def compose() -> dict[str, Any]:
    (found,) = read(CONTAINER / "compose.yaml")
    return found


def test_files_mounted_by_compose_exist() -> None:
    services = compose()["services"]
    build = services["shmserve"]["build"]
    assert (CONTAINER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    named = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    files = [name for name in named if name.startswith(".")]
    assert len(files) == 4
    assert all((CONTAINER / name).exists() for name in files)
    (mounted,) = (volume.split(":") for volume in services["grafana"]["volumes"] if "../grafana/dashboards:" in volume)
    (provider,) = read(DASHBOARDS)[0]["providers"]
    assert provider["options"]["path"] == mounted[1]


def test_compose_publishes_ports_only_on_loopback() -> None:
    ports = [port for service in compose()["services"].values() for port in service["ports"]]
    assert len(ports) == 4
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_prometheus_configuration_of_compose_is_valid(tmp_path: Path) -> None:
    promtool = need("promtool")
    (tmp_path / "prometheus.yml").write_text(compose()["configs"]["prometheus"]["content"])
    for name in ("rules.yml", "alerts.yml"):
        shutil.copy(PROMETHEUS / name, tmp_path / name)
    command = [str(promtool), "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("rules found") == 2, done.stdout

"""The server's command line and environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shmserve.broker import settings
from shmserve.repo.compile import compile_instances
from shmserve.repo.schema import ModelConfig, ModelInstanceGroup

CORE = min(os.sched_getaffinity(0))


def test_the_command_line_is_stronger_than_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMSERVE_EXIT_TIMEOUT_SECS", "5")
    monkeypatch.setenv("SHMSERVE_MODEL_REPOSITORY", f"{tmp_path}:{tmp_path}")
    monkeypatch.setenv("SHMSERVE_STRICT_READINESS", "false")
    found = settings.parse([])
    assert found.exit_timeout_secs == 5
    assert found.model_repository == [tmp_path, tmp_path]
    assert found.strict_readiness is False
    assert settings.parse(["--exit-timeout-secs", "7"]).exit_timeout_secs == 7


@pytest.mark.parametrize(
    "arguments",
    [
        ["--strict-readiness", "perhaps"],
        ["--exit-timeout-secs", "-1"],
        ["--host-policy", "cpu"],
        ["--host-policy", "cpu,numa-node=0"],
        ["--host-policy", "cpu,cpu-cores=a-b"],
        ["--host-policy", "cpu,cpu-cores=100000"],
    ],
)
def test_wrong_values_are_wrong_use(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        settings.parse(["--model-repository", str(tmp_path), *arguments])
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_host_policies_say_which_cores_instances_have(tmp_path: Path) -> None:
    arguments = ["--model-repository", str(tmp_path), "--host-policy", f"cpu,cpu-cores={CORE}"]
    policies = settings.host_policies(settings.parse([*arguments, "--host-policy", f"mine,cpu-cores={CORE}-{CORE}"]))
    assert policies == {"cpu": (CORE,), "mine": (CORE,)}
    groups = (
        ModelInstanceGroup(name="a", kind="KIND_CPU", count=2),
        ModelInstanceGroup(name="b", kind="KIND_CPU", count=1, host_policy="other"),
    )
    specs = compile_instances(ModelConfig(name="m", instance_group=groups), policies)
    assert [(spec.name, spec.cpus) for spec in specs] == [("a_0", (CORE,)), ("a_1", (CORE,)), ("b_0", ())]

"""The server's command line, environment and file, and the page about them. Every flag of tritonserver is supported,
accepted with a line on what happens instead, or refused with the reason. The oracle for the flags that gateways get is
the gateway's own command line."""

from __future__ import annotations

import argparse
import contextlib
import grp
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.broker import startup
from shmserve.broker.config import command_line, settings, values
from shmserve.broker.listeners.access import Rule
from shmserve.broker.processes.cpus import host_policy
from shmserve.broker.processes.gateways import GatewaySettings
from shmserve.core.limits import Limits
from shmserve.core.owners.rate_limiter import ANY, SHARED
from shmserve.extras import install_command
from shmserve.gateway import options as gateway_flags
from shmserve.protocol.roles import INFER, OBSERVE
from shmserve.repo.backends import DIRECTORY, OUTPUT_LIMIT
from shmserve.repo.compile import CoreSet
from shmserve.repo.remote import stores
from shmserve.settings.flag import Flag
from shmserve.settings.table import BY_NAME, FLAGS, GROUPS, PASSED_ON, TRITON
from shmserve.settings.triton_flags import TRITON_FLAGS
from shmserve.system.polling import POLL_NS
from shmserve.workers.output_arenas import LIMIT_BYTES, NEAR_BYTES, near_limit
from tests.support.cases import cases
from tests.support.docs import pages
from tests.support.docs.doc_tables import TRITON as DOCUMENTED

PAGE = pages.page("settings")
CORE = min(os.sched_getaffinity(0))
GROUP = grp.getgrgid(os.getegid())
BOTH = [flag for flag in FLAGS if not flag.private and not flag.replaced_by and flag.name != "config"]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SHMSERVE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    """The only required flag."""
    return ["--model-repository", str(tmp_path)]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        settings.parse(arguments)
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert "shmserve serve --help" in text
    return text


def written(path: Path, text: str) -> list[str]:
    path.write_text(text)
    return ["--config", str(path)]


def test_flags_take_precedence_over_the_environment_and_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--model-repository" in refused([], capsys), "the only flag that is required"
    other = tmp_path / "other"
    other.mkdir()
    file = written(
        tmp_path / "s.toml", 'model-repository = "other"\nexit-timeout-secs = 3\nlog-verbose = 1\nid = "f"\n'
    )
    found = settings.parse(file)
    assert found.model_repository == [other]
    assert (found.exit_timeout_secs, found.log_verbose, found.id) == (3, 1, "f")
    monkeypatch.setenv("SHMSERVE_CONFIG", file[1])
    monkeypatch.setenv("SHMSERVE_MODEL_REPOSITORY", f"{tmp_path}:{tmp_path}")
    monkeypatch.setenv("SHMSERVE_EXIT_TIMEOUT_SECS", "5")
    monkeypatch.setenv("SHMSERVE_STRICT_READINESS", "")
    found = settings.parse([])
    assert found.model_repository == [tmp_path, tmp_path]
    assert (found.exit_timeout_secs, found.log_verbose, found.strict_readiness) == (5, 1, True)
    found = settings.parse(["--exit-timeout-secs", "7", "--model-store", str(other), "--log-verbose=0"])
    assert found.model_repository == [other]
    assert (found.exit_timeout_secs, found.log_verbose, found.id) == (7, 0, "f")
    monkeypatch.setenv("SHMSERVE_LOG_INFO", "perhaps")
    assert "SHMSERVE_LOG_INFO: 'perhaps' is neither true nor false" in refused([], capsys)


def test_repeated_abbreviated_and_boolean_flags_and_arguments_without_a_flag(base: list[str], tmp_path: Path) -> None:
    model, folder, saved = (tmp_path / name for name in ("net.onnx", "more", "tf.savedmodel"))
    model.touch()
    folder.mkdir()
    saved.mkdir()
    words = ["--model-s", str(tmp_path), "--exit-on-error", "--exit-t", "7", "--log-verbose", "1", "--log-verbose=2"]
    words += ["--log-info=false", "--strict-readiness", "FALSE", "--hints", "--triton-c", str(model), str(folder)]
    found = settings.parse([*base, *words, "--no-gateway", f"other={model}", str(saved)])
    assert found.model_repository == [tmp_path, tmp_path, folder]
    assert (found.exit_on_error, found.exit_timeout_secs, found.log_verbose, found.log_info) == (True, 7, 2, False)
    assert (found.strict_readiness, found.hints, found.triton_compatible, found.no_gateway) == (False, True, True, True)
    # A boolean flag before a file has no value.
    assert [(file.path, file.name) for file in found.model_files] == [(model, ""), (model, "other"), (saved, "")]


SAMPLES: dict[str, tuple[str, Any, str]] = {
    "boolean": ("true", True, "true"),
    "integer": ("3", 3, "3"),
    "bytes": ("2MiB", 2 << 20, '"2 MiB"'),
    "seconds": ("2.5", 2.5, "2.5"),
    "setting": ("python,a=b=c", ("python,a", "b=c"), '"python,a=b=c"'),
    "text": ("x", "x", '"x"'),
    "access": ("uid:1000=infer,observe", Rule("uid", 1000, INFER | OBSERVE), '"uid:1000=infer,observe"'),
    "group": (GROUP.gr_name, GROUP.gr_gid, f'"{GROUP.gr_name}"'),
    "limit": ("client-outbox-bytes=1 MiB", ("client_outbox_bytes", 1 << 20), '"client_outbox_bytes = 1MiB"'),
    "cache": ("local,size=1MiB", 1 << 20, '"local,size=1 MiB"'),
    "trace": ("triton,file=t.json", ("trace_file", "t.json"), '"triton,file=t.json"'),
    "resource": ("R1:10:2", ("R1", 2, 10), '"R1:10:2"'),
    "pool": ("0:4096", (0, 4096), '"0:4096"'),
    "fraction": ("0:0.5", (0, 0.5), '"0:0.5"'),
    "metrics": ("summary_quantiles=0.5:0.05,0.9", ("summary_quantiles", (0.5, 0.9)), '"summary_quantiles=0.5,0.9:1"'),
    "xid": ("74=fatal", (74, "fatal"), '"74=fatal"'),
    "decimal": ("6.0", 6.0, '"6.0"'),
    **dict.fromkeys(("roles", "servers", "HTTP restriction", "gRPC restriction"), ("x", "x", '"x"')),
}


@pytest.mark.parametrize("flag", BOTH, ids=lambda flag: flag.name)
def test_flags_variables_and_file_are_parsed_alike(flag: Flag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, value, toml = SAMPLES.get(flag.kind, ("", None, ""))
    if flag.kind in ("path", "repository"):
        text, value, toml = str(tmp_path), tmp_path, '"."'
    elif flag.kind == "choice":
        value = flag.choices[-1]
        text, toml = value.upper(), f'"{value.title()}"'
        for choice in flag.choices:
            assert values.from_text(flag, choice.upper()) == choice
    elif flag.kind == "policy":
        text = f"cpu,cpu-cores={CORE}-{CORE}"
        value, toml = host_policy(text), f'"{text}"'
    if flag.refused:
        text, value, toml = "false", False, "false"
    base = ["--model-repository", str(tmp_path)] if flag.name != "model-repository" else []
    base += ["--model-control-mode", "explicit"] if flag.name == "load-model" else []
    base += ["--socket-group", GROUP.gr_name] if flag.name == "access" else []
    wanted = [value] if flag.repeatable else value

    line = settings.parse([*base, f"--{flag.name}", text])
    file = settings.parse([*base, *written(tmp_path / "s.toml", f"{flag.name} = {toml}\n")])
    monkeypatch.setenv(flag.variable, text)
    variable = settings.parse(base)
    for found in (line, file, variable):
        assert getattr(found, flag.dest) == wanted
        assert not found.warnings
        assert settings.host_policies(found) == ({"cpu": (CORE,)} if flag.kind == "policy" else {})


@cases(
    (["--strict-readiness", "perhaps"], "'perhaps' is neither true nor false"),
    (["--exit-timeout-secs", "-1"], "not a number of seconds"),
    (["--exit-timeout-secs", "nan"], "not a number of seconds"),
    (["--model-load-thread-count", "0"], "the minimum is 1"),
    (["--log-verbose", "1KiB"], "not a whole number"),
    (["--worker-output-bytes", "1 TiB"], "KiB, MiB or GiB"),
    (["--worker-output-bytes", "1000"], "the minimum is 1048576"),
    (["--model-control-mode", "pol"], "not one of none, poll, explicit; did you mean poll?"),
    (["--backend-config", "a,b,c=1"], "neither BACKEND,KEY=VALUE nor KEY=VALUE"),
    (["--host-policy", "cpu"], "NAME,numa-node=N"),
    (["--host-policy", "cpu,numa-node=x"], "is not a NUMA node number"),
    (["--host-policy", "cpu,cpu-cores=a-b"], "not a core or a range"),
    (["--host-policy", "cpu,cpu-cores=3-1"], "ends before it begins"),
    (["--host-policy", "cpu,cpu-cores=,"], "contains no core"),
    (["--host-policy", "cpu,cpu-cores=100000"], "unusable cores: 100000; usable cores"),
    (["--host-policy", "cpu,numa-node=1000"], "NUMA node 1000 has no usable cores"),
    (["--access", "alice"], "'alice' is not WHO=ROLE,ROLE with WHO one of uid:N"),
    (["--access", "uid:x=infer"], "'uid:x' has no valid user or group ID"),
    (["--access", "uid:4294967295=infer"], "'uid:4294967295' has no valid user or group ID"),
    (["--access", "user:nobody-is-called-this=infer"], "no user 'nobody-is-called-this'"),
    (["--access", "group:nobody-is-called-this=infer"], "no group 'nobody-is-called-this'"),
    (["--access", "key:rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7=infer"], "--zmq-keys of the gateway"),
    (["--access", "uid:5=infer,rule"], "'rule' is not a role; roles are infer, observe, operate"),
    (["--socket-group", "nobody-is-called-this"], "no group 'nobody-is-called-this'"),
    (["--limit", "client_requests"], "is not NAME=VALUE"),
    (["--limit", "client_reqests=1"], "unknown limit 'client_reqests'; did you mean client_requests?"),
    (["--limit", "requests=1KiB"], "not a whole number"),
    (["name="], "'name=' names no file"),
    (["--load-model", "m"], "Use of '--load-model' requires setting '--model-control-mode=explicit' as well"),
    (["--model-control-mode=explicit", "--load-model=*", "--load-model=m"], "'*' must be the ONLY startup model"),
    (["--model-config-name", "../x"], "without .pbtxt"),
    (["--runtime-dir="], "found nothing"),
    (["--model-repositry", "x"], "--model-repositry is unknown; did you mean --model-repository?"),
    (["--metrics-config", "sumary_latencies=true"], "did you mean summary_latencies?"),
    (["--metrics-config", "summary_latencies=1"], "'1' is neither true nor false"),
    (["--metrics-config", "summary_quantiles=0.5,2:0.1"], "'2:0.1' is not QUANTILE:ERROR"),
    (["--model-load-gpu-limit", "0:2"], "expected DEVICE:FRACTION"),
    (["--allow-sagemaker=true"], "--allow-sagemaker true is not supported: there is no SageMaker endpoint"),
    (["--cache-config", "redis,host=x"], "unknown cache 'redis'; expected local,size=BYTES"),
    (["--cache-config", "local,size=0"], "0 is too small; the minimum is 1"),
    (["--cache-config", "local,size=1", "--response-cache-byte-size=1"], "Incompatible flags --response-cache-byte"),
    (["--rate-limit-resource", "R1"], "'R1', expected NAME:COUNT, NAME:COUNT:DEVICE or NAME:COUNT:global"),
    (["--rate-limit-resource", ":3"], "found ':3', expected"),
    (["--rate-limit-resource", "R1:3:all"], "found 'R1:3:all', expected"),
    (["--cuda-memory-pool-byte-size", "x:5"], "x:5"),
    (["--cuda-memory-pool-byte-size", "0:-1"], "--cuda-memory-pool-byte-size"),
    (["--config", "nowhere.toml"], "No such file"),
    (["--load=1"], "--load is ambiguous; it could be --load-limit-secs, --load-model\n"),
    (["--hel"], "--hel is ambiguous; it could be --help, --help-all\n"),
    (["models"], "models: no such file or directory"),
)
def test_invalid_arguments_are_reported_once(
    arguments: list[str], text: str, base: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused([*base, *arguments], capsys)
    assert text in message
    assert message.count("\n") == 3, "what is wrong, once"


def test_errors_of_file_and_arguments_are_reported_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = {
        "log-verbos = 1": "log-verbos is unknown; did you mean log-verbose?",
        "log-file = 3": "log-file: found the number 3, expected text",
        "repoagent-directory = 1": "repoagent-directory: found the number 1, expected text",
        "hints = true": "hints is unknown",
        'config = "x"': "config cannot be set in the file itself",
        'strict-readiness = "yes"': 'strict-readiness: found the text "yes", expected true or false',
        "log-verbose = true": "log-verbose: found true, expected a whole number",
        "exit-timeout-secs = [1]": "exit-timeout-secs: found an array, expected a number",
        "load-model = [1]": "load-model: found the number 1, expected text or an array of it",
        "worker-output-bytes = 1.5": "worker-output-bytes: found the number 1.5, expected a whole number",
        "id = 1979-05-27": "id: found a date or time, expected text",
        "[trace-config]": "trace-config: found a table, expected text",
    }
    file = written(tmp_path / "s.toml", "\n".join(lines))
    message = refused([*file, "--model-repository", str(tmp_path / "none"), "--nothing=1"], capsys)
    places = [f"{file[1]}: {text}" for text in lines.values()]
    for text in (*places, "--nothing is unknown", f"--model-repository {tmp_path}/none is not a directory"):
        assert f"\n  {text}" in message
    assert "s.toml: is not TOML" in refused(written(tmp_path / "s.toml", "a ="), capsys)


def test_missing_directories_of_backends_and_agents_are_ignored(base: list[str], tmp_path: Path) -> None:
    """Triton's documented commands name them even where they do not exist."""
    flags = [f"--{name}-directory={tmp_path}/none" for name in ("backend", "repoagent")]
    found = settings.parse([*base, *flags])
    assert found.warnings == [f"{flag.replace('=', ' ')} does not exist and is ignored" for flag in flags]
    assert DIRECTORY not in settings.backend_settings(found)
    assert not settings.agent_settings(found).directory


def test_a_missing_repository(base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing repository ends the server, except with --exit-on-error=false."""
    text = f"--model-repository {tmp_path / 'none'} is not a directory"
    missing = ["--model-repository", str(tmp_path / "none"), *base]
    for more in ([], ["--exit-on-error=true"], ["--triton-compatible"]):
        assert text in refused([*missing, *more], capsys)
    assert settings.parse([*missing, "--exit-on-error=false"]).failed == [text]
    assert settings.parse([*base, "--exit-on-error=false"]).failed == []


@pytest.mark.parametrize("file", ["config.pbtxt", "1/model.onnx"])
def test_a_model_in_place_of_a_repository(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "net"
    (folder / file).parent.mkdir(parents=True)
    (folder / file).touch()
    text = (
        f"{folder} is the directory of one model, not a repository. Serve its parent: --model-repository {tmp_path}; "
        f"or only this model of it: --model-repository {tmp_path} --model-control-mode explicit --load-model net"
    )
    for mode in ("none", "poll", "explicit"):
        for words in ([str(folder)], ["--model-repository", str(folder)]):
            assert text in refused([*words, "--model-control-mode", mode], capsys)
    assert settings.parse([str(folder), "--exit-on-error=false"]).failed == [text]
    assert settings.parse([str(tmp_path)]).failed == []


TRITON_SAMPLES = {
    "model-load-gpu-limit": "0:0.9",
    "min-supported-compute-capability": "6.0",
    "cuda-virtual-address-size": "0:1073741824",
    "sagemaker-safe-port-range": "8000-8009",
    "enable-peer-access": "false",
}


@pytest.mark.parametrize("flag", TRITON_FLAGS, ids=lambda flag: flag.name)
def test_flags_of_triton_without_effect_are_noted_and_unsupported_ones_refused(
    flag: Flag, base: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert flag.name in DOCUMENTED
    assert set(DOCUMENTED) <= BY_NAME.keys()
    assert not (flag.note and flag.refused)
    if flag.refused:
        assert settings.parse([*base, f"--{flag.name}=false"]).notes == []
        text = f"--{flag.name} true is not supported: {flag.refused}"
        assert text in refused([*base, f"--{flag.name}=true"], capsys)
        return
    found = settings.parse([*base, f"--{flag.name}", TRITON_SAMPLES.get(flag.name, "8")])
    assert (found.notes, found.warnings) == ([f"--{flag.name} has no effect: {flag.note}"], [])


def test_old_flags_of_traces(base: list[str]) -> None:
    flags = "--trace-config count=3 --trace-rate=5 --trace-file=/t.json --trace-level=MIN --trace-count=7"
    found = settings.parse([*base, *flags.split(), "--trace-log-frequency", "2"])
    others = {"trace_rate": 5, "trace_count": 3, "log_frequency": 2}
    assert dict(found.trace_config) == {"trace_file": "/t.json", "trace_level": ("TIMESTAMPS",)} | others
    assert "--trace-rate is deprecated; use --trace-config rate=" in found.warnings


def test_triton_compatible(base: list[str]) -> None:
    found = settings.parse([*base, "--triton-compatible"])
    assert (found.id, found.exit_on_error, found.strict_readiness) == ("triton", True, True)
    assert (found.http_address, found.grpc_address) == ("0.0.0.0", "0.0.0.0")
    assert found.http_roles == "infer,observe,operate"
    assert "--limit=http_json_bytes=0" in settings.gateway_settings(found).arguments
    found = settings.parse([*base, "--triton-compatible", "--id=mine", "--http-address=127.0.0.1"])
    assert (found.id, found.http_address, found.grpc_address) == ("mine", "127.0.0.1", "0.0.0.0")
    assert settings.parse(base).exit_on_error is False


def test_unknown_variables_are_reported(base: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EXIT_TIMEOUT", "URL", "MODEL_KEY", "MODEL_REPOSITRY", "PORT_1_TCP"):
        monkeypatch.setenv(f"SHMSERVE_{name}", "1")
    assert settings.parse(base).warnings == [
        "SHMSERVE_EXIT_TIMEOUT is unknown; did you mean SHMSERVE_EXIT_TIMEOUT_SECS?",
        "SHMSERVE_MODEL_REPOSITRY is for models; did you mean SHMSERVE_MODEL_REPOSITORY?",
        "SHMSERVE_PORT_1_TCP is unknown",
    ]


def test_access_rules_for_users_that_cannot_connect_are_warned_about(base: list[str]) -> None:
    other = f"uid:{os.geteuid() + 1}=infer"
    assert "without --socket-group" in settings.parse([*base, "--access", other]).warnings[0]
    for fine in ([f"--access=uid:{os.geteuid()}=infer"], ["--access", other, "--socket-group", GROUP.gr_name]):
        assert not settings.parse([*base, *fine]).warnings


def printed(flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        settings.parse([flag])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_is_grouped_and_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed("--help-all", capsys)
    places = [text.index(f"\n{group}:\n") for group in GROUPS]
    assert places == sorted(places)
    assert text.index("\nexamples:\n") > places[-1]
    for flag in FLAGS:
        assert (f"--{flag.name}" in text) is not flag.private
        assert (f"`--{flag.name}" in PAGE) is not flag.private
    assert TRITON not in PAGE


def test_help_fits_a_screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed("--help", capsys).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("  --") for line in lines) == len(command_line.SHORT) == 10
    assert "shmserve serve --help-all" in lines[-1]
    # The short help has its own text for defaults, because most of them belong to the gateway.
    known = {flag.name: flag.default_text for flag in FLAGS}
    for name, text in command_line.SHORT.items():
        if found := re.search(r"\(default: (.*?)\)", text):
            assert found[1] == known[name]


@given(st.text(max_size=20), st.sampled_from(FLAGS))
def test_any_text_is_read_or_refused(text: str, flag: Flag) -> None:
    with contextlib.suppress(ValueError):
        values.from_text(flag, text)


def test_deprecated_names(base: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings.parse([*base, "--strict-model-config=true"])
    assert found.disable_auto_complete_config is True
    assert found.warnings == ["--strict-model-config is deprecated; use --disable-auto-complete-config"]
    monkeypatch.setenv("SHMSERVE_STRICT_MODEL_CONFIG", "true")
    found = settings.parse(base)
    assert found.disable_auto_complete_config is True
    assert "(in the environment)" in found.warnings[0]
    assert settings.parse([*base, "--disable-auto-complete-config=false"]).disable_auto_complete_config is False


def test_settings_for_workers(base: list[str]) -> None:
    found = settings.parse(base)
    pool = {"pinned-memory-pool-byte-size": str(256 << 20)}
    pool["lane-address"] = f"unix://{found.runtime_dir.absolute()}/lane.sock"
    assert settings.backend_settings(found) == {OUTPUT_LIMIT: str(LIMIT_BYTES)} | pool
    backends = ["--backend-config=default-max-batch-size=8", "--backend-config", "python,a=1"]
    more = ["--backend-config=python,a=2", "--disable-auto-complete-config", "--worker-output-bytes", "1MiB"]
    found = settings.parse([*base, *backends, *more])
    assert settings.backend_settings(found) == {
        ",default-max-batch-size": "8",
        "python,a": "2",
        "disable-auto-complete-config": "true",
        OUTPUT_LIMIT: "1048576",
        **pool,
    }
    # Memory for tensors that stay on a GPU.
    found = settings.parse([*base, "--cuda-memory-pool-byte-size=0:67108864", "--cuda-memory-pool-byte-size", "2GiB"])
    told = settings.backend_settings(found)["cuda-memory-pool-byte-size"]
    assert [near_limit(told, gpu) for gpu in (0, 1)] == [64 << 20, 2 << 30]
    assert [near_limit("1:5,1:6,-1:0", 1), near_limit("1:5,-1:0", 0), near_limit("", 0)] == [6, 0, NEAR_BYTES]


def test_flags_set_the_limits(base: list[str]) -> None:
    assert settings.limits(settings.parse(base)) == Limits()
    given = """--limit requests=7 --limit=client_errors=0 --limit requests=9 --execution-limit-secs=2 --crash-limit=5
    --idle-unload-secs=1.5 --model-memory-budget=8GiB --gpu-memory-budget=1GiB --gpu-memory-budget=1:20GiB
    --rate-limit execution_count --rate-limit-resource R1:10
    --rate-limit-resource R2:3:global --cache-config=local,size=4KiB"""
    assert settings.limits(settings.parse([*base, *given.split()])) == Limits(
        requests=9,
        client_errors=0,
        execution_ns=2_000_000_000,
        crashes=5,
        idle_unload_ns=1_500_000_000,
        memory_budget=8 << 30,
        gpu_budgets=((-1, 1 << 30), (1, 20 << 30)),
        cache_bytes=4096,
        rate_limit=True,
        resources=(("R1", ANY, 10), ("R2", SHARED, 3)),
    )
    older = settings.limits(settings.parse([*base, "--response-cache-byte-size", "2KiB"]))
    assert (older.cache_bytes, older.rate_limit) == (2048, False)


def test_the_configuration_file_in_the_page_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = pages.blocks(PAGE, "toml")
    for name in ("models", "more-models"):
        (tmp_path / name).mkdir()
    file = written(tmp_path / "shmserve.toml", block)
    found = settings.parse([*file, "--exit-timeout-secs", "30"])
    assert found.exit_timeout_secs == 30
    assert found.model_repository == [tmp_path / "models", tmp_path / "more-models"]
    assert (found.worker_output_bytes, found.load_model) == (1 << 30, ["mlp", "add_sub"])
    assert "requires setting '--model-control-mode=explicit'" in refused([*file, "--model-control-mode=poll"], capsys)


def test_the_process_ends_if_it_cannot_write_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shmserve.broker.main", "--model-repository", str(tmp_path)]
    found = subprocess.run([*command, "--log-file", f"{tmp_path}/no/log"], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert re.search("cannot write to --log-file.*No such file", found.stderr)


@pytest.mark.parametrize(
    ("cores", "quota", "polls"),
    [(2, 0, False), (3, 0, False), (4, 0, True), (64, 0, True), (64, 2, False), (64, 4, True)],
)
def test_polling_is_on_with_enough_cores(cores: int, quota: int, polls: bool) -> None:
    assert settings.busy_poll_ns(CoreSet(tuple(range(cores)), quota=quota)) == polls * POLL_NS


def test_remote_repositories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """URLs and directories, in all places; URLs contain the ':' that separates directories in a variable."""

    def remote(*words: str) -> list[str]:
        found = settings.parse(list(words))
        assert found.model_repository == [tmp_path]
        return list(map(str, found.remote_repositories))

    monkeypatch.setattr(stores, "find_spec", lambda package: object())
    words = (str(tmp_path), "s3://host:9000/bucket/models", "--model-repository", "hf://owner/models")
    assert remote(*words) == [words[3], words[1]]
    assert remote(*written(tmp_path / "s.toml", 'model-repository = ["gs://bucket/x", "."]\n')) == ["gs://bucket/x"]
    monkeypatch.setenv("SHMSERVE_MODEL_REPOSITORY", f"{tmp_path};https://host:81/x")
    assert remote() == ["https://host:81/x"]
    error = refused(["--model-repository", "https://me:secretsecret@host/x"], capsys)
    assert "put it into ~/.netrc" in error
    assert "secretsecret" not in error
    monkeypatch.setattr(stores, "find_spec", lambda package: None)
    error = refused(["--model-repository", "s3://bucket"], capsys)
    assert "s3:// repositories need the package s3fs" in error


GATEWAY_SAMPLES = {
    "http-roles": "observe",
    "grpc-roles": "observe",
    "http-restricted-api": "health:a=b",
    "grpc-restricted-protocol": "health:a=b",
    "grpc-infer-response-compression-level": "high",
    "page-servers": "http://gpu1:8000,http://gpu2:8000",
}


def understood(words: tuple[str, ...]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    gateway_flags.add(parser)
    return parser.parse_args(list(words))


def parsed(place: Path, *words: str) -> GatewaySettings:
    return settings.gateway_settings(settings.parse(["--model-repository", str(place), *words]))


@pytest.mark.parametrize("flag", PASSED_ON, ids=lambda flag: flag.name)
def test_each_flag_is_a_gateway_option_with_the_same_default(flag: Flag, tmp_path: Path) -> None:
    value = GATEWAY_SAMPLES.get(flag.name, "true" if flag.kind == "boolean" else "7")
    found = parsed(tmp_path, f"--{flag.name}", value)
    assert len(found.arguments) == 1
    plain, given = (vars(understood(words))[flag.dest] for words in ((), found.arguments))
    assert given == [given[0]] if flag.repeatable else str(given).lower() == value
    assert plain == (flag.unset if flag.default is None else flag.default)


def test_invalid_values_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    for name, value, text in (
        ("--http-port", "65536", "65536 is too large; the maximum is 65535"),
        ("--grpc-keepalive-time", "0", "0 is too small; the minimum is 1"),
        ("--limit", "http_read_secs=0", "0 is too small; the minimum is 1"),
        ("--limit", "caller_share=2", "'2' is not a fraction above 0 and up to 1"),
        ("--limit", "requests=2", "unknown limit 'requests'"),
    ):
        with pytest.raises(SystemExit):
            understood((f"{name}={value}",))
        assert f"argument {name}: {text}" in capsys.readouterr().err


def test_only_given_flags_are_passed_to_the_gateway(tmp_path: Path) -> None:
    assert parsed(tmp_path) == GatewaySettings(1, ())
    assert parsed(tmp_path, "--allow-client-shm=false", "--reuse-http-port", "false") == GatewaySettings(1, ())
    assert parsed(tmp_path, "--http-port", "0", "--gateways=3") == GatewaySettings(3, ("--http-port=0",))
    limited = parsed(tmp_path, "--limit=requests=5", "--limit=http-held-bytes=1 MiB", "--limit=caller_share=1")
    assert dict(understood(limited.arguments).limit) == {"http_held_bytes": 1 << 20, "caller_share": 1.0}
    assert parsed(tmp_path, "--no-gateway", "--http-port", "0") == GatewaySettings(0, ())


def test_without_its_packages_the_gateway_starts_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(startup, "GATEWAY", ("no_such_package",))
    words = ["--model-repository", str(tmp_path)]
    with caplog.at_level("WARNING", "shmserve"):
        assert startup.gateway_settings(settings.parse(words)) == GatewaySettings(0, ())
    assert install_command("server") in caplog.text
    assert startup.gateway_settings(settings.parse([*words, "--no-gateway", "--http-port=1"])) == GatewaySettings(0, ())
    for asked in ("--http-port=1", "--gateways=2"):
        with pytest.raises(startup.CannotStart, match=r"no_such_package.*or omit its flags"):
            startup.gateway_settings(settings.parse([*words, asked]))

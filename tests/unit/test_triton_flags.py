"""Every flag of tritonserver: built, accepted with a line on what happens instead, or refused with the reason."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from shmserve.broker.config import settings
from shmserve.broker.config.flag import Flag
from shmserve.broker.config.flags import BY_NAME, FLAGS
from shmserve.broker.config.triton_flags import TRITON_FLAGS

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
REWRITE = os.environ.get("SHMSERVE_REWRITE") == "1"
FLAG_NAMES = """
id exit-timeout-secs model-store model-repository exit-on-error disable-auto-complete-config strict-readiness
model-control-mode repository-poll-secs load-model model-config-name model-load-thread-count model-load-retry-count
model-namespacing enable-peer-access allow-http http-address http-port reuse-http-port http-header-forward-pattern
http-thread-count http-max-input-size http-restricted-api allow-grpc grpc-address grpc-port reuse-grpc-port
grpc-header-forward-pattern grpc-infer-thread-count grpc-infer-allocation-pool-size grpc-max-response-pool-size
grpc-use-ssl grpc-use-ssl-mutual grpc-server-cert grpc-server-key grpc-root-cert grpc-infer-response-compression-level
grpc-keepalive-time grpc-keepalive-timeout grpc-keepalive-permit-without-calls grpc-http2-max-pings-without-data
grpc-http2-min-recv-ping-interval-without-data grpc-http2-max-ping-strikes grpc-max-connection-age
grpc-max-connection-age-grace grpc-restricted-protocol log-verbose log-info log-warning log-error log-format log-file
allow-sagemaker sagemaker-port sagemaker-safe-port-range sagemaker-thread-count allow-vertex-ai vertex-ai-port
vertex-ai-thread-count vertex-ai-default-model allow-metrics allow-gpu-metrics allow-cpu-metrics metrics-address
metrics-port metrics-interval-ms metrics-config trace-config cache-config cache-directory rate-limit
rate-limit-resource pinned-memory-pool-byte-size cuda-memory-pool-byte-size cuda-virtual-address-size
min-supported-compute-capability buffer-manager-thread-count host-policy model-load-gpu-limit allow-client-shm
backend-directory backend-config repoagent-directory strict-model-config response-cache-byte-size trace-file
trace-level trace-rate trace-count trace-log-frequency
"""
TRITON = FLAG_NAMES.split()
SAMPLES = {
    "model-load-gpu-limit": "0:0.9",
    "min-supported-compute-capability": "6.0",
    "cuda-virtual-address-size": "0:1073741824",
    "sagemaker-safe-port-range": "8000-8009",
    "enable-peer-access": "false",
}


@pytest.mark.parametrize("name", TRITON)
def test_each_flag_of_triton_is_known(name: str) -> None:
    assert name in BY_NAME
    flag = BY_NAME[name]
    assert flag.kind
    assert not (flag.note and flag.refused)


@pytest.mark.parametrize("flag", TRITON_FLAGS, ids=lambda flag: flag.name)
def test_what_has_no_effect_says_so_and_what_cannot_be_is_refused(
    flag: Flag, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flag.name in TRITON
    base = ["--model-repository", str(tmp_path)]
    if flag.refused:
        assert settings.parse([*base, f"--{flag.name}=false"]).notes == []
        with pytest.raises(SystemExit):
            settings.parse([*base, f"--{flag.name}=true"])
        assert f"--{flag.name} true is not supported: {flag.refused}" in capsys.readouterr().err
        return
    found = settings.parse([*base, f"--{flag.name}", SAMPLES.get(flag.name, "8")])
    assert found.notes == [f"--{flag.name} has no effect: {flag.note}"]
    assert found.warnings == []


def test_old_flags_of_traces(tmp_path: Path) -> None:
    found = settings.parse(
        ["--model-repository", str(tmp_path), "--trace-config", "count=3", "--trace-rate=5", "--trace-file=/t.json"]
        + ["--trace-level=MIN", "--trace-count=7", "--trace-log-frequency", "2"]
    )
    assert dict(found.trace_config) == {
        "trace_file": "/t.json",
        "trace_level": ("TIMESTAMPS",),
        "trace_rate": 5,
        "trace_count": 3,
        "log_frequency": 2,
    }
    assert "--trace-rate is deprecated; use --trace-config rate=" in found.warnings


def test_triton_compatible(tmp_path: Path) -> None:
    base = ["--model-repository", str(tmp_path), "--triton-compatible"]
    found = settings.parse(base)
    assert (found.id, found.exit_on_error, found.strict_readiness) == ("triton", True, True)
    assert (found.http_address, found.grpc_address) == ("0.0.0.0", "0.0.0.0")
    assert found.http_roles == "infer,observe,operate"
    assert found.http_max_json_size == 0
    assert "--http-max-json-size=0" in settings.gateway_settings(found).words
    found = settings.parse([*base, "--id=mine", "--http-address=127.0.0.1"])
    assert (found.id, found.http_address, found.grpc_address) == ("mine", "127.0.0.1", "0.0.0.0")
    words = settings.gateway_settings(found).words
    assert "0.0.0.0" in " ".join(words)
    assert settings.parse(base[:2]).exit_on_error is False


def test_a_missing_repository(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends the server unless that was asked for by --exit-on-error=false."""
    base = ["--model-repository", str(tmp_path / "none"), "--model-repository", str(tmp_path)]
    text = f"--model-repository {tmp_path / 'none'} is not a directory"
    assert settings.parse([*base, "--exit-on-error=false"]).failed == [text]
    for more in ([], ["--exit-on-error=true"], ["--triton-compatible"]):
        with pytest.raises(SystemExit):
            settings.parse([*base, *more])
        assert text in capsys.readouterr().err
    assert settings.parse([*base[2:], "--exit-on-error=false"]).failed == []


def _row(name: str) -> str:
    flag = BY_NAME[name]
    if flag.note:
        what = f"accepted, no effect: {flag.note}"
    elif flag.refused:
        what = f"`false` is accepted; `true` is refused: {flag.refused}"
    elif flag.instead:
        what = f"deprecated; `--{flag.instead}{' ' + flag.setting + '=' if flag.setting else ''}`"
    elif flag.triton:
        what = f"default {flag.default_text}; Triton: {flag.triton}"
    elif name == "model-namespacing":
        what = "`false` is accepted; `true` is refused: model names are unique across all repositories"
    else:
        what = "as in Triton"
    return f"| `--{name}` | {what} |"


def test_the_page_lists_them() -> None:
    """docs/settings.md, with SHMSERVE_REWRITE=1 made from here."""
    page = PAGE.read_text()
    rows = ["| Flag | What happens |", "| --- | --- |", *map(_row, sorted(TRITON))]
    compatible = [f"| `--{flag.name}` | {_text(flag.compatible)} |" for flag in FLAGS if flag.compatible is not None]
    parts = {
        "Triton's flags": rows,
        "Triton's defaults": ["| Flag | With `--triton-compatible` |", "| --- | --- |", *compatible],
    }
    made = page
    for name, lines in parts.items():
        table = "\n".join(lines)
        made = re.sub(
            rf"(<!-- begin of {name}[^\n]*-->\n).*?(<!-- end of {name} -->)",
            lambda match, table=table: f"{match[1]}\n{table}\n\n{match[2]}",  # type: ignore[misc]
            made,
            flags=re.DOTALL,
        )
        assert table in made
    if REWRITE:
        PAGE.write_text(made)
    else:
        assert page == made


def _text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)

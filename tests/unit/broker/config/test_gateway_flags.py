"""The server's flags that its gateways get. The oracle is the gateway's own command line."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from shmserve.broker import startup
from shmserve.broker.config import settings
from shmserve.broker.processes.gateways import GatewaySettings
from shmserve.extras import install_command
from shmserve.gateway import options as gateway_flags
from shmserve.settings.flag import Flag
from shmserve.settings.table import PASSED_ON

SAMPLES = {
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
    value = SAMPLES.get(flag.name, "true" if flag.kind == "boolean" else "7")
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

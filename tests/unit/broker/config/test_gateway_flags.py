"""The server's flags that its gateways get. The oracle is the gateway's own command line."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from shmserve.broker import startup
from shmserve.broker.config import settings
from shmserve.broker.config.flag import Flag
from shmserve.broker.config.flags import FLAGS
from shmserve.broker.processes.gateways import PAUSES_NS, GatewaySettings
from shmserve.core.models.lifecycle import pause_ns
from shmserve.extras import install_command
from shmserve.gateway import options as gateway_flags

PASSED = [flag for flag in FLAGS if flag.gateway]
SAMPLES = {
    "http-roles": "observe",
    "grpc-roles": "observe",
    "http-restricted-api": "health:a=b",
    "grpc-restricted-protocol": "health:a=b",
    "grpc-infer-response-compression-level": "high",
    "connection-share": "0.5",
    "address-share": "0.5",
    "token-share": "0.5",
    "page-servers": "http://gpu1:8000,http://gpu2:8000",
}


def understood(words: tuple[str, ...]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    gateway_flags.add(parser)
    return parser.parse_args(list(words))


def parsed(place: Path, *words: str) -> GatewaySettings:
    return settings.gateway_settings(settings.parse(["--model-repository", str(place), *words]))


@pytest.mark.parametrize("flag", PASSED, ids=lambda flag: flag.name)
def test_each_flag_is_a_gateway_option_with_the_same_default(flag: Flag, tmp_path: Path) -> None:
    value = SAMPLES.get(flag.name, "true" if flag.kind == "boolean" else "7")
    found = parsed(tmp_path, f"--{flag.name}", value)
    assert len(found.arguments) == 1
    plain, given = (vars(understood(words))[flag.gateway.replace("-", "_")] for words in ((), found.arguments))
    assert given == [given[0]] if flag.repeatable else str(given).lower() == value
    if not flag.shown.startswith("as "):
        assert plain in (None, []) or str(plain).lower() == flag.shown


def test_an_integer_out_of_range_is_reported_with_both_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    for name, value, bounds in (
        ("--http-port", "65536", "0 to 65535"),
        ("--grpc-keepalive-time", "0", f"1 to {2**31 - 1}"),
        ("--memory-bytes", str(2**63), f"1 to {2**63 - 1}"),
        ("--http-max-json-size", "-1", f"0 to {2**63 - 1}"),
    ):
        with pytest.raises(SystemExit):
            understood((f"{name}={value}",))
        assert f"argument {name}: '{value}' is not an integer from {bounds}" in capsys.readouterr().err


def test_only_given_flags_are_passed_to_the_gateway(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed(tmp_path) == GatewaySettings(1, ())
    assert parsed(tmp_path, "--allow-client-shm=false", "--reuse-http-port", "false") == GatewaySettings(1, ())
    assert parsed(tmp_path, "--http-port", "0", "--gateways=3") == GatewaySettings(3, ("--http-port=0",))
    mixed = parsed(tmp_path, "--gateway-args=--a 'b c'", "--metrics-port=1")
    assert mixed.arguments == ("--metrics-port=1", "--a", "b c")
    assert parsed(tmp_path, "--no-gateway", "--http-port", "0") == GatewaySettings(0, ())
    with pytest.raises(SystemExit):
        parsed(tmp_path, "--gateway-args='a")
    assert "--gateway-args: No closing quotation" in capsys.readouterr().err


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


def test_restart_pauses_grow_up_to_a_limit() -> None:
    assert [pause_ns(deaths, *PAUSES_NS) / 1e9 for deaths in range(1, 6)] == [0, 1, 2, 4, 8]
    assert pause_ns(10_000, *PAUSES_NS) == PAUSES_NS[1]

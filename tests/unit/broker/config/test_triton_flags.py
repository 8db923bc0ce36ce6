"""Every flag of tritonserver is supported, accepted with a line on what happens instead, or refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from shmserve.broker.config import settings
from shmserve.settings.flag import Flag
from shmserve.settings.table import BY_NAME
from shmserve.settings.triton_flags import TRITON_FLAGS
from tests.support.docs.doc_tables import TRITON

SAMPLES = {
    "model-load-gpu-limit": "0:0.9",
    "min-supported-compute-capability": "6.0",
    "cuda-virtual-address-size": "0:1073741824",
    "sagemaker-safe-port-range": "8000-8009",
    "enable-peer-access": "false",
}


@pytest.mark.parametrize("flag", TRITON_FLAGS, ids=lambda flag: flag.name)
def test_flags_without_effect_are_noted_and_unsupported_ones_refused(
    flag: Flag, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flag.name in TRITON
    assert set(TRITON) <= BY_NAME.keys()
    assert not (flag.note and flag.refused)
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
    others = {"trace_rate": 5, "trace_count": 3, "log_frequency": 2}
    assert dict(found.trace_config) == {"trace_file": "/t.json", "trace_level": ("TIMESTAMPS",)} | others
    assert "--trace-rate is deprecated; use --trace-config rate=" in found.warnings


def test_triton_compatible(tmp_path: Path) -> None:
    base = ["--model-repository", str(tmp_path), "--triton-compatible"]
    found = settings.parse(base)
    assert (found.id, found.exit_on_error, found.strict_readiness) == ("triton", True, True)
    assert (found.http_address, found.grpc_address) == ("0.0.0.0", "0.0.0.0")
    assert found.http_roles == "infer,observe,operate"
    assert "--limit=http_json_bytes=0" in settings.gateway_settings(found).arguments
    found = settings.parse([*base, "--id=mine", "--http-address=127.0.0.1"])
    assert (found.id, found.http_address, found.grpc_address) == ("mine", "127.0.0.1", "0.0.0.0")
    assert settings.parse(base[:2]).exit_on_error is False


def test_a_missing_repository(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing repository ends the server, except with --exit-on-error=false."""
    base = ["--model-repository", str(tmp_path / "none"), "--model-repository", str(tmp_path)]
    text = f"--model-repository {tmp_path / 'none'} is not a directory"
    assert settings.parse([*base, "--exit-on-error=false"]).failed == [text]
    for more in ([], ["--exit-on-error=true"], ["--triton-compatible"]):
        with pytest.raises(SystemExit):
            settings.parse([*base, *more])
        assert text in capsys.readouterr().err
    assert settings.parse([*base[2:], "--exit-on-error=false"]).failed == []


@pytest.mark.parametrize("file", ["config.pbtxt", "1/model.onnx"])
def test_a_model_in_place_of_a_repository(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "net"
    (folder / file).parent.mkdir(parents=True)
    (folder / file).write_text("")
    text = (
        f"{folder} is the directory of one model, not a repository. Serve its parent: --model-repository {tmp_path}; "
        f"or only this model of it: --model-repository {tmp_path} --model-control-mode explicit --load-model net"
    )
    for mode in ("none", "poll", "explicit"):
        for words in ([str(folder)], ["--model-repository", str(folder)]):
            with pytest.raises(SystemExit):
                settings.parse([*words, "--model-control-mode", mode])
            assert text in capsys.readouterr().err
    assert settings.parse([str(folder), "--exit-on-error=false"]).failed == [text]
    assert settings.parse([str(tmp_path)]).failed == []

"""Every public method of the clients of `tritonclient` against a gateway, called by a process that has the package."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from tests import ROOT
from tests.tritonclient.serving import ABSENT, END_S, PYTHON, serving

pytestmark = [pytest.mark.process, pytest.mark.skipif(not PYTHON.exists(), reason=ABSENT)]

MODELS = ["simple", "simple_string", "simple_identity", "custom_identity_int32", "simple_sequence", "repeat_int32"]


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with serving(tmp_path_factory.mktemp("models"), MODELS) as endpoints:
        yield endpoints


@pytest.mark.parametrize("face", ["http", "http.aio", "grpc", "grpc.aio"])
def test_every_public_method_works(endpoints: dict[str, str], face: str) -> None:
    command = [str(PYTHON), "-m", "tests.tritonclient.calls", endpoints["http"], endpoints["grpc"], face]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=2 * END_S, check=False)
    assert done.returncode == 0, done.stderr.decode()
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) > 12
    failed = [f"{case['case']}: {case['failed']}" for case in cases if case["failed"]]
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)

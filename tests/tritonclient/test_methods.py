"""Every public method of `tritonclient` against a gateway.

One process, in the environment with the package, calls all of them; each is a separate test.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from tests import ROOT
from tests.tritonclient.methods import METHODS
from tests.tritonclient.serving import ABSENT, END_S, PYTHON, serving

pytestmark = [pytest.mark.process, pytest.mark.skipif(not PYTHON.exists(), reason=ABSENT)]

MODELS = ["simple", "simple_string", "simple_identity", "custom_identity_int32", "simple_sequence", "repeat_int32"]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Case -> its error, or ""."""
    with serving(tmp_path_factory.mktemp("models"), MODELS) as endpoints:
        command = [str(PYTHON), "-m", "tests.tritonclient.calls", endpoints["http"], endpoints["grpc"]]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=4 * END_S, check=False)
        assert found.returncode == 0, found.stderr.decode()
        lines = [json.loads(line) for line in found.stdout.splitlines()]
        yield {line["case"]: line["failed"] for line in lines}


def test_every_public_method_has_a_case(errors: dict[str, str]) -> None:
    assert errors["inspection"] == ""


@pytest.mark.parametrize("method", METHODS)
def test_each_public_method_works(errors: dict[str, str], method: str) -> None:
    if errors[method]:
        pytest.fail(errors[method], pytrace=False)

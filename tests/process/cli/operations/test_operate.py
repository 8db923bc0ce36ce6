"""Commands that name a model that does not exist, against a real server.

tests/unit/clients/cli covers the commands with a fake broker, tests/process/docs runs those of the page.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import run
from tests.support.living import identity
from tests.support.shared_server import SharedServer

pytestmark = pytest.mark.process


def test_misspelled_model_names_are_reported_by_each_command(
    shared_server: SharedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity(tmp_path, "mlp")
    monkeypatch.delenv("SHMSERVE_URL", raising=False)
    unknown = "Request for unknown model: 'mpl' is not found"
    with shared_server.serving(tmp_path) as server:
        monkeypatch.setenv("SHMSERVE_RUNTIME_DIR", str(server.runtime_dir))
        for _ in range(2):  # models of the repository may already be unloaded
            assert run("unload", "mlp")[0] == 0
        for words, text in (
            ("logs mpl", unknown),  # first: operations on any name leave records about it
            ("load mpl", "failed to load 'mpl', failed to poll from model repository: no model repository has it"),
            ("unload mpl", unknown),
            ("unload mpl --no-wait", unknown),
            ("restart mpl", "cannot restart model 'mpl': it is not served"),
            ("restart mpl --version 3", "cannot restart version 3 of model 'mpl': it is not served"),
            ("config mpl", unknown),
            ("stats mpl", unknown),
            ("models mpl", "unknown model 'mpl'"),
            ("ready mpl", unknown),
            ("infer mpl --random", unknown),
            ("bench mpl --window 50ms", unknown),
        ):
            error = f"shmserve {words.split()[0]}: {text}; did you mean 'mlp'?\n"
            assert run(*words.split()) == (1, "", error)

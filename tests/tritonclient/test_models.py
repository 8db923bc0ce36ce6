"""The models for the examples of `tritonclient`: valid configurations, sources and the program that writes them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from shmserve.repo.load import ModelContext, examine
from tests.tritonclient import models as client_models


@pytest.mark.parametrize("name", client_models.MODELS)
def test_each_client_model_can_be_served(name: str, tmp_path: Path) -> None:
    assert client_models.build(tmp_path, [name]) == [name]
    text = (tmp_path / name / "config.pbtxt").read_text()
    backend = "python" if (tmp_path / name / "1" / "model.py").exists() else "identity"
    assert f'backend: "{backend}"' in text
    assert not examine(text, "config.pbtxt", ModelContext(name, (backend,), (), ())).problems
    for source in tmp_path.rglob("*.py"):
        ast.parse(source.read_text())


def test_the_program_builds_the_named_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert client_models.main([str(tmp_path), "simple", "simple_identity"]) == 0
    assert client_models.main([str(tmp_path), "simple"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["simple", "simple_identity"]
    assert capsys.readouterr().out == "  simple\n  simple_identity\n  simple\n"
    assert client_models.main([str(tmp_path), "simples"]) == 2
    assert "usage" in capsys.readouterr().err

"""Functions with @shmserve.model, found without running their file."""

from __future__ import annotations

from pathlib import Path

import pytest

from shmserve.errors import InvalidRequest
from shmserve.repo.load import parse
from shmserve.repo.storage.model_functions import functions_in
from tests.support.cases import cases


def found(tmp_path: Path, source: str) -> dict[str, str]:
    path = tmp_path / "app.py"
    path.write_text(source)
    return {model.name: model.config for model in functions_in(path)}


def test_modules_beside_the_file_belong_to_its_models(tmp_path: Path) -> None:
    package = tmp_path / "words"
    package.mkdir()
    (package / "__init__.py").write_text("import os, app")
    (package / "long.py").write_text("from . import short")
    (tmp_path / "texts.py").write_text("import missing, broken")
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "other.py").touch()
    path = tmp_path / "app.py"
    path.write_text("import shmserve, texts\nfrom words.long import word\n@shmserve.model\ndef f(x): ...")
    (model,) = functions_in(path)
    assert model.modules == ("app.py", "broken.py", "texts.py", "words/__init__.py", "words/long.py")


@cases(
    "import shmserve\n@shmserve.model\ndef f(x): ...",
    "import shmserve as s\n@s.model()\ndef f(x): ...",
    "from shmserve import model\n@model\nasync def f(x): ...",
    "from shmserve import model as serve\n@serve()\nclass f: ...",
    "import functools, shmserve\n@shmserve.model\n@functools.cache\ndef f(x): ...\ndef g(x): ...",
)
def test_decorated_functions_are_found_in_all_forms(source: str, tmp_path: Path) -> None:
    assert list(found(tmp_path, source)) == ["f"]


def test_decorator_arguments_become_the_configuration(tmp_path: Path) -> None:
    texts = found(
        tmp_path,
        "import shmserve\n"
        '@shmserve.model(name="my model", batch=True, max_batch_size=8, instances=2)\ndef f(x): ...\n'
        "@shmserve.model(batch=True)\ndef g(x): ...\n@shmserve.model\ndef h(x): ...",
    )
    config, default, alone = (parse(texts[name]) for name in ("my model", "g", "h"))
    assert (config.backend, config.max_batch_size, config.instance_group[0].count) == ("python", 8, 2)
    values = {key: value.string_value for key, value in config.parameters.items()}
    assert values == {"function": "f", "strict_outputs": "true", "stacked": "true"}
    assert [one.max_batch_size for one in (default, alone)] == [32, 0]
    assert [one.dynamic_batching is None for one in (config, default, alone)] == [False, False, True]
    assert "stacked" not in alone.parameters


@cases(
    ("def f(x): ...", "app.py has no model: put @shmserve.model above a function or class"),
    ("def f(:", "app.py, line 2: invalid syntax"),
    ("@shmserve.model(8)\ndef f(x): ...", "line 2: @shmserve.model takes keywords only: name, batch,"),
    ("@shmserve.model(size=8)\ndef f(x): ...", "line 2: @shmserve.model has no option 'size'; it has name, batch"),
    ("N = 8\n@shmserve.model(batch=True, max_batch_size=N)\ndef f(x): ...", "line 3: write max_batch_size=... as"),
    ("@shmserve.model(batch=1)\ndef f(x): ...", "line 2: batch=1 is not of type bool"),
    ("@shmserve.model(max_batch_size=8)\ndef f(x): ...", "max_batch_size=8 needs batch=True"),
    ("@shmserve.model(instances=0)\ndef f(x): ...", "must be at least 1"),
    ("@shmserve.model(name='a/b')\ndef f(x): ...", "line 2: 'a/b' cannot be the name of a model"),
    (
        "@shmserve.model\ndef f(x): ...\n@shmserve.model(name='f')\ndef g(x): ...",
        "line 4: model 'f' is defined twice",
    ),
    ("def g():\n    @shmserve.model\n    def f(x): ...", "line 4: 'f' must be defined at the top level"),
    ("@shmserve.model\ndef f(x): ...\nclass TritonPythonModel: ...", "keep one form"),
)
def test_invalid_decorators_are_refused(body: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        found(tmp_path, f"import shmserve\n{body}")
    assert text in str(caught.value)

"""The log of a real server. Its formats, limits and files are tested in unit/broker."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import shmserve
from tests.support.launch import Launched
from tests.support.living import until
from tests.support.model_files import python_model, write_model

pytestmark = pytest.mark.process

CONFIG = """
backend: "python"
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { count: 2 kind: KIND_CPU } ]
"""
RAISES = python_model("json.loads('{')")
FAILS = python_model("return self.respond(x)", "json.loads('{')")
X = {"x": np.ones(1, np.float32)}


def records(text: str) -> list[str]:
    """Each record with its indented continuation lines."""
    return re.split(r"\n(?=\d{4}-)", text.strip())


def test_a_failed_load_is_logged_once_with_a_traceback(tmp_path: Path) -> None:
    """Even if both instances fail, with retries, and if a reload fails."""
    root = tmp_path / "models"
    write_model(root, "m", CONFIG, FAILS)
    options = ("--model-control-mode", "explicit", "--load-model", "m", "--model-load-retry-count", "1")
    with (
        Launched(root, tmp_path / "run", *options) as server,
        shmserve.Client(runtime_dir=server.runtime_dir) as client,
    ):
        first = [text for text in records(server.log) if "JSONDecodeError" in text]
        until(client, lambda: server.log.count("UNAVAILABLE") == 1)
        (root / "m" / "1" / "model.py").write_text(RAISES)
        client.load("m")
        with pytest.raises(shmserve.ModelFailed):
            client.infer("m", X)
        until(client, lambda: f'  File "{root}/m/1/model.py", line ' in server.log)
        before = len(records(server.log))
        (root / "m" / "1" / "model.py").write_text(FAILS)
        with pytest.raises(shmserve.ServeError, match="JSONDecodeError"):
            client.load("m")
        second = [text for text in records(server.log)[before:] if "JSONDecodeError" in text]
    again = "load failed for model 'm': version 1 is at UNAVAILABLE state: "
    for found, text in ((first, "model 'm' version 1 is UNAVAILABLE: "), (second, again)):
        retry, end = found
        assert " WARNING model 'm' version 1 failed to load and will be retried (--model-load-retry-count): " in retry
        assert f" ERROR {text}failed to load: JSONDecodeError" in end
        both = retry + end
        assert both.count("Traceback") == 1
        assert both.count('File "m/1/model.py", line') == 1, "as in the repository, not where a copy is kept"
        assert "/workers/" not in both

"""The log of a real server: failed loads, workers that print too much or crash, and a log that cannot be written."""

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
ECHO = "return self.respond(x)"
RAISES = python_model("json.loads('{')")
FAILS = python_model(ECHO, "json.loads('{')")
PRINTS = python_model(
    ECHO,
    """
    def print_lines():
        number = 0
        while True:
            number += 1
            os.write(1, b"line %d\\n" % number)

    threading.Thread(target=print_lines, daemon=True).start()
    """,
)
X = {"x": np.ones(1, np.float32)}


def write(folder: Path, source: str, config: str = CONFIG) -> Path:
    """Writes the model "m" into a repository, and returns the repository."""
    write_model(folder / "models", "m", config, source)
    return folder / "models"


def records(text: str) -> list[str]:
    """Each record with its indented continuation lines."""
    return re.split(r"\n(?=\d{4}-)", text.strip())


def test_a_failed_load_is_logged_once_with_a_traceback(tmp_path: Path) -> None:
    """Even if both instances fail, with retries, and if a reload fails."""
    root = write(tmp_path, FAILS)
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


def test_a_log_that_cannot_be_written_is_reported_once(tmp_path: Path) -> None:
    """It is reported on the console, and the models are served."""
    with (
        Launched(write(tmp_path, PRINTS), tmp_path / "run", "--log-file", "/dev/full") as server,
        shmserve.Client(runtime_dir=server.runtime_dir) as client,
    ):
        for _ in range(100):
            client.infer("m", X)
    text = "shmserve: cannot write the log: No space left on device; records are lost until it works again\n"
    assert server.log == text

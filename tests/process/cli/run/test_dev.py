"""`shmserve dev`: a saved file is served at once, and an error in it is printed while the old code keeps serving."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import shmserve
from tests.support.commands import COMMAND
from tests.support.living import until, write

pytestmark = pytest.mark.process

APP = "import shmserve\nfrom words import word\n\n\n@shmserve.model\ndef say(x: int) -> str:\n    return word * x\n"


def test_saved_files_are_served(tmp_path: Path) -> None:
    app, words, run = tmp_path / "app.py", tmp_path / "words.py", tmp_path / "run"
    app.write_text("import shmserve\ndef broken(:\n")
    words.write_text("word = 'a'")
    command = [*COMMAND, "dev", str(app), "--no-gateway", "--runtime-dir", str(run)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert "app.py, line 2: invalid syntax" in process.stderr.readline()
            assert "serving" in process.stderr.readline()
            with shmserve.Client(runtime_dir=run) as client:

                def said() -> str:
                    return client.infer("say", {"x": 2})["output"].item().decode()  # type: ignore[no-any-return]

                assert client.models() == []
                write(app, APP)
                until(client, lambda: [model["state"] for model in client.models()] == ["READY"])
                assert said() == "aa"
                write(words, "word = 'b'")
                until(client, lambda: said() == "bb")
                write(app, "def broken(:\n")
                until(client, lambda: "line 1" in str(client.models()[0]["last_failed_change"]))
                assert said() == "bb"
                write(app, APP.replace("word * x", "word"))
                until(client, lambda: said() == "b")
        finally:
            process.terminate()
            _, log = process.communicate()
    assert process.returncode == 0
    assert "app.py, line 1: invalid syntax; the previous version is still served" in log
    assert log.count("serves the change after") == 3

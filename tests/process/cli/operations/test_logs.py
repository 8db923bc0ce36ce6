"""`shmserve logs`: for one model, for all, after a server restart, and for operators only."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from shmserve.testing import Server
from tests.support.commands import IMPATIENT, run
from tests.support.ensemble_models import config_text
from tests.support.living import identity
from tests.support.model_files import python_model, write_model
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.process

CONFIG = config_text("python", "x:FP32:[1]", "y:FP32:[1]")
TALKS = python_model('os.write(1, b"heard %d\\n" % int(x[0])); return self.respond(x)')


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    identity(root, "silent")
    write_model(root, "talks", CONFIG, TALKS)
    return root


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("place")
    with Server(repository, "--log-file", str(place / "log"), runtime_dir=place / "run") as server:
        yield server


def say(server: Server, number: int) -> None:
    with server.client() as client:
        client.infer("talks", {"x": np.array([number], np.float32)})


def command(server: Server, *words: str) -> list[str]:
    return [*IMPATIENT, "logs", "--runtime-dir", str(server.runtime_dir), *words]


def read_until(stream: IO[str], text: str) -> list[str]:
    lines = []
    for line in stream:
        lines.append(line.rstrip("\n"))
        if text in line:
            return lines
    raise AssertionError(f"the stream ended without '{text}': {lines}")


def printed(server: Server, *words: str) -> list[str]:
    code, out, err = run("logs", "--runtime-dir", server.runtime_dir, *words)
    assert (code, err) == (0, "")
    return out.splitlines()


def test_records_of_a_model(server: Server) -> None:
    say(server, 1)
    with subprocess.Popen(command(server, "talks", "-f"), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        read_until(process.stdout, "heard 1")  # the worker's output reaches the broker on a separate path
        process.kill()
    everything, talks, silent = (printed(server, *words) for words in ([], ["talks"], ["silent"]))
    assert any("ready: serving 2 of 2 models" in line for line in everything)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO \[talks_0_0\] heard 1", talks[-1])
    assert [line for line in talks if "READY after" in line]
    assert not [line for line in silent if "talks" in line]
    assert [line for line in silent if "model 'silent' version 1 READY after" in line]
    assert printed(server, "talks", "--instance", "talks_0_0", "-n", "1") == talks[-1:]
    assert printed(server, "talks", "--level", "error") == []
    (colored,) = printed(server, "--color", "-n", "1")
    assert re.match(r"\x1b\[2m\d{4}-.*?\x1b\[0m INFO ", colored)
    records = [json.loads(line) for line in printed(server, "talks", "--json")]
    assert [record["text"] for record in records] == [line.split(" ", 3)[3] for line in talks]
    assert {record["model"] for record in records} == {"talks"}


def test_follow_reports_a_restarted_server(repository: Path, tmp_path: Path) -> None:
    place = tmp_path / "run"
    with contextlib.ExitStack() as stack:
        with Server(repository, runtime_dir=place) as server:
            process = stack.enter_context(
                subprocess.Popen(
                    command(server, "talks", "--follow"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stderr is not None
            read_until(process.stdout, "READY after")
            for number in (5, 6):
                say(server, number)
                assert len([line for line in read_until(process.stdout, f"heard {number}") if "heard" in line]) == 1
        assert "waiting for the server" in process.stderr.readline()
        with Server(repository, runtime_dir=place) as server:
            lines = read_until(process.stdout, "READY after")
            say(server, 7)
            lines += read_until(process.stdout, "heard 7")
            assert not [line for line in lines if "heard 5" in line or "heard 6" in line]
            process.send_signal(signal.SIGINT)
            errors = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 130
    assert errors == "shmserve logs: the server was restarted\nshmserve logs: interrupted\n"


def test_without_a_server_the_error_names_other_places_of_the_log(tmp_path: Path) -> None:
    code, _, err = run("logs", "--runtime-dir", tmp_path)
    assert code == 1
    assert "the log of a server that has ended is in its --log-file, or in `journalctl -u" in err

"""The commands that operate models, and their completion, against a broker with answers from the test."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmserve import errors
from shmserve.clients.cli import main
from shmserve.clients.cli.commands.operate import progress
from shmserve.clients.cli.commands.status import models_text, stats_text
from shmserve.terminal.console import Screen, state_style
from shmserve.terminal.tables import bytes_text
from tests.support.broker.fake_broker import NOTHING, FakeBroker
from tests.support.broker.running_broker import running
from tests.support.commands import COMMAND
from tests.support.repo.golden import assert_golden
from tests.support.system.terminal import Terminal

END_S = 60
READY = {"versions": [{"version": "2", "state": "READY", "seconds": 1.25}], "changed": True, "warnings": []}


def instance(name: str, **more: Any) -> dict[str, Any]:
    found = {"name": name, "state": "ready", "kind": "KIND_CPU", "device": 0, "pid": 41, "memory_bytes": 50 << 20,
             "restarts": 0, "reason": ""}  # fmt: skip
    return found | more


INDEX: list[dict[str, Any]] = [
    {"name": "mlp", "version": "1", "state": "READY", "reason": "", "default": False, "loading_seconds": 0.25,
     "scaled": [1, 4], "reloading": False,
     "instances": [instance("mlp_0_0"), instance("mlp_0_0", state="stopping", pid=40)]},
    {"name": "mlp", "version": "2", "state": "READY", "reason": "", "default": True, "loading_seconds": 3.5,
     "reloading": True, "queued": 7, "in_flight": 2, "instances": [
        instance("mlp_0_0", pid=42, in_flight=2, busy_seconds=12.3),
        instance("mlp_0_1", state="starting", pid=43, kind="KIND_GPU", device=3, memory_bytes=1 << 30),
        instance("mlp_0_2", state="failed", passive=True, pid=0, memory_bytes=0, restarts=3, reason="signal 9"),
     ]},
    {"name": "odd", "version": "1", "state": "UNAVAILABLE", "reason": "no such backend", "default": False,
     "loading_seconds": 0, "reloading": False, "instances": [instance("odd_0_0", state="stopped", pid=0)]},
    {"name": "other", "version": "", "state": "", "reason": ""},
]  # fmt: skip


class Operated(FakeBroker):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.done: list[tuple[str, str, int, Any]] = []
        self.answers |= {"metadata": {"name": "fake", "version": "1"}, "models": INDEX}
        for what in ("load", "unload", "restart", "rollback"):
            self.answers[what] = lambda model, version, body, what=what: self.note(what, model, version, body)

    def note(self, what: str, model: str, version: int, body: bytes) -> Any:
        line, _, rest = body.partition(b"\n")
        said = json.loads(line) if line else None
        self.done.append((what, model, version, (said, rest) if rest else said))
        if model == "broken":
            raise errors.Unavailable("failed to load 'broken', no version is available: version 1: no such file")
        if model == "sad":
            raise errors.Internal("it would not")
        if model == "never":
            return NOTHING
        if what in ("load", "rollback"):
            return {"model": model, **READY, "changed": model != "same", "warnings": ["odd"] if model == "warn" else []}
        gone = {"state": "UNAVAILABLE", "seconds": 1.0}
        versions = [] if model in ("other", "othr") else [{"version": "1", **gone}, {"version": "2", **gone}]
        return {"model": model, "versions": versions, "changed": True, "warnings": []}


@pytest.fixture
def broker() -> Iterator[Operated]:
    with running(Operated) as made:
        yield made


def run(broker: FakeBroker, *words: str) -> int:
    return main.main([*words, "--url", broker.lane])


def test_load(broker: Operated, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(broker, "load", "a", "same", "a") == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "a: version 2 is READY after 1.25 s",
        "same: nothing has changed; version 2 is READY",
    ]
    assert said.err == "", "which is no terminal"
    assert sorted(broker.done) == [("load", "a", 0, None), ("load", "same", 0, None)]
    assert run(broker, "load", "warn") == 0
    said = capsys.readouterr()
    assert said.out == "warn: version 2 is READY after 1.25 s\n"
    assert said.err == "shmserve load: warning: warn: odd\n"
    broker.done.clear()
    assert run(broker, "load", "--all") == 0
    assert sorted(model for _, model, _, _ in broker.done) == ["mlp", "odd", "other"]
    assert capsys.readouterr().out.count("\n") == 3
    assert run(broker, "load", "a", "--previous") == 0
    assert broker.done.pop() == ("rollback", "a", 0, None)


def test_each_failure_has_its_reason(broker: Operated, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(broker, "load", "a", "broken", "sad", "b") == 1
    said = capsys.readouterr()
    assert said.out.splitlines() == ["a: version 2 is READY after 1.25 s", "b: version 2 is READY after 1.25 s"]
    assert said.err.splitlines() == [
        "shmserve load: failed to load 'broken', no version is available: version 1: no such file",
        "shmserve load: sad: it would not",
    ]
    assert run(broker, "load", "broken", "a", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found[0]["model"], found[0]["error"]["code"]) == ("broken", "UNAVAILABLE")
    assert found[1]["versions"][0]["state"] == "READY"
    assert run(broker, "load", "never", "--timeout", "0.05") == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "'load' of model 'never' did not finish within its timeout; the server continues it; --timeout" in said.err


def test_a_load_sends_its_settings_and_files(broker: Operated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, model = tmp_path / "config.json", tmp_path / "model.onnx"
    config.write_text('{"backend": "onnxruntime"}')
    model.write_bytes(b"bytes\nof it")
    words = ["--config-json", str(config), "--file", f"1/model.onnx={model}", "--file", f"1/a=b={model}"]
    assert run(broker, "load", "a", *words[:4]) == 0
    header = {"config": {"backend": "onnxruntime"}, "files": [["1/model.onnx", 11]]}
    assert broker.done.pop() == ("load", "a", 0, (header, b"bytes\nof it"))
    with config.open() as text:
        monkeypatch.setattr(sys, "stdin", text)
        assert run(broker, "load", "a", "--config-json", "-") == 0
    assert broker.done.pop() == ("load", "a", 0, {"config": {"backend": "onnxruntime"}})


def test_unload_and_restart(broker: Operated, capsys: pytest.CaptureFixture[str]) -> None:
    plain = {"unload_dependents": False, "wait": True}
    for words, operation, said in (
        ("unload a", ("unload", "a", 0, plain), "a: versions 1, 2 unloaded\n"),
        ("unload a --no-wait --dependents", ("unload", "a", 0, {"unload_dependents": True, "wait": False}),
         "a: unloading versions 1, 2\n"),
        ("unload other", ("unload", "other", 0, plain), "other: nothing to unload\n"),
        ("restart a --version 2 --instance a_0_1", ("restart", "a", 2, {"instance": "a_0_1"}),
         "a: instance a_0_1 rest"),
        ("restart a --version 2", ("restart", "a", 2, {"instance": ""}), "a: version 2 restarted\n"),
        ("restart a", ("restart", "a", 0, {"instance": ""}), "a: versions 1, 2 restarted\n"),
    ):  # fmt: skip
        assert run(broker, *words.split()) == 0
        assert broker.done.pop() == operation
        assert capsys.readouterr().out.startswith(said)
    assert run(broker, "unload", "a", "--force", "--timeout", "5", "--json") == 0
    assert broker.done.pop() == ("unload", "a", 0, plain | {"force": True, "timeout": 5})
    (found,) = json.loads(capsys.readouterr().out)
    assert [entry["version"] for entry in found["versions"]] == ["1", "2"]


def test_unload_of_a_model_that_does_not_exist(broker: Operated, capsys: pytest.CaptureFixture[str]) -> None:
    text = "Request for unknown model: 'othr' is not found"
    for more in ((), ("--no-wait",)):
        assert run(broker, "unload", "othr", "a", *more) == 1
        said = capsys.readouterr()
        assert said.out.startswith("a: ")
        assert said.err == f"shmserve unload: {text}; did you mean 'other'?\n"
    assert run(broker, "unload", "othr", "--json") == 1
    assert json.loads(capsys.readouterr().out) == [{"model": "othr", "error": {"code": "NOT_FOUND", "message": text}}]


def test_a_terminal_shows_the_progress_and_ctrl_c_ends_the_command(broker: Operated) -> None:
    command = [*COMMAND, "load", "mlp", "never", "--url", broker.lane]
    with Terminal(command, 60, 24, {}) as terminal:
        terminal.wait_for(lambda text: re.search(r"^[|/\\-] loading never, \d s$", text, re.MULTILINE))
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.ends() == 130
        assert "shmserve load: interrupted" in terminal.lines
    assert progress(INDEX, ["mlp"]) == ": 2 of 4 instances"
    assert progress(INDEX, ["odd", "other"]) == ""


def statistics(requests: int, **more: Any) -> dict[str, Any]:
    times = {"queue": 20_000, "compute_input": 1_000, "compute_infer": 3_000, "compute_output": 1_000, "success": 0}
    counted = {name: {"count": requests, "ns": ns * requests} for name, ns in times.items()}
    counted["fail"] = {"count": requests // 400, "ns": 7}
    found = {"name": "m", "version": "2", "inference_count": 3000, "execution_count": requests // 5, "in_flight": 3}
    return found | {"inference_stats": counted, "batch_reasons": {}} | more


def tables() -> Iterator[str]:
    lost = {"state": "backoff", "pid": 0, "reason": "failed to load: no memory", "retry_seconds": 7.5}
    degraded = {
        "name": "m", "version": "1", "state": "READY", "default": True, "degraded": True, "loading_seconds": 1.0,
        "reason": "degraded, 1 of 3 instances: instance 'm_0_1': failed to load: no memory",
        "instances": [instance("m_0_0"), instance("m_0_1", **lost), instance("m_0_2", quarantined=True)],
    }  # fmt: skip
    asleep = {
        "asleep": True,
        "degraded": False,
        "instances": [instance("m_0_0", state="asleep", pid=0, memory_bytes=0)],
    }
    for index in (INDEX, INDEX[1:3], [degraded, degraded | asleep]):
        yield from (models_text(index, instances, Screen()) for instances in (False, True))
    counted = statistics(2000, batch_reasons={"idle": 100, "full": 300})
    yield stats_text({"model_stats": [counted, statistics(0, version="3")]}, Screen())


def test_the_tables_of_models_instances_and_statistics(broker: Operated, capsys: pytest.CaptureFixture[str]) -> None:
    """SHMSERVE_REWRITE=1 writes the expected texts."""
    assert_golden(Path(__file__).with_name("tables.expected"), "\n\n".join(tables()).splitlines())
    for words in ((), ("--instances",)):
        assert run(broker, "models", *words) == 0
        assert capsys.readouterr().out == models_text(INDEX, bool(words), Screen()) + "\n"
    assert run(broker, "models", "--json") == 0
    assert json.loads(capsys.readouterr().out) == INDEX
    sizes = [0, 999, 1000, 1 << 20, 150 << 20, 1023 << 20, 1 << 30, 5 << 50]
    texts = "0 bytes, 999 bytes, 1.0 KiB, 1.0 MiB, 150 MiB, 1.0 GiB, 1.0 GiB, 5120 TiB"
    assert ", ".join(map(bytes_text, sizes)) == texts
    assert state_style("READY (asleep)") == state_style("READY")


def test_a_server_without_models(broker: Operated, capsys: pytest.CaptureFixture[str]) -> None:
    broker.answers |= {"models": [], "activity": {"server": {}}}
    assert run(broker, "models") == 0
    assert capsys.readouterr().out.startswith("no models: ")
    assert run(broker, "demo") == 1
    said = capsys.readouterr()
    assert said.out.count("not served") == 4
    assert "the server has none of the sample models: `python -m shmserve.repo.samples DIR`" in said.err


def test_config(broker: Operated, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"name": "mlp", "max_batch_size": 4}
    origins = {"config": config, "origins": {"max_batch_size": "model"}, "text": "max_batch_size: 4  # the model\n"}
    broker.answers |= {"config": config, "origins": origins}
    assert run(broker, "config", "mlp") == 0
    assert capsys.readouterr().out == "max_batch_size: 4  # the model\n"
    assert run(broker, "config", "mlp", "--json") == 0
    assert json.loads(capsys.readouterr().out) == config
    assert run(broker, "config", "mlp", "--json", "--origins") == 0
    assert json.loads(capsys.readouterr().out) == {"config": config, "origins": origins["origins"]}


BASH = """
eval "$(shmserve completion bash)"
complete -p shmserve >/dev/null || exit 1
COMP_LINE="$1" COMP_POINT=${#1}
read -ra COMP_WORDS <<< "$1"
COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
_python_argcomplete shmserve "${COMP_WORDS[-1]}" ""
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    made = tmp_path / "bin" / "shmserve"
    made.parent.mkdir()
    made.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m shmserve.clients.cli.main "$@"\n')
    made.chmod(0o755)
    return made.parent


def completed(program: Path, line: str, **more: str) -> set[str]:
    path = f"{program}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "--norc", "-c", BASH, "bash", line]
    ran = subprocess.run(
        command, env=os.environ | {"PATH": path} | more, capture_output=True, text=True, check=False, timeout=END_S
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    return {word.strip() for word in ran.stdout.splitlines() if word.strip()}


def test_bash_completes(program: Path, broker: Operated, tmp_path: Path) -> None:
    url = {"SHMSERVE_URL": broker.lane}
    assert completed(program, "shmserve ver") == {"version"}
    assert {"models", "load", "serve", "completion"} <= completed(program, "shmserve ")
    assert completed(program, "shmserve load --conf") == {"--config-json"}
    assert completed(program, "shmserve infer o", **url) == {"odd", "other"}
    assert completed(program, f"shmserve unload --url {broker.lane} odd o") == {"other"}
    assert completed(program, "shmserve restart mlp --instance mlp_0_", **url) == {"mlp_0_0", "mlp_0_1", "mlp_0_2"}
    assert completed(program, "shmserve config mlp --version ", **url) == {"1", "2"}
    assert completed(program, f"shmserve infer --runtime-dir {tmp_path} o") == set(), "no server, no words"
    assert "--model-repository" in completed(program, "shmserve serve --model-r"), "an option of the server"


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["completion", shell]) == 0
    said = capsys.readouterr().out
    assert {"zsh": "compdef _python_argcomplete shmserve", "fish": "complete --command shmserve"}[shell] in said
    if (program := shutil.which(shell)) is not None:
        subprocess.run([program, "-n"], input=said, text=True, check=True)

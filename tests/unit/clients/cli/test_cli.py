"""Arguments, output and exit codes of the command, without a server."""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.clients.cli import main
from shmserve.clients.cli.commands.ready import not_ready_lines
from shmserve.clients.cli.commands.status import LanguageRates
from shmserve.clients.cli.commands.tune import apply_changes
from shmserve.clients.waiting import OUT_OF_SERVICE, ReadyWait, degraded, summary, why_not_ready
from shmserve.errors import DeadlineExceeded
from shmserve.extras import install_command
from shmserve.terminal.console import Screen
from shmserve.terminal.errors import Failed
from shmserve.terminal.output import as_json, file_name, percentile, storable, timing
from shmserve.terminal.tables import duration_text, table, values_text
from tests.support.cases import cases


@pytest.mark.parametrize(
    "words", ["models", "load mlp", "infer mlp --random", "top --once", "ready", "config mlp", "demo"]
)
def test_no_server(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*words.split(), "--runtime-dir", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"shmserve {words.split()[0]}: no server at unix://{tmp_path}/lane.sock (")
    assert "start one with `shmserve serve --model-repository DIR`, or select another by --url or" in said.err
    assert said.err.count("\n") == 1


def test_a_live_view_needs_a_terminal_and_textual(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(words: str, code: int) -> str:
        assert main.main(["top", *words.split()]) == code
        said = capsys.readouterr()
        assert (said.out, said.err.count("\n")) == ("", 1)
        return said.err

    assert "no server at http://127.0.0.1:1" in refused("--once --url http://127.0.0.1:1", 1)
    no_label = "m" * 64  # a label of a host name has at most 63 characters, so no name server is asked for this one
    assert f"; of a model: did you mean --filter {no_label}?" in refused(f"--once {no_label}", 1)
    text = "shmserve top: a live view needs a terminal; --once prints a snapshot, --json a line at each refresh"
    assert refused("", 2).startswith(text)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    assert "TERM says that this one cannot; use --once" in refused("", 2)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text = f"a live view needs the package textual: {install_command('top')}; --once and --json work without it"
    assert text in refused("", 1)


def test_where_a_server_is_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line takes precedence over the environment."""
    before = os.getcwd()
    assert main.main(["ready", "--wait", "0.5", "--runtime-dir", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "not ready after 0.5 s: no server at" in said
    assert ("url=" in said, said.count("\n")) == (False, 1)
    assert main.main(["models", "--url", "ftp://x"]) == 2
    assert "shmserve models: invalid url 'ftp://x': expected unix:///path/lane.sock" in capsys.readouterr().err
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("SHMSERVE_URL", raising=False)
    monkeypatch.delenv("SHMSERVE_RUNTIME_DIR", raising=False)
    for name in ("a", "b"):
        assert main.main(["context", "add", name, f"unix://{tmp_path}/{name}.sock", "--token-file", "token"]) == 0
    for words, expected in (
        (["models"], "a.sock"),
        (["models", "--context", "b"], "b.sock"),
        (["models", "--context", "c"], "there is no context 'c'; contexts: a, b"),
        (["version", "--context", "b"], "b.sock"),
        (["context", "remove", "a"], ""),
        (["context", "use", "a"], "there is no context 'a'; contexts: b"),
        (["context", "use", "b"], ""),
        (["models"], "b.sock"),
    ):
        assert (main.main(words) != 0) == bool(expected)
        assert expected in capsys.readouterr().err
    (tmp_path / "server.pub").touch()
    monkeypatch.chdir(tmp_path)
    for name, key in (("c", "server.pub"), ("d", "x" * 40)):
        assert main.main(["context", "add", name, "tcp://h:1", "--server-key", key]) == 0
    capsys.readouterr()
    assert main.main(["context", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    places = listed["places"]
    assert (listed["current"], [*places]) == ("b", ["b", "c", "d"])
    assert places["b"] == {"url": f"unix://{tmp_path}/b.sock", "token_file": f"{before}/token"}
    assert [places[name]["server_key"] for name in "cd"] == [str(tmp_path / "server.pub"), "x" * 40]
    monkeypatch.setenv("SHMSERVE_URL", "gopher://x")
    assert main.main(["models"]) == 2
    assert "gopher://x" in capsys.readouterr().err
    monkeypatch.setenv("SHMSERVE_RUNTIME_DIR", f"{tmp_path}/third")
    for url, words, expected in (
        ("other.sock", ["--runtime-dir", str(tmp_path)], "lane.sock"),
        ("other.sock", [], "other.sock"),
        ("", [], "third/lane.sock"),
    ):
        monkeypatch.setenv("SHMSERVE_URL", url and f"unix://{tmp_path}/{url}")
        assert main.main(["models", *words]) == 1
        assert f"unix://{tmp_path}/{expected}" in capsys.readouterr().err


def test_a_model_file_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "model.gguf"
    source.symlink_to("/proc/self/mem")
    assert main.main(["init", "m", "--from", str(source), "--repository", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"shmserve init: cannot read {source}: Input/output error\n"


def test_a_full_disk_leaves_no_part_of_a_tuned_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.pbtxt"
    file.write_text("old")

    def write(path: Path, data: bytes) -> None:
        path.write_text("n")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises(Failed, match=r"cannot write .*/config\.pbtxt: No space left on device"):
        apply_changes(file, "old", "new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize("typed", ["shmserve tritonserver", "/usr/bin/tritonserver"])
def test_tritonserver_is_serve_with_the_defaults_of_triton(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda program, words: executed.append(words))
    monkeypatch.setattr("shmserve.system.interrupts.block_until_exec", lambda: None)
    monkeypatch.setattr("sys.argv", [*typed.split(), "--model-repository=models"])
    main.main()
    assert executed[0][-3:] == ["shmserve.broker", "--triton-compatible", "--model-repository=models"]


def test_tables_and_json() -> None:
    made = table(["name", "n", "why"], [["a", "1,000", ""], ["longer", "7", "because"]], right=[1])
    assert made == "name        n  why\na       1,000\nlonger      7  because"
    assert table(["a", "b"], []) == "a  b"
    values = [1, 2.5, True, float("nan"), float("inf"), -float("inf"), b"text", b"\xff", ["x"]]
    assert as_json(values) == [1, 2.5, True, "NaN", "Infinity", "-Infinity", "text", "\\xff", ["x"]]


@cases(
    (np.array([1.5, -2, 1 / 3], np.float32), "1.5 -2 0.333333"),
    (np.array(3), "3"),
    (np.array([True, False]), "true false"),
    (np.zeros((0, 3)), "(no values)"),
    (np.arange(2000).reshape(2, 1000), "0 1 2 3 4 5 ... (2,000 values)"),
    (np.array([b"ok", b"\xff", b"x" * 50], object), f"'ok' '\\\\xff' '{'x' * 37}...'"),
    (np.array([np.inf, np.nan]), "inf nan"),
)
def test_values_are_shortened_for_display(values: Any, text: str) -> None:
    assert values_text(values) == text


def test_durations_and_percentiles() -> None:
    texts = {0.0000421: "42 us", 0.001: "1.00 ms", 0.0123: "12.3 ms", 0.4567: "457 ms", 2.345: "2.35 s"}
    assert {seconds: duration_text(seconds) for seconds in texts} == texts
    values = np.random.default_rng(1).random(137).tolist()
    for share in (0, 1, 50, 99, 100):
        assert percentile(values, share) == np.percentile(values, share, method="inverted_cdf")
    assert timing([0.002]) == "2.00 ms"
    assert timing([0.001, 0.003, 0.002]) == "3 requests one after another: median 2.00 ms, p99 3.00 ms"


def test_files_of_outputs() -> None:
    assert file_name("y") == "y.npy"
    assert file_name("softmax_11.tmp_0") == "softmax_11.tmp_0.npy"
    for name in ("../../etc/passwd", "/abs", "a/b:0", "..", ""):
        assert "/" not in file_name(name)
        assert file_name(name).endswith(".npy")
        assert not file_name(name).startswith("..")
    kept = storable("y", np.array([b"a", b"bcd"], object), "BYTES")
    assert kept.dtype == "S3"
    assert kept.tolist() == [b"a", b"bcd"]
    with pytest.raises(Failed, match="zero byte"):
        storable("y", np.array([b"a\0"], object), "BYTES")


def test_statistics_of_language_models() -> None:
    """Rates need earlier statistics, as with --watch."""
    rates, screen = LanguageRates(), Screen(False, io.StringIO())

    def row(now: float, **language: Any) -> str:
        entry = {"name": "m", "version": "2", "language": language}
        _, table = rates.text({"model_stats": [entry, {**entry, "version": "3", "language": {}}]}, screen, now)
        _, line = table.split("\n")
        return line

    assert "1,200" in row(1.0, generated_tokens=1200, slots=4)
    assert " 150.0 " in row(3.0, generated_tokens=1500, slots=4, ended={"stop": 3})
    assert rates.text({"model_stats": [{"name": "n", "version": "1"}]}, screen, 4.0) == []


def test_models_that_are_not_ready_or_degraded_are_listed() -> None:
    index = [
        {"name": "a", "version": "1", "state": "READY", "reason": ""},
        {"name": "b", "version": "2", "state": "LOADING", "reason": ""},
        {"name": "c", "version": "", "state": "UNAVAILABLE", "reason": "no such backend"},
        {"name": "d", "version": "", "state": "", "reason": ""},
    ]
    reasons = ["b 2 is LOADING", "c is UNAVAILABLE (no such backend)"]
    assert why_not_ready(None, index) == reasons
    assert why_not_ready("c", index) == reasons[1:]
    assert why_not_ready("d", index) == ["d is not loaded"]
    assert why_not_ready(None, index[:1]) == []
    ready: list[dict[str, Any]] = [
        {"name": name, "version": "2", "state": "READY", "reason": "why", "degraded": name == "b"} for name in "ab"
    ]
    assert degraded(None, ready) == degraded("b", ready) == ["b 2 is why"]
    assert degraded("a", ready) == []


def test_a_query_that_times_out_does_not_replace_the_reason() -> None:
    wait = ReadyWait("URL", None, 0)
    wait.not_yet({"out_of_service": True})
    wait.failed(DeadlineExceeded("no answer"))
    assert str(wait.error([])) == "the server at URL is not ready after 0 s: " + OUT_OF_SERVICE


def test_reasons_of_many_models_are_short_lines() -> None:
    """A repository with many broken models once gave one line of 13 KB."""
    reasons = [f"m{number} 1 is UNAVAILABLE (Traceback:\n{'x' * 1000})" for number in range(30)]
    lines = not_ready_lines({"model": None, "ready": False, "reasons": reasons, "warnings": []})
    assert lines[0] == "the server is not ready; 30 reasons:"
    assert lines[1].startswith("  m0 1 is UNAVAILABLE (Traceback: xxx")
    assert lines[-1] == "  and 20 more; `shmserve models` lists them"
    assert len(lines) == 12
    assert max(map(len, lines)) <= 302
    line = summary(reasons)
    assert line.endswith("...; and 25 more")
    assert len(line) < 1600
    one = {"model": "m", "ready": False, "reasons": ["m is LOADING"], "warnings": []}
    assert not_ready_lines(one) == ["model 'm' is not ready: m is LOADING"]

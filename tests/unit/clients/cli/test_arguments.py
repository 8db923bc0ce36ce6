"""Arguments that a command refuses, help that fits a screen, and suggestions for misspelled words."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shmserve.clients.cli import main, parser
from shmserve.terminal import help_text
from tests.support.cases import cases

WRONG_USAGE = (
    "infer|infer mlp --repeat 0|infer mlp --batch -1|infer mlp --timeout 0|infer mlp --timeout soon|"
    "infer mlp --version latest|infer mlp --rand|models --url a --runtime-dir b|ready --wait -1|config|"
    "unload|restart|restart mlp --version 0|check|completion csh|frobnicate"
)
REFUSED: dict[str, list[tuple[str, str]]] = {
    "": [(words, "error:") for words in WRONG_USAGE.split("|")],
    "infer mlp": [
        (words, "is for random data: give --random too")
        for words in ("--batch=2", "--seed=0", "--seed=1", "--shape=x=1")
    ],
    "bench m": [
        ("-c 0", "'0' is not a number above 0, a list"),
        ("-c 1.5", "'1.5' has a number that is not an integer"),
        ("-c 1:1000000:1", "is not a number above 0"),
        ("--until 20ms", "'20ms' is not a limit such as p99=20ms"),
        ("--until p101=1ms", "'p101' is not a percentile such as p99"),
        ("--until p99=20", "'20' has no unit: 20ms?"),
        ("-c 65537", "65,537 callers: the maximum is 65,536"),
        ("-r 1:2e7", "20,000,000 requests per second: the maximum is 10,000,000"),
        ("--seed -1", "'-1' is not an integer of at least 0"),
        ("--seed 9223372036854775808", "is not an integer from 0 to 9,223,372,036,854,775,807"),
        (f"--batch {'9' * 5000}", "is not an integer from 1 to 9,223,372,036,854,775,807"),
        ("--processes 257", "'257' is not an integer from 1 to 256"),
        ("--windows 1:3", "'1:3' is not a range MIN:MAX of at least 2 windows"),
        ("--header token", "'token' is not a header such as 'Authorization: Bearer TOKEN'"),
        ("--tolerance 0", "'0' is not a percentage between 0 and 100"),
        ("-c 1 -r 1", "not allowed with argument"),
        ("--prompt-tokens 9:3", "'9:3' is not a length such as 128, 64:512 or 256+-64"),
        ("--sampling [1]", "'[1]' is not a JSON object"),
        ("--slo p99=1s", "'p99=1s' is not an objective such as ttft=200ms: ttft, itl, tpot, e2e, e2el"),
    ],
    "plan": [
        ("--requests 100 --policy best", "'best' is not a policy; the policies are random"),
        ("--requests 100 --policy hash", "needs keys"),
        ("--requests 100 --rate 5x", "not a rate above 0, such as 500, 50k or 1.2M"),
        (f"--requests 100 --deadline {'9' * 400}s", "is not a duration above 0, such as 300us"),
        ("--kill-zone 5", "'5' has no unit: 5ms?"),
        ("--kill 5s", "is not N@AT or N@AT+FOR"),
        ("--surge 2", "is not FACTOR@AT"),
        ("--service 5ms --service-ms 5", "--service and --service-ms exclude each other"),
        ("--service 5", "'5' is not a duration"),
        ("--requests 100 --autoscale 10-20 --servers 5", "5 servers are not within 10 to 20"),
        ("--kill-zone 5s --seconds 4", "something begins after 5 s, and requests are sent for 4 s"),
    ],
    "top --once": [
        ("--sort p9 --url unix:///x", "unknown column 'p9'; did you mean 'p99'?"),
        ("--token-file x --url unix:///x", "--token-file is for servers at http://"),
        ("--url http://127.0.0.1:1 --token-file /nowhere", "cannot read a token from /nowhere: No such file"),
        ("--url ftp://x", "invalid url 'ftp://x'"),
        ("unix:///x --table servers", "--table servers is for several servers; of one: models, instances"),
        ("a b --url http://c", "name servers either as words, or one by --url or --runtime-dir"),
        ("a a:8000", "a server is named twice"),
        ("a b --table clients", "--table clients is for one server; of several: servers, models, by-server"),
        ("a b --sort holdings", "unknown column 'holdings'"),
        ("a b --metrics-url http://a:1", "--metrics-url is given 1 times, for 2 servers over HTTP"),
        ("a b:x", "invalid server 'b:x': expected HOST, HOST:PORT or a URL"),
        ("a [1", "invalid server '[1': expected HOST, HOST:PORT or a URL"),
        ("a b/v2", "invalid server 'b/v2': expected HOST, HOST:PORT or a URL"),
        ("a ftp://x", "invalid url 'ftp://x'"),
        ("a tcp://b:5555", "--server-key"),
    ],
    "tune": [
        ("mlp cnn", "--p99 TIME is the target"),
        ("mlp cnn --p99 mlp=20ms", "--p99 cnn=TIME is missing"),
        ("mlp cnn --p99 20ms --memory other=1GiB", "--memory other=...: no model 'other' is tuned; there is mlp, cnn"),
        ("mlp cnn --p99 20ms --rate mlp=5", "--rate is missing for some of the models"),
        ("mlp cnn --p99 20ms --objective latency", "--objective latency compares settings under a load"),
        ("mlp cnn --p99 20ms --html a.html", "--html shows a single model"),
        ("mlp cnn --p99 20ms --input x=1", "--input is for a single model"),
        ("mlp cnn --slo ttft=1s", "a language model is tuned alone"),
        ("mlp mlp --p99 20ms", "two of the models have the same name"),
        ("mlp --p99 20ms --rate 5 --objective throughput", "leave out --rate"),
        (f"mlp --p99 20ms --memory {'9' * 400}", "is not a size above 0, such as 512MiB or 2GiB"),
    ],
    "load": [
        ("", "name one or more models, or use --all"),
        ("a --all", "name one or more models, or use --all"),
        ("a b --config-json x", "--config-json and --file are for one model"),
        ("--all --previous", "--previous"),
        ("a --previous --config-json -", "--previous"),
        ("a --file 1/m=x", "--file needs --config-json"),
        ("a --config-json /no/such", "cannot read a configuration from /no/such: No such file or directory"),
        ("a --config-json BAD", "cannot read a configuration from"),
        ("a --config-json LIST", "it is not a JSON object"),
        ("a --config-json OK --file x", "expected NAME=PATH"),
        ("a --config-json OK --file 1/x=/no/such", "no such file"),
    ],
    "restart": [("a b --instance a_0_0", "--instance is for one model")],
    "config": [
        ("a --origins", "--origins needs --json"),
        ("a --url http://h:port", "invalid url 'http://h:port': expected http://host:port or https://host:port"),
        ("a --url http://[1 --token-file OK", "invalid url 'http://[1': expected http://host:port"),
    ],
    "drain": [
        ("--undrain --timeout 3", "cannot be combined"),
        ("--undrain --no-wait", "cannot be combined"),
        ("--no-wait --quiet 3", "cannot be combined"),
    ],
    "stats": [
        ("a --prometheus", "--prometheus covers the whole server"),
        ("--callers --prometheus", "--prometheus covers the whole server"),
        ("a --callers", "--callers covers the whole server"),
        ("a* --version 2", "--version needs the name of one model"),
    ],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current directory, with the files and models that the arguments name."""
    for name, content in ("BAD", "{"), ("LIST", "[]"), ("OK", "{}"):
        (tmp_path / name).write_text(content)
    for name in ("mlp", "cnn"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHMSERVE_RUNTIME_DIR", str(tmp_path))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("command", "words", "text"),
    [(command, words, text) for command, cases in REFUSED.items() for words, text in cases],
)
def test_invalid_arguments_are_refused(command: str, words: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main.main(f"{command} {words}".split())
    except SystemExit as ended:  # of argparse, after the usage
        code = ended.code  # type: ignore[assignment]
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert text in said.err
    one_line = said.err.startswith(f"shmserve {command.partition(' ')[0]}: ") and said.err.count("\n") == 1
    assert one_line or said.err.startswith("usage: shmserve")


COLUMNS, ROWS = 80, 24


def actions_of(command: argparse.ArgumentParser) -> list[Any]:
    return command._actions  # noqa: SLF001 - argparse has no public list of options


def commands() -> dict[str, Any]:
    (found,) = (action.choices for action in actions_of(parser.parser()) if action.dest == "command")
    return dict(found)


ASKING = {"models", "load", "unload", "restart", "infer", "stats", "top", "ready", "config", "version", "demo"}
ALONE = {"run", "dev", "check", "init", "build", "completion"}
"""Commands that do not connect to a server."""


@pytest.fixture(autouse=True)
def _small_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))


def said(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main.main(words)
    assert ended.value.code == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


@pytest.mark.parametrize("command", ["", *sorted(set(commands()) - {"serve"})])
def test_help_fits_a_screen_and_help_all_has_the_rest(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The full help has examples that parse, and exit codes. Options of other programs are synonyms of known ones."""
    brief = said([*command.split(), "--help"], capsys)
    lines = brief.splitlines()
    assert len(lines) <= ROWS
    assert max(map(len, lines)) <= COLUMNS
    assert lines[0].startswith(f"usage: shmserve {command}".rstrip())
    assert f"shmserve {command} --help-all".replace("  ", " ") in lines[-1]
    assert brief.count("(") == brief.count(")")
    if command:
        full = said([command, "--help-all"], capsys)
        actions = [action for action in actions_of(commands()[command]) if action.help is not argparse.SUPPRESS]
        options = [name for action in actions for name in action.option_strings]
        assert [name for name in options if not re.search(rf"(?<![\w-]){name}(?![\w-])", full)] == []
        assert set(re.findall(r"--[a-z-]+", brief)) <= set(re.findall(r"--[a-z-]+", full)) | {"--help-all"}
        assert len(full.splitlines()) > len(brief.splitlines())
    found = commands()[command or "serve"]
    known = {name for action in actions_of(found) for name in action.option_strings}
    assert set(found.synonyms.values()) <= known
    assert not known & set(found.synonyms), "these would never be suggested"
    if command in ASKING | ALONE:
        assert f"examples:\n  shmserve {command}" in full
        assert ("--url" in full) is ("--runtime-dir" in full) is (command in ASKING)
        assert re.search(r"exit codes:\n  0    \w.*\n  1    \w.*\n  2    wrong usage\n  130  interrupted\n", full)
        sentence = full.split("\n\n")[1]
        assert sentence[0].isupper()
        assert sentence.rstrip().endswith(".")
        examples = [line.strip().split("    ")[0].rpartition("| ")[2] for line in commands()[command].examples]
        parsed = [parser.parser().parse_args(shlex.split(line)[1:]) for line in examples if line.startswith("shmserve")]
        assert parsed


@cases(
    ("modles", "shmserve: error: unknown command 'modles'; did you mean models?"),
    ("status", "shmserve: error: unknown command 'status'; did you mean models?"),
    ("xyzzy", "shmserve: error: unknown command 'xyzzy'\n"),
    ("infer mlp --randm", "shmserve infer: error: unknown option --randm; did you mean --random?"),
    ("infer mlp --inptu=x=1", "shmserve infer: error: unknown option --inptu; did you mean --input?"),
    ("models --jsn --instnces", "--jsn; did you mean --json?; unknown option --instnces; did you mean --inst"),
    ("config mlp cnn", "shmserve config: error: too many arguments: cnn\n"),
    ("bench mlp --duration 10s", "shmserve bench: error: unknown option --duration; did you mean --window?"),
)
def test_suggestions(words: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = said(words.split(), capsys, code=2)
    assert text in error
    command = text.partition(":")[0] if text.startswith("shmserve") else "shmserve models"
    assert error.endswith(f"`{command} --help` explains its use\n")


def test_without_a_command_help_is_printed_and_the_exit_code_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 2
    text = capsys.readouterr().err
    listed = re.findall(r"^  (\w+)  ", text, re.MULTILINE)
    assert listed == [name for group in parser.USUAL for name, _ in group] + ["others"]
    assert {*commands()} <= set(re.findall(r"\w+", text))


@pytest.mark.parametrize("word", ["--help", "version", "--version"])
def test_help_and_version_import_only_what_they_need(word: str) -> None:
    program = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
    program += f"from shmserve.clients.cli.main import main; main([{word!r}])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    modules = set(ran.stderr.split())
    assert "shmserve.clients.cli.parser" in modules
    heavy = {"numpy", "zmq", "msgspec", "argcomplete", "subprocess"}
    if word == "--help":
        heavy |= {"rich", "asyncio", "difflib", "shmserve.terminal.console", "shmserve.session"}
    assert not modules & heavy


def test_rows_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert help_text.rows([("-a", "one two three four five six seven"), ("--b C", "x")]) == [
        "  -a     one two three four five six",
        "         seven",
        "  --b C  x",
    ]
    long = "--a-name-that-is-longer-than-its-column"
    assert help_text.rows([(long, "text"), ("-b", "")])[0] == f"  {long}"

"""Arguments that a command refuses: exit code 2, and one line that says why, or the usage."""

from __future__ import annotations

from pathlib import Path

import pytest

from shmserve.clients.cli import main

REFUSED = {
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
    one_line = said.err.startswith(f"shmserve {command.split()[0]}: ") and said.err.count("\n") == 1
    assert one_line or said.err.startswith("usage: shmserve")

"""The arguments of `shmserve bench` as a plan."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shmserve.clients.cli.commands.bench import plan_of
from shmserve.clients.cli.main import main
from shmserve.clients.cli.parser import parser
from shmserve.errors import InvalidRequest, Unsupported
from shmserve.terminal.errors import Misuse
from shmserve.tools.load import record
from shmserve.tools.load.measure import check
from shmserve.tools.load.plan import ClosedLoop, LatencyLimit, Lengths, Objectives, OpenLoop, ReplayLoop, Sequences
from tests.support.cases import cases
from tests.unit.tools.load.points import run, steady


def plan(*words: str) -> Any:
    return plan_of(parser().parse_args(["bench", "m", *words]))


@cases(
    ("", [ClosedLoop(1)]),
    ("-c 1,8,3", [ClosedLoop(1), ClosedLoop(8), ClosedLoop(3)]),
    ("-c 1:10", [ClosedLoop(1), ClosedLoop(2), ClosedLoop(4), ClosedLoop(8), ClosedLoop(10)]),
    ("-c 1:9:4", [ClosedLoop(1), ClosedLoop(5), ClosedLoop(9)]),
    ("-r 2.5 --seed 3", [OpenLoop(2.5, "poisson", 3)]),
    ("-r 100:250:100 --arrivals constant --seed 0", [OpenLoop(rate, "constant") for rate in (100, 200, 250)]),
)
def test_options_select_the_loads(words: str, loads: list[Any]) -> None:
    assert list(plan(*words.split()).loads) == loads


def test_seeds_and_bounds_of_a_search() -> None:
    """One seed for inputs and arrivals; the report shows it."""
    plans = [plan("-r", "9") for _ in range(4)]
    assert len({found.inputs.seed for found in plans}) > 1
    assert all(found.loads == (OpenLoop(9.0, "poisson", found.inputs.seed),) for found in plans)
    assert plan("-r", "9", "--seed", "0").inputs.seed == 0
    assert plan("--until", "p99=20ms").limit == LatencyLimit(99.0, 20_000_000, 1, 1024)
    assert plan("--until", "p99.9 <= 1.5s", "-r", "10:500").limit == LatencyLimit(99.9, 1_500_000_000, 10, 500)
    for words in (["-r", "10"], ["-r", "10,5"]):
        with pytest.raises(Misuse, match=r"needs bounds LOW:HIGH, e\.g\. --rate 100:10000"):
            plan("--until", "p99=20ms", *words)
    with pytest.raises(Misuse, match=r"--concurrency needs bounds LOW:HIGH, e\.g\. --concurrency 1:64"):
        plan("--until", "p99=20ms", "-c", "8")


def test_recorded_times(tmp_path: Path) -> None:
    file = tmp_path / "times"
    file.write_text('{"at": 0.5}\n1\n')
    assert plan("--replay", str(file)).loads == (ReplayLoop((500_000_000, 1_000_000_000), "times"),)
    with pytest.raises(Misuse, match="a load that it can vary"):
        plan("--replay", str(file), "--until", "p99=1ms")
    with pytest.raises(Misuse, match=r"cannot read .*none: No such file or directory"):
        plan("--replay", str(tmp_path / "none"))
    file.write_bytes(b"\xff")
    with pytest.raises(Misuse, match=r"cannot read .*times: it is not text \("):
        plan("--replay", str(file))


@cases(
    ("--percentile p75", "windows do not have p75: --percentile is one of p50, "),
    ("--url http://h:1 --ca a", "--ca and --client-cert are only for https:// and grpcs://"),
    ("--url ftp://h:1", "invalid url 'ftp://h:1': expected one of unix://, ipc://, tcp://, http://, https://, "),
    ("--url https://h:1 --client-key k", "--client-key needs --client-cert"),
    ("--header a:b", "headers are only for http, https, grpc and grpcs://"),
    ("--url https://h:1 --stream --outputs y", "generate_stream sends all outputs: leave out --outp"),
    ("--openai h:1/v1", "invalid url 'h:1/v1'"),
    ("--openai grpc://h:1/v1", "invalid url 'grpc://h:1/v1' of an OpenAI API: expected http://HOST:PORT/v1"),
    ("--slo ttft=1s", "objectives and an OpenAI API are for language models"),
)
def test_options_that_the_endpoint_does_not_support_are_refused(words: str, text: str) -> None:
    with pytest.raises((InvalidRequest, Unsupported), match=re.escape(text)):
        check(plan(*words.split()))


def test_the_other_options_of_a_plan() -> None:
    found = plan(
        "--url", "http://h:1", "--version", "2", "-i", "x=1", "-b", "4", "--deadline", "300us",
        "--sequence-length", "5", "--windows", "2:4", "--warmup", "10ms", "--tolerance", "2.5", "--outputs", "a,b",
    )  # fmt: skip
    assert (found.endpoint.kind, found.endpoint.address, found.version) == ("http", ("h", 1), "2")
    assert (found.inputs.texts, found.inputs.batch, found.inputs.outputs) == (("x=1",), 4, ("a", "b"))
    assert (found.deadline_ns, found.sequences) == (300_000, Sequences(64, 5))
    settings = found.settings
    assert (settings.min_windows, settings.max_windows, settings.warmup_ns) == (2, 4, 10_000_000)
    assert settings.tolerance == pytest.approx(0.025)


def test_the_options_for_language_models() -> None:
    url = "https://api.example/openai/v1/"
    found = plan("--openai", url, "--prompt-tokens", "256+-64", "--output-tokens", "8:16", "--slo", "ttft=1s,tpot=50ms")
    endpoint = found.endpoint
    assert (endpoint.kind, endpoint.address, endpoint.path) == ("openai", ("api.example", 443), "/openai/v1")
    assert (found.prompts.words, found.prompts.output) == (Lengths(1, 511, 64.0), Lengths(8, 16))
    assert (found.objectives, found.stream) == (Objectives(ttft=10**9, itl=50_000_000), True)
    assert plan("--stream").prompts is None
    for words, text in (("--input x=1", "leave out --input"), ("--prompt-tokens 5", "leave it out with --prompts")):
        with pytest.raises(Misuse, match=text):
            plan("--prompts", "file", *words.split())


def test_urls_of_endpoints_are_parsed() -> None:
    six = plan("--url", "http://[::1]:8000/").endpoint
    assert (six.address, six.authority) == (("::1", 8000), "[::1]:8000")
    assert plan("--url", "grpc://host:1").endpoint.authority == "host:1"
    secure = plan("--url", "grpcs://host:1", "--ca", "a", "--client-cert", "c", "--client-key", "k").endpoint
    assert (secure.kind, secure.is_secure, secure.origin) == ("grpc", True, "grpcs://host:1")
    assert (secure.ca, secure.client_cert, secure.client_key) == ("a", "c", "k")
    assert (plan("--url", "https://host:1").endpoint.kind, six.is_secure) == ("http", False)
    for url in ("http://host", "http://:1", "grpc://host:0", "https://host:port"):
        with pytest.raises(InvalidRequest, match=r"expected \w+://HOST:PORT"):
            _ = plan("--url", url).endpoint.address


def test_a_context_names_the_server_and_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("SHMSERVE_URL", raising=False)
    monkeypatch.delenv("SHMSERVE_RUNTIME_DIR", raising=False)
    (tmp_path / "token").write_text("secret")
    token = ("Authorization", "Bearer secret")
    assert main(["context", "add", "prod", "https://h:1", "--token-file", str(tmp_path / "token")]) == 0
    for words, url, headers in (
        ("--header a:b", "https://h:1", (("a", "b"), token)),
        ("--context prod", "https://h:1", (token,)),
        ("--url unix:///s", "unix:///s", ()),
        (f"--url https://i:2 --token-file {tmp_path}/token", "https://i:2", (token,)),
        (f"--openai http://localhost:1/v1 --token-file {tmp_path}/token", "http://localhost:1/v1", (token,)),
    ):
        endpoint = plan(*words.split()).endpoint
        assert (endpoint.url, endpoint.headers) == (url, headers), words
    with pytest.raises(Misuse, match="leave out --url, --runtime-dir and --context"):
        plan("--openai", "http://localhost:1/v1", "--context", "prod")


def test_saved_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code says whether the second run is worse."""
    for name, rates in (("slow", [100, 101, 99]), ("fast", [200, 201, 199])):
        (tmp_path / f"{name}.json").write_bytes(record.encode(run(steady(1, rates))))
    slow, fast = str(tmp_path / "slow.json"), str(tmp_path / "fast.json")
    assert main(["bench", "--compare", slow, fast]) == 0
    assert "fast is better than slow" in capsys.readouterr().out
    assert main(["bench", "--compare", fast, slow, "--json"]) == 1
    assert '"verdict": "worse"' in capsys.readouterr().out
    both = tmp_path / "both.json"
    both.write_bytes(record.encode(run(steady(1, [200, 201, 199], p50=2e6))))
    assert main(["bench", "--compare", slow, str(both)]) == 1, "better in some metrics and worse in others"
    assert "and worse in others: p50 of concurrency 1" in capsys.readouterr().out
    assert main(["bench", "m", "--compare", fast, slow]) == 2
    assert main(["bench", "--compare", fast, str(tmp_path / "none.json")]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert main(["bench"]) == 2
    assert "name the model: `shmserve models` lists them" in capsys.readouterr().err

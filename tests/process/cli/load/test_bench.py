"""`shmserve bench` and a real server: endpoints, errors, files, the commands of its page, and loads.

No assertion depends on speed, except for the maximum rate of a model that needs 20 ms.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from msgspec.structs import replace

from shmserve.errors import ConnectionLost, InvalidRequest
from shmserve.gateway.auth import tokens
from shmserve.repo import samples
from shmserve.testing import Server
from shmserve.tools.load import one_load, record
from shmserve.tools.load.generation import process
from shmserve.tools.load.measure import MeasureProgress, measure
from shmserve.tools.load.plan import (
    SECOND,
    ClosedLoop,
    Endpoint,
    LoadPlan,
    MeasureSettings,
    OpenLoop,
    RequestInputs,
    Sequences,
)
from shmserve.tools.load.targets import base, connecting
from tests.support.commands import COMMAND, run
from tests.support.docs import pages
from tests.support.ensemble_models import config_text
from tests.support.gateway.running_gateway import Gateway, model, talker
from tests.support.living import await_connections, until
from tests.support.model_files import parameters, write_model
from tests.support.workers.models import gguf_models

pytestmark = pytest.mark.process

END_S = 60
SERVICE_NS = 20_000_000
QUICK = MeasureSettings(warmup_ns=SECOND // 50, window_ns=SECOND // 20, min_windows=2, max_windows=2, min_responses=3)
SHORT = ["--warmup", "20ms", "--window", "50ms", "--windows", "2:2", "--no-echo"]
KINDS = ("lane", "ipc", "tcp", "http", "grpc")
SLOW = config_text("identity", "x:FP32:[1]", "y:FP32:[1]", parameters(delay_us=str(SERVICE_NS // 1000)))
SEQUENCE = "sequence_batching { direct { } max_sequence_idle_microseconds: 60000000 }"


class BenchServer:
    def __init__(self, server: Server, keys: Path) -> None:
        self.server = server
        own, theirs = str(keys / "alice.key"), str(keys / "server.pub")
        address = server.endpoints
        self.endpoints = {
            "lane": Endpoint(url=server.url),
            "ipc": Endpoint(url=server.zmq_url),
            "tcp": Endpoint(url=f"tcp://{address['zmq']}", server_key=theirs, key_file=own),
            "http": Endpoint(url=f"http://{address['http']}"),
            "grpc": Endpoint(url=f"grpc://{address['grpc']}"),
        }

    @property
    def has_chat(self) -> bool:
        """Whether the engine of language models is installed."""
        with self.server.client() as client:
            return any(entry["name"] == "chat" for entry in client.models())

    def requests(self, name: str) -> int:
        """Successful requests to the model since its start."""
        with self.server.client() as client:
            (entry,) = client.statistics(name)["model_stats"]
        return int(entry["inference_stats"]["success"]["count"])


def one_point(plan: LoadPlan) -> record.Point:
    (point,) = measure(plan).points
    return point


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BenchServer]:
    repository, keys = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("keys")
    samples.build(repository, lambda text: None)
    model(repository, "id", ["FP32", "BYTES"], "[ 4 ]", 8, "dynamic_batching { }")
    model(repository, "sequence", ["INT32"], "[ 1 ]", 4, SEQUENCE)
    model(repository, "wide", ["FP32"], "[ -1 ]", 4)
    talker(repository)
    write_model(repository, "slow", SLOW)
    if importlib.util.find_spec("xllamacpp") is not None:
        write_model(repository, "chat", 'backend: "llamacpp"')
        gguf_models.write(repository / "chat" / "1" / "model.gguf")
    for name, roles in (("server", "infer"), ("alice", "infer,observe")):
        assert run("keygen", name, "--out", str(keys), "--roles", roles)[0] == 0
    options = ["--zmq-address", "tcp://127.0.0.1:0", "--zmq-server-key", str(keys / "server.key")]
    options += ["--zmq-keys", str(keys / "alice.pub")]
    with Server(repository, *options, gateway=True) as server:
        yield BenchServer(server, keys)


class GeneratorThread:
    """Replaces the `Popen` of a generator process: runs the same code in a thread, without starting Python."""

    def __init__(self, command: list[str], pass_fds: list[int], stdin: int) -> None:
        self._thread = threading.Thread(target=asyncio.run, args=[process.serve(os.dup(pass_fds[0]))])
        self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def kill(self) -> None:
        return


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes generators threads that report often, for tests about what they send. Their processor time is that of the
    whole test process, so it must not cause more generators to be added.
    """
    start = subprocess.Popen

    def started(command: list[str], **options: Any) -> Any:
        is_generator = process.__name__ in command
        return GeneratorThread(command, **options) if is_generator else start(command, **options)

    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(process, "FLUSH_S", 0.01)
    monkeypatch.setattr(one_load, "BUSY", float("inf"))


@pytest.fixture(scope="module")
def secure(served: BenchServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Path]]:
    """A gateway that requires client certificates, and a folder with its certificates."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca"))
    for name, host in (("server", "localhost"), ("client", "alice")):
        issued = authority.issue_cert(host)
        issued.private_key_and_cert_chain_pem.write_to_path(str(folder / name))
        (folder / name).chmod(0o600)
    issued.private_key_pem.write_to_path(str(folder / "key"))
    gateway = Gateway(served.server, "--tls-cert", str(folder / "server"), "--tls-client-ca", str(folder / "ca"))
    try:
        yield gateway, folder
    finally:
        gateway.stop()


def test_a_port_of_another_protocol_is_reported(served: BenchServer) -> None:
    http, grpc = (served.endpoints[kind].authority for kind in ("http", "grpc"))
    with pytest.raises(ConnectionLost, match=r"may expect TLS \(grpcs://\) or HTTP \(http://\)"):
        measure(LoadPlan(model="id", endpoint=Endpoint(url=f"grpc://{http}")))
    with pytest.raises(ConnectionLost, match=f"is {grpc} the port of another protocol"):
        measure(LoadPlan(model="id", endpoint=Endpoint(url=f"http://{grpc}")))


def test_ctrl_c_ends_the_load(served: BenchServer) -> None:
    urllib.request.urlopen(f"{served.endpoints['http'].url}/v2/health/ready").close()  # the gateway connects
    before = served.requests("id")
    words = ["bench", "id", "--url", served.server.url, "--windows", "1000:1000", "--no-echo"]
    with subprocess.Popen([*COMMAND, *words], stderr=subprocess.PIPE, text=True) as process:
        try:
            while served.requests("id") == before and process.poll() is None:
                continue
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=END_S)
        finally:
            process.kill()
    assert (process.returncode, errors) == (130, "shmserve bench: interrupted\n")
    with served.server.client() as client:
        await_connections(client, 2)  # those of the gateway and of this test: the end of the others has been noticed
        until(client, lambda: client.statistics("id")["model_stats"][0]["in_flight"] == 0)
    after = served.requests("id")
    assert served.requests("id") == after


@pytest.mark.parametrize(("kind", "what"), [("http", "GET /v2"), ("grpc", "the connection")])
def test_a_missing_server_and_a_silent_one_are_reported(kind: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "ASK_S", 0.1)
    monkeypatch.setattr(connecting, "HANDSHAKE_S", 0.1)
    with pytest.raises(ConnectionLost, match=f"no server at {kind}://127.0.0.1:1 "):
        measure(LoadPlan(model="id", endpoint=Endpoint(url=f"{kind}://127.0.0.1:1")))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # its backlog accepts
        url = f"{kind}://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConnectionLost, match=rf"{url} has not answered {what} within 0\.1 s"):
            measure(LoadPlan(model="id", endpoint=Endpoint(url=url)))
        secure = url.replace(kind, f"{kind}s")
        with pytest.raises(ConnectionLost, match=rf"no TLS connection to {secure} \(no handshake within 0\.1 s\)"):
            measure(LoadPlan(model="id", endpoint=Endpoint(url=secure)))


@pytest.mark.usefixtures("threads")
def test_plan_reads_saved_runs_and_server_statistics(served: BenchServer, tmp_path: Path) -> None:
    saved, statistics = tmp_path / "run.json", tmp_path / "stats.json"
    assert run("bench", "slow", "--url", served.server.url, *SHORT, "--save", str(saved))[0] == 0
    with served.server.client() as client:
        statistics.write_text(json.dumps(client.statistics()))
    http = served.endpoints["http"].url or ""
    for source in (str(saved), http, served.server.url, str(statistics)):
        words = ["--servers", "3", "--instances", "2", "--requests", "100", "--json"]
        code, out, err = run("plan", "--from", source, "--model", "slow", *words)
        assert code == 0, err
        (result,) = json.loads(out)["results"]
        assert result["latency_ms"]["p50"] >= 20
        assert result["rate"] <= 0.7 * 3 * 2 / 0.020
    code, _, err = run("plan", "--from", http)
    assert code == 1
    assert "choose a model with --model; the models are" in err


@pytest.mark.usefixtures("threads")
def test_the_exit_code_of_runs_that_fail(served: BenchServer, tmp_path: Path) -> None:
    """Without a successful request, without a load within the limit, and if a file cannot be written."""
    words = ["bench", "sequence", "--url", served.endpoints["http"].url or "", *SHORT]
    code, out, err = run(*words, "--json")
    assert code == 1
    assert json.loads(out)["points"][0]["failed"] > 0
    assert err.startswith("shmserve bench: no request succeeded: ")
    assert "sequence" in err
    code, out, err = run("bench", "id", "--url", served.server.url, "--until", "p50=1us", "-c", "1:2", *SHORT)
    assert (code, err) == (1, "")
    assert re.search("^no load (kept|is known to keep)", out, re.MULTILINE)
    missing = tmp_path / "missing" / "run.json"
    code, out, err = run("bench", "id", "--url", served.server.url, *SHORT, "--save", str(missing))
    assert (code, err) == (1, f"shmserve bench: cannot write {missing}: No such file or directory\n")
    assert out.startswith("load "), "the results are printed"


@pytest.mark.usefixtures("threads")
def test_a_token_is_sent_but_not_saved(served: BenchServer, tmp_path: Path) -> None:
    text, line = tokens.new("alice", "infer,observe")
    (tmp_path / "tokens").write_text(f"{line}\n")
    gateway = Gateway(served.server, "--tokens-file", str(tmp_path / "tokens"))
    try:
        for url in (f"http://127.0.0.1:{gateway.http}", f"grpc://127.0.0.1:{gateway.grpc}"):
            words = ["bench", "id", "--url", url, *SHORT]
            assert run(*words)[0] == 1
            code, out, err = run(*words, "--json", "--header", f"Authorization: Bearer {text}")
            assert (code, err) == (0, "")
            assert json.loads(out)["points"][0]["failed"] == 0
            assert text not in out
    finally:
        gateway.stop()


@pytest.mark.parametrize("scheme", ["https", "grpcs"])
def test_tls_with_a_private_ca_and_client_certificates(scheme: str, secure: tuple[Gateway, Path]) -> None:
    gateway, folder = secure
    port = gateway.http if scheme == "https" else gateway.grpc
    ca, cert = str(folder / "ca"), str(folder / "client")
    good = Endpoint(url=f"{scheme}://localhost:{port}", ca=ca, client_cert=cert, client_key=str(folder / "key"))
    for plan in (
        LoadPlan(model="id", endpoint=good, loads=(ClosedLoop(3),), settings=QUICK),
        LoadPlan(model="talker", endpoint=good, stream=True, inputs=RequestInputs(texts=("count=5",)), settings=QUICK),
    ):
        point = one_point(plan)
        assert not point.errors
        assert not point.failed
        assert point.usage is not None
        assert "gateway" in point.usage.server, "the server is found by the port"
    plain = Endpoint(url=(good.url or "").replace("s:", ":"))
    for endpoint, text in (
        (replace(good, ca=None), f"the certificate of {good.url} is not valid .*: give its authority by --ca"),
        (replace(good, url=f"{scheme}://127.0.0.1:{port}"), "is not valid .*, or the name in it by --url"),
        (
            replace(good, client_cert=None, client_key=None),
            r"lost: .*may want a certificate of the client \(--client-cert",
        ),
        (plain, rf"lost: .* may expect TLS \({scheme}://\)"),
    ):
        with pytest.raises(ConnectionLost, match=rf"(?is){text}"):
            measure(LoadPlan(model="id", endpoint=endpoint))
    for endpoint, text in (
        (replace(good, ca=str(folder / "none")), "authorities of --ca .*none: No such file"),
        (replace(good, ca=str(folder / "key")), "authorities of --ca .*key: no certificate or crl found"),
        (replace(good, client_cert=ca, client_key=None), "cannot use .*ca as certificate and key of the client: "),
    ):
        with pytest.raises(InvalidRequest, match=text):
            measure(LoadPlan(model="id", endpoint=endpoint))


@pytest.mark.usefixtures("threads")
def test_the_commands_of_the_page(served: BenchServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, because later commands read the files of earlier ones, but with short durations and a limit that even a
    busy machine meets and can tell from a few responses. Only a comparison may find a difference.
    """
    np.save(tmp_path / "x.npy", np.ones((2, 64), np.float32))
    (tmp_path / "inputs").mkdir()
    for number in range(2):
        np.save(tmp_path / "inputs" / f"{number}.npy", np.full((1, 64), number, np.float32))
    (tmp_path / "request.json").write_text('{"inputs": {"INPUT0": [1, 2, 3, 4], "INPUT1": [4, 3, 2, 1]}}')
    (tmp_path / "times.json").write_text("".join(f'{{"at": {n / 100}, "model": "mlp"}}\n' for n in range(20)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHMSERVE_URL", served.server.url)
    for kind in ("http", "grpc"):
        monkeypatch.setenv(f"{kind.upper()}_URL", served.endpoints[kind].url or "")
    for line in pages.commands("bench"):
        line = line.replace("p99=20ms", "p50=20s").replace("--deadline 20ms", "--deadline 20s")
        words = shlex.split(os.path.expandvars(line))[1:]
        if "chat" in words and not served.has_chat:
            continue
        compares = "--compare" in words
        window = "1s" if "chat" in words else "30ms"  # the answer of a language model may take longer
        code, out, err = run(*words, *([] if compares else [*SHORT, "--window", window]))
        assert code == 0 or (code == 1 and compares), f"{line}: {err}"
        assert out, line
        assert not err, line
    assert (tmp_path / "report.html").read_text().count("<h2>") == 5
    assert record.read(tmp_path / "after.json").points
    assert (tmp_path / "after.csv").read_text().count("\n") > 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_loop_over_each_transport(
    kind: str, served: BenchServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two processes send files and strings; their report equals the server's counts, except for warm-up and end."""
    np.save(tmp_path / "x.npy", np.ones((2, 4), np.float32))
    inputs = RequestInputs(texts=(f"i_FP32=@{tmp_path}", 'i_BYTES=[["a", "bc", "", "d"], ["1", "2", "3", "4"]]'))
    before = served.requests("id")
    seen: list[MeasureProgress] = []
    plan = LoadPlan(
        model="id", endpoint=served.endpoints[kind], loads=(ClosedLoop(3),), inputs=inputs, settings=QUICK, processes=2
    )
    run = measure(plan, on_progress=seen.append)
    (point,) = run.points
    assert not point.errors
    assert not point.failed
    assert (point.rows, point.cost.processes) == (2, 2)
    assert point.latency.count == sum(window.good for window in point.windows[slice(*point.used)])
    assert point.latency.count <= served.requests("id") - before
    server = point.server
    assert server is not None
    assert server.requests > 0
    assert server.rows == 2 * server.requests
    assert server.batches <= server.requests
    assert sum(int(rows) * count for rows, count in server.batch_sizes.items()) == server.rows
    assert point.usage is not None
    assert {"broker", "models"} <= set(point.usage.server)
    (tmp_path / "run").write_bytes(record.encode(run))
    assert record.read(tmp_path / "run") == run
    assert {"warm-up"} <= {progress.state.phase for progress in seen} <= {"warm-up", "window 1", "window 2"}
    assert capfd.readouterr() == ("", ""), "the processes end quietly"


@pytest.mark.usefixtures("threads")
def test_an_open_loop_above_capacity_is_reported_as_overloaded(served: BenchServer) -> None:
    """Sends 200 requests per second to a model that answers 50, so they pile up and latencies grow."""
    settings = replace(QUICK, window_ns=SECOND // 6, min_windows=3, max_windows=6)
    loads = (OpenLoop(200.0, "constant"),)
    plan = LoadPlan(model="slow", endpoint=served.endpoints["lane"], loads=loads, settings=settings, in_flight=4)
    point = one_point(plan)
    assert point.note.startswith("overloaded: ")
    assert not point.stable
    medians = [window.percentiles["p50"] for window in point.windows]
    assert medians == sorted(medians)
    assert medians[-1] > 4 * SERVICE_NS, "requests that wait in the generator wait longer than 4 in flight would"
    assert not point.errors


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", ["lane", "http", "grpc"])
def test_a_stream_load_measures_first_and_later_responses_and_counts_failures(kind: str, served: BenchServer) -> None:
    plan = LoadPlan(
        model="talker",
        endpoint=served.endpoints[kind],
        stream=True,
        inputs=RequestInputs(texts=("count=5",)),
        settings=QUICK,
    )
    point = one_point(plan)
    assert not point.errors
    first, between = point.first_answer, point.between_answers
    assert first is not None
    assert between is not None
    assert first.count == point.latency.count
    assert abs(between.count - 4 * first.count) <= 4, "but for those of the streams at the edges"
    assert first.percentiles["p50"].mean < point.latency.percentiles["p50"].mean
    assert point.answers_per_s > 0
    failing = one_point(
        replace(plan, inputs=RequestInputs(texts=("count=-2",)))
    )  # the model fails after its last response
    assert failing.failed
    assert not failing.latency.count
    with pytest.raises(InvalidRequest, match=r"model 'talker' is decoupled and .*: use --stream"):
        measure(replace(plan, stream=False, inputs=RequestInputs()))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", ["lane", "http", "grpc"])
def test_a_sequence_load_sends_start_and_end_flags(kind: str, served: BenchServer) -> None:
    """The model refuses requests without a sequence, and those of a sequence that has not been started."""
    before, loads = served.requests("sequence"), (ClosedLoop(3), OpenLoop(100.0))
    plan = LoadPlan(
        model="sequence", endpoint=served.endpoints[kind], loads=loads, sequences=Sequences(3, 4), settings=QUICK
    )
    for point in measure(plan).points:
        assert not point.errors
        assert not point.failed
    assert served.requests("sequence") > before
    without = one_point(replace(plan, sequences=None, loads=(ClosedLoop(1),)))
    assert not without.latency.count
    assert without.failed

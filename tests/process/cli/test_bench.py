"""`shmserve bench` against a real server, over each transport.

No assertion depends on how fast anything is, but for what a model that needs 20 ms can do at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from msgspec.structs import replace

from shmserve.clients.cli import main
from shmserve.clients.load import calibration, one_load, record
from shmserve.clients.load.generation import process
from shmserve.clients.load.measure import Progress, measure
from shmserve.clients.load.plan import SECOND, Closed, Endpoint, Inputs, Limit, Open, Plan, Replay, Sequences, Settings
from shmserve.clients.load.targets import base, connecting
from shmserve.errors import ConnectionLost, InvalidRequest, NotFound
from shmserve.gateway.auth import tokens
from shmserve.repo import samples
from shmserve.terminal.errors import Misuse
from shmserve.testing import Server
from tests.support.docs import pages
from tests.support.gateway.running_gateway import Gateway, model, talker
from tests.support.living import await_connections, until
from tests.support.model_files import write_model

pytestmark = pytest.mark.process

END_S = 60
SERVICE_NS = 20_000_000
QUICK = Settings(warmup_ns=SECOND // 50, window_ns=SECOND // 20, min_windows=2, max_windows=2, least=3)
SHORT = ["--warmup", "20ms", "--window", "50ms", "--windows", "2:2", "--no-echo"]
SLOW = f"""
name: "slow" backend: "identity" max_batch_size: 0
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 1 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 1 ] }} ]
parameters {{ key: "delay_us" value: {{ string_value: "{SERVICE_NS // 1000}" }} }}
"""
SEQUENCE = """
sequence_batching { direct { } max_sequence_idle_microseconds: 60000000 }
"""


class Place:
    """A server with all endpoints; `endpoints` are those of plans."""

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

    def requests(self, name: str) -> int:
        """Successful requests to the model since its start."""
        with self.server.client() as client:
            (entry,) = client.statistics(name)["model_stats"]
        return int(entry["inference_stats"]["success"]["count"])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    repository, keys = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("keys")
    samples.build(repository, lambda text: None)
    model(repository, "id", ["FP32", "BYTES"], "[ 4 ]", 8, "dynamic_batching { }")
    model(repository, "sequence", ["INT32"], "[ 1 ]", 4, SEQUENCE)
    model(repository, "wide", ["FP32"], "[ -1 ]", 4)
    talker(repository)
    write_model(repository, "slow", SLOW)
    for name, roles in (("server", "infer"), ("alice", "infer,observe")):
        assert command("keygen", name, "--out", str(keys), "--roles", roles)[0] == 0
    options = ["--zmq-address", "tcp://127.0.0.1:0", "--zmq-server-key", str(keys / "server.key")]
    options += ["--zmq-keys", str(keys / "alice.pub")]
    with Server(repository, *options, gateway=True) as server:
        yield Place(server, keys)


def command(*words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.main(words)
    return code, out.getvalue(), err.getvalue()


def one_point(plan: Plan) -> record.Point:
    (point,) = measure(plan).points
    return point


class GeneratorThread:
    """Stands in for the `Popen` of a generator process: the same code in a thread, without the start of Python."""

    def __init__(self, command: list[str], pass_fds: list[int], stdin: int) -> None:
        self._thread = threading.Thread(target=asyncio.run, args=[process.serve(os.dup(pass_fds[0]))])
        self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def kill(self) -> None:
        return


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators are threads that report often: for tests about what they send. Their processor time is that of the
    whole test process, so it must not call for more of them.
    """
    start = subprocess.Popen

    def started(command: list[str], **options: Any) -> Any:
        is_generator = process.__name__ in command
        return GeneratorThread(command, **options) if is_generator else start(command, **options)

    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(process, "FLUSH_S", 0.01)
    monkeypatch.setattr(one_load, "BUSY", float("inf"))


KINDS = ("lane", "ipc", "tcp", "http", "grpc")


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_loop_over_each_transport(kind: str, place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    """Two processes send; what they report is what the server has counted, but for warm-up and end."""
    before = place.requests("id")
    seen: list[Progress] = []
    plan = Plan(
        model="id", endpoint=place.endpoints[kind], loads=(Closed(3),), inputs=Inputs(batch=2), settings=QUICK,
        processes=2,
    )  # fmt: skip
    run = measure(plan, on_progress=seen.append)
    (point,) = run.points
    assert not point.errors
    assert not point.failed
    assert point.rows == 2
    assert point.cost.processes == 2
    assert 3 * 2 <= point.latency.count == sum(window.good for window in point.windows[slice(*point.used)])
    assert point.latency.count <= place.requests("id") - before
    server = point.server
    assert server is not None
    assert server.requests > 0
    assert server.rows == 2 * server.requests
    assert server.batches <= server.requests
    assert sum(int(rows) * count for rows, count in server.batch_sizes.items()) == server.rows
    assert point.usage is not None
    assert {"broker", "models"} <= set(point.usage.server)
    assert record.decode(record.encode(run)) == run
    assert {"warm-up"} <= {progress.phase for progress in seen} <= {"warm-up", "window 1", "window 2"}
    assert capfd.readouterr() == ("", ""), "the processes end quietly"


@pytest.mark.usefixtures("threads")
def test_latencies_are_at_least_the_time_of_the_model(place: Place) -> None:
    point = one_point(Plan(model="slow", endpoint=place.endpoints["http"], loads=(Closed(2),), settings=QUICK))
    assert point.latency.low >= SERVICE_NS
    assert point.throughput.mean <= 1.01 * SECOND / SERVICE_NS + 2 * SECOND / QUICK.window_ns
    assert point.server is not None
    assert point.server.parts["compute"] >= SERVICE_NS


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", ["lane", "http"])
def test_an_open_loop_that_asks_too_much_is_overloaded(kind: str, place: Place) -> None:
    """200 requests per second to a model that answers 50: they pile up, and their latencies grow."""
    settings = replace(QUICK, window_ns=SECOND // 6, min_windows=3, max_windows=6)
    plan = Plan(
        model="slow", endpoint=place.endpoints[kind], loads=(Open(200.0, "constant"),), settings=settings, in_flight=4
    )
    point = one_point(plan)
    assert point.note.startswith("overloaded: ")
    assert not point.stable
    medians = [window.percentiles["p50"] for window in point.windows]
    assert medians == sorted(medians)
    assert medians[-1] > 4 * SERVICE_NS, "requests that wait in the generator wait longer than 4 in flight would"
    assert not point.errors


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", ["lane", "http"])
def test_the_backlog_of_a_load_is_not_left_to_the_next(kind: str, place: Place) -> None:
    """After the first load, hundreds of requests wait for a model that answers 50 per second."""
    settings = replace(QUICK, window_ns=SECOND // 5)
    loads = (Open(1000.0, "constant"), Closed(1))
    plan = Plan(model="slow", endpoint=place.endpoints[kind], loads=loads, settings=settings, in_flight=500)
    first, second = measure(plan).points
    assert first.note.startswith("overloaded: ")
    assert not second.errors
    assert second.latency.percentiles["p50"].mean < first.latency.percentiles["p50"].mean
    assert second.server is not None
    assert second.server.parts["queue"] < SECOND, "the backlog would take ten seconds"


@pytest.mark.usefixtures("threads")
def test_recorded_times(place: Place) -> None:
    times = tuple(number * 4_000_000 + (number % 3) * 100_000 for number in range(50))
    point = one_point(
        Plan(model="id", endpoint=place.endpoints["lane"], loads=(Replay(times, "file"),), settings=QUICK)
    )
    assert not point.errors
    assert point.latency.count >= 3
    assert str(point.load).startswith("recorded times of file (")


@pytest.mark.usefixtures("threads")
def test_a_deadline_that_cannot_be_kept(place: Place) -> None:
    """A response may still arrive after the deadline, but none in time."""
    plan = Plan(model="slow", endpoint=place.endpoints["lane"], deadline_ns=SERVICE_NS // 4, settings=QUICK)
    point = one_point(plan)
    assert point.goodput is not None
    assert point.goodput.mean == 0
    assert point.failed == 0 or any("DEADLINE_EXCEEDED" in text for text in point.errors)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", ["lane", "http", "grpc"])
def test_streams(kind: str, place: Place) -> None:
    plan = Plan(
        model="talker", endpoint=place.endpoints[kind], stream=True, inputs=Inputs(texts=("count=5",)), settings=QUICK
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


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", ["lane", "http", "grpc"])
@pytest.mark.parametrize("load", [Closed(3), Open(100.0)], ids=["closed", "open"])
def test_sequences(kind: str, load: Any, place: Place) -> None:
    """The model refuses requests without a sequence, and those of a sequence that has not been started."""
    plan = Plan(
        model="sequence", endpoint=place.endpoints[kind], loads=(load,), sequences=Sequences(3, 4), settings=QUICK
    )
    point = one_point(plan)
    assert not point.errors
    assert point.latency.count >= 3
    without = one_point(replace(plan, sequences=None, loads=(Closed(1),)))
    assert not without.latency.count
    assert without.failed


@pytest.mark.usefixtures("threads")
def test_the_search_for_a_limit(place: Place) -> None:
    """With N callers every request takes N times 20 ms, or longer on a busy machine."""
    run = measure(
        Plan(
            model="slow",
            endpoint=place.endpoints["lane"],
            limit=Limit(50.0, 5 * SERVICE_NS // 2, 1, 16),
            settings=replace(QUICK, warmup_ns=SECOND // 8),
        )
    )
    assert run.best in (None, 1, 2)
    assert [point.value for point in run.points] == sorted(point.value for point in run.points)
    assert all(keeps is (point.value <= (run.best or 0)) for point in run.points for keeps in [_kept(point)])


def _kept(point: record.Point) -> bool:
    return point.latency.percentiles["p50"].mean <= 5 * SERVICE_NS // 2


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_larger_than_any_window(kind: str, place: Place) -> None:
    """Over gRPC, 800 KB need many frames, and windows that the server opens again. Over ipc as frames: named segments
    of the worker would stay until the server ends.
    """
    endpoint = replace(place.endpoints[kind], memory="frames" if kind == "ipc" else None)
    plan = Plan(model="wide", endpoint=endpoint, loads=(Closed(2),), settings=QUICK)
    point = one_point(replace(plan, inputs=Inputs(shapes=("i_FP32=1,200000",), distinct=2)))
    assert not point.errors
    assert point.latency.count >= 3


@pytest.mark.usefixtures("threads")
def test_strings_and_files_reach_the_model(place: Place, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((2, 4), np.float32))
    inputs = Inputs(texts=(f"i_FP32=@{tmp_path}", 'i_BYTES=[["a", "bc", "", "d"], ["1", "2", "3", "4"]]'))
    for kind in ("lane", "http", "grpc"):
        point = one_point(Plan(model="id", endpoint=place.endpoints[kind], inputs=inputs, settings=QUICK))
        assert not point.errors
        assert point.rows == 2


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", KINDS)
def test_errors_before_the_load(kind: str, place: Place) -> None:
    endpoint = place.endpoints[kind]
    with pytest.raises((NotFound, InvalidRequest), match="unknown model"):
        measure(Plan(model="nothing", endpoint=endpoint))
    with pytest.raises(Misuse, match="the model has no input 'z'"):
        measure(Plan(model="id", endpoint=endpoint, inputs=Inputs(texts=("z=1",))))
    with pytest.raises(InvalidRequest, match=r"model 'id' has no output 'z', its outputs are: o_FP32, o_BYTES"):
        measure(Plan(model="id", endpoint=endpoint, inputs=Inputs(outputs=("o_FP32", "z"))))


def test_an_endpoint_of_another_protocol(place: Place) -> None:
    http, grpc = (place.endpoints[kind].authority for kind in ("http", "grpc"))
    with pytest.raises(ConnectionLost, match=r"may expect TLS \(grpcs://\) or HTTP \(http://\)"):
        measure(Plan(model="id", endpoint=Endpoint(url=f"grpc://{http}")))
    with pytest.raises(ConnectionLost, match=f"is {grpc} the port of another protocol"):
        measure(Plan(model="id", endpoint=Endpoint(url=f"http://{grpc}")))


@pytest.mark.usefixtures("threads")
def test_processes_are_added_while_they_are_busy(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until each caller has a process of its own; a number that was given stays."""
    monkeypatch.setattr(one_load, "BUSY", -1.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16))
    plan = Plan(model="id", endpoint=place.endpoints["lane"], loads=(Closed(3), Closed(1)), settings=QUICK)
    three, one = measure(plan).points
    assert (three.cost.processes, one.cost.processes) == (3, 1)
    assert not three.errors
    assert one_point(replace(plan, processes=1, loads=(Closed(3),))).cost.processes == 1


def test_ctrl_c_ends_the_load(place: Place) -> None:
    urllib.request.urlopen(f"{place.endpoints['http'].url}/v2/health/ready").close()  # the gateway connects
    before = place.requests("id")
    words = ["bench", "id", "--url", place.server.url, "--windows", "1000:1000", "--no-echo"]
    with subprocess.Popen(
        [sys.executable, "-m", "shmserve.clients.cli.main", *words], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while place.requests("id") == before and process.poll() is None:
                continue
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=END_S)
        finally:
            process.kill()
    assert (process.returncode, errors) == (130, "shmserve bench: interrupted\n")
    with place.server.client() as client:
        await_connections(client, 2)  # of the gateway and of this test: the end of the others has been noticed
        until(client, lambda: client.statistics("id")["model_stats"][0]["in_flight"] == 0)
    after = place.requests("id")
    assert place.requests("id") == after


@pytest.mark.usefixtures("threads")
def test_errors_of_streams(place: Place) -> None:
    """A negative count makes the model fail after its answers."""
    for kind in ("lane", "http", "grpc"):
        plan = Plan(
            model="talker", endpoint=place.endpoints[kind], stream=True, inputs=Inputs(texts=("count=-2",)),
            settings=QUICK,
        )  # fmt: skip
        point = one_point(plan)
        assert point.failed
        assert not point.latency.count
        with pytest.raises(InvalidRequest, match=r"model 'talker' is decoupled, .*: use --stream"):
            measure(Plan(model="talker", endpoint=place.endpoints[kind]))


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_no_server(kind: str) -> None:
    with pytest.raises(ConnectionLost, match=f"no server at {kind}://127.0.0.1:1 "):
        measure(Plan(model="id", endpoint=Endpoint(url=f"{kind}://127.0.0.1:1")))


@pytest.mark.parametrize(("kind", "what"), [("http", "GET /v2"), ("grpc", "the connection")])
def test_a_server_that_never_answers(kind: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "ASK_S", 0.1)
    monkeypatch.setattr(connecting, "HANDSHAKE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # its backlog accepts
        url = f"{kind}://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConnectionLost, match=rf"{url} has not answered {what} within 0\.1 s"):
            measure(Plan(model="id", endpoint=Endpoint(url=url)))
        secure = url.replace(kind, f"{kind}s")
        with pytest.raises(ConnectionLost, match=rf"no TLS connection to {secure} \(no handshake within 0\.1 s\)"):
            measure(Plan(model="id", endpoint=Endpoint(url=secure)))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", KINDS)
def test_the_generator_measures_itself(kind: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "SETTINGS", QUICK)
    found = calibration.calibrate(Plan(model="id", endpoint=place.endpoints[kind]))
    assert found.protocol == {"lane": "unix", "tcp": "ipc"}.get(kind, kind)
    assert found.per_s > 0
    assert found.request_ns > 0


def test_the_command_writes_what_it_measured(place: Place, tmp_path: Path) -> None:
    files = {name: str(tmp_path / f"run.{name}") for name in ("save", "csv", "html")}
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    words = ["bench", "id", "--url", place.server.url, "-c", "1,2", *SHORT, *options]
    code, out, err = command(*words)
    assert (code, err) == (0, "")
    run = record.read(Path(files["save"]))
    assert [point.load for point in run.points] == [Closed(1), Closed(2)]
    assert out.count("concurrency 1 ") == 3
    assert Path(files["csv"]).read_text().count("\n") == 3
    assert Path(files["html"]).read_text().startswith("<!doctype html>")
    assert command("bench", "--compare", files["save"], files["save"])[1].endswith("is not different from run\n") or (
        not all(point.stable for point in run.points)
    )


@pytest.mark.usefixtures("threads")
def test_plan_reads_what_was_measured(place: Place, tmp_path: Path) -> None:
    """From a saved run, from the server's statistics over HTTP and over its socket, and from a file of them."""
    run, statistics = tmp_path / "run.json", tmp_path / "stats.json"
    assert command("bench", "slow", "--url", place.server.url, *SHORT, "--save", str(run))[0] == 0
    with place.server.client() as client:
        statistics.write_text(json.dumps(client.statistics()))
    http = place.endpoints["http"].url or ""
    for source in (str(run), http, place.server.url, str(statistics)):
        words = ["--servers", "3", "--instances", "2", "--requests", "100", "--json"]
        code, out, err = command("plan", "--from", source, "--model", "slow", *words)
        assert code == 0, err
        (result,) = json.loads(out)["results"]
        assert result["latency_ms"]["p50"] >= 20
        assert result["rate"] <= 0.7 * 3 * 2 / 0.020
    code, _, err = command("plan", "--from", http)
    assert code == 1
    assert "choose a model with --model; the models are" in err


@pytest.mark.usefixtures("threads")
def test_a_run_without_a_success_fails(place: Place) -> None:
    words = ["bench", "sequence", "--url", place.endpoints["http"].url or "", *SHORT]
    code, out, err = command(*words, "--json")
    assert code == 1
    assert json.loads(out)["points"][0]["failed"] > 0
    assert err.startswith("shmserve bench: no request succeeded: ")
    assert "sequence" in err


@pytest.mark.usefixtures("threads")
def test_a_search_that_finds_no_load_fails(place: Place) -> None:
    code, out, err = command("bench", "id", "--url", place.server.url, "--until", "p50=1us", "-c", "1:2", *SHORT)
    assert (code, err) == (1, "")
    assert re.search("^no load (kept|is known to keep)", out, re.MULTILINE)


@pytest.mark.usefixtures("threads")
def test_a_token_is_sent_and_not_saved(place: Place, tmp_path: Path) -> None:
    text, line = tokens.new("alice", "infer,observe")
    (tmp_path / "tokens").write_text(f"{line}\n")
    gateway = Gateway(place.server, "--tokens-file", str(tmp_path / "tokens"))
    try:
        for url in (f"http://127.0.0.1:{gateway.http}", f"grpc://127.0.0.1:{gateway.grpc}"):
            words = ["bench", "id", "--url", url, *SHORT]
            assert command(*words)[0] == 1
            code, out, err = command(*words, "--json", "--header", f"Authorization: Bearer {text}")
            assert (code, err) == (0, "")
            assert json.loads(out)["points"][0]["failed"] == 0
            assert text not in out
    finally:
        gateway.stop()
    code, _, err = command("bench", "id", "--url", place.server.url, "--header", "a: b")
    assert (code, err) == (2, "shmserve bench: headers are only for http, https, grpc and grpcs://\n")


@pytest.fixture(scope="module")
def secure(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Path]]:
    """A gateway that wants certificates of its clients, and a folder with those that belong to it."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca"))
    for name, host in (("server", "localhost"), ("client", "alice")):
        issued = authority.issue_cert(host)
        issued.private_key_and_cert_chain_pem.write_to_path(str(folder / name))
        (folder / name).chmod(0o600)
    issued.private_key_pem.write_to_path(str(folder / "key"))
    gateway = Gateway(place.server, "--tls-cert", str(folder / "server"), "--tls-client-ca", str(folder / "ca"))
    try:
        yield gateway, folder
    finally:
        gateway.stop()


@pytest.mark.parametrize("scheme", ["https", "grpcs"])
def test_tls(scheme: str, secure: tuple[Gateway, Path]) -> None:
    gateway, folder = secure
    port = gateway.http if scheme == "https" else gateway.grpc
    ca, cert = str(folder / "ca"), str(folder / "client")
    good = Endpoint(url=f"{scheme}://localhost:{port}", ca=ca, client_cert=cert, client_key=str(folder / "key"))
    for plan in (
        Plan(model="id", endpoint=good, loads=(Closed(3),), settings=QUICK),
        Plan(model="talker", endpoint=good, stream=True, inputs=Inputs(texts=("count=5",)), settings=QUICK),
    ):
        point = one_point(plan)
        assert not point.errors
        assert point.latency.count >= 3
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
            measure(Plan(model="id", endpoint=endpoint))
    for endpoint, text in (
        (replace(good, ca=str(folder / "none")), "authorities of --ca .*none: No such file"),
        (replace(good, ca=str(folder / "key")), "authorities of --ca .*key: no certificate or crl found"),
        (replace(good, client_cert=ca, client_key=None), "cannot use .*ca as certificate and key of the client: "),
    ):
        with pytest.raises(InvalidRequest, match=text):
            measure(Plan(model="id", endpoint=endpoint))


@pytest.mark.parametrize("kind", ["unix", "http"])
def test_ctrl_c_leaves_the_echo_server_to_its_owner(kind: str, tmp_path: Path) -> None:
    """A terminal sends the signal to all processes; none but the command itself may answer it."""
    reader, writer = os.pipe()
    words = [sys.executable, "-m", "shmserve.clients.load.echo", kind, str(tmp_path), str(writer)]
    with (
        open(reader) as ready,
        subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[writer], text=True) as process,
    ):
        os.close(writer)
        assert process.stdin is not None
        try:
            process.stdin.write("{}\n")
            process.stdin.flush()
            assert ready.readline().startswith(f"{kind}://")
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=END_S)  # closes standard input
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")


@pytest.mark.usefixtures("threads")
def test_results_are_printed_even_if_a_file_cannot_be_written(place: Place, tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "run.json"
    code, out, err = command("bench", "id", "--url", place.server.url, *SHORT, "--save", str(missing))
    assert code == 1
    assert out.startswith("load ")
    assert err == f"shmserve bench: cannot write {missing}: No such file or directory\n"


# ---------------------------------------------------------------------------------------- docs/bench.md


@pytest.mark.usefixtures("threads")
def test_the_commands_of_the_page(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, as later ones read what earlier ones have written, but for a short time, and with a limit that
    also a busy machine meets. Only a comparison may find a difference.
    """
    np.save(tmp_path / "x.npy", np.ones((2, 64), np.float32))
    (tmp_path / "inputs").mkdir()
    for number in range(2):
        np.save(tmp_path / "inputs" / f"{number}.npy", np.full((1, 64), number, np.float32))
    (tmp_path / "request.json").write_text('{"inputs": {"INPUT0": [1, 2, 3, 4], "INPUT1": [4, 3, 2, 1]}}')
    (tmp_path / "times.json").write_text("".join(f'{{"at": {n / 100}, "model": "mlp"}}\n' for n in range(20)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHMSERVE_URL", place.server.url)
    for kind in ("http", "grpc"):
        monkeypatch.setenv(f"{kind.upper()}_URL", place.endpoints[kind].url or "")
    for line in pages.commands("bench"):
        words = shlex.split(os.path.expandvars(line.replace("p99=20ms", "p99=20s")))[1:]
        compares = "--compare" in words
        code, out, err = command(*words, *([] if compares else [*SHORT, "--window", "30ms"]))
        assert code == 0 or (code == 1 and compares), f"{line}: {err}"
        assert out, line
        assert not err, line
    assert (tmp_path / "report.html").read_text().count("<h2>") == 5

"""The command from a user's view, against a real server."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from shmserve.clients.cli import main
from shmserve.dtypes import ITEM_BYTES, TO_CONFIG, to_numpy
from shmserve.repo import ocr, samples
from shmserve.testing import Server
from tests import ROOT
from tests.support.model_files import write_model

pytestmark = pytest.mark.process

END_S = 60

EVERY = "".join(
    f'{kind} [ {{ name: "{letter}_{name}" data_type: {TO_CONFIG[name]} dims: [ 2 ] }} ]\n'
    for name in ITEM_BYTES
    for kind, letter in (("input", "in"), ("output", "out"))
)
SLOW = """
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "dir/y" data_type: TYPE_FP32 dims: [ 1 ] } ]
parameters { key: "delay_us" value: { string_value: "300000" } }
"""
FAILING = """
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
parameters { key: "fail" value: { string_value: "no luck\\ntoday" } }
"""


def add_model(repository: Path, name: str, text: str) -> None:
    write_model(repository, name, f'name: "{name}" backend: "identity" max_batch_size: 0\n{text}')


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("models")
    samples.build(repository, lambda text: None)
    add_model(repository, "every", EVERY)
    add_model(repository, "slow", SLOW)
    add_model(repository, "failing", FAILING)
    with Server(repository, gateway=True) as server:
        yield server


def environment(server: Server | None, **more: str) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith("SHMSERVE")}
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    if server is not None:
        found["SHMSERVE_RUNTIME_DIR"] = str(server.runtime_dir)
    return found | more


def run(server: Server | None, *words: str, code: int = 0, text: str = "") -> str:
    """Runs in this process, so the leak check covers it. Returns standard output; if the command must fail, its one
    line on standard error, and no standard output is allowed. The tests of the page run every command in a separate
    process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment(server), clear=True),
        mock.patch.object(sys, "stdin", io.StringIO(text)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        ended = main.main(words)
    assert ended == code, out.getvalue() + err.getvalue()
    if code:
        assert out.getvalue() == ""
        assert err.getvalue().count("\n") == 1
        assert err.getvalue().startswith(f"shmserve {words[0]}: ")
        return err.getvalue()
    assert err.getvalue() == ""
    return out.getvalue()


def run_apart(server: Server | None, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Runs the command in a separate process."""
    command = [sys.executable, "-m", "shmserve.clients.cli.main", *words]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
    return subprocess.run(command, env=environment(server), text=True, check=False, timeout=END_S, **options)


def run_json(server: Server, *words: str, text: str = "") -> Any:
    return json.loads(run(server, *words, "--json", text=text))


# ------------------------------------------------------------------------------------------ questions


def test_models(server: Server) -> None:
    lines = [line.split() for line in run(server, "models").splitlines()]
    assert lines[0][:4] == ["model", "version", "state", "instances"]
    found = {entry["name"]: entry for entry in run_json(server, "models")}
    assert [line[:3] for line in lines[1:]] == [[name, "1", "READY"] for name in sorted(found)]
    assert {"add_sub", "cnn", "mlp", "every"} <= found.keys()


def test_ready(server: Server) -> None:
    assert run(server, "ready") == "the server is ready\n"
    assert run(server, "ready", "mlp", "--wait", "10") == "model 'mlp' is ready\n"
    said = run(server, "ready", "nobody", code=1)
    assert "Request for unknown model: 'nobody' is not found; `shmserve models` lists the models" in said


def test_version_shows_client_and_server(server: Server) -> None:
    found = run_json(server, "version", "--url", server.url)
    assert found.keys() == {"shmserve", "server"}
    assert run(server, "version").startswith("shmserve ")


def test_a_server_is_found_by_url_or_runtime_directory(server: Server) -> None:
    plain = run(server, "models")
    for where in (["--url", server.url], ["--url", server.zmq_url], ["--runtime-dir", str(server.runtime_dir)]):
        assert run(None, "models", *where) == plain


def test_stats_counts_requests_batches_and_rows(server: Server) -> None:
    def of_cnn() -> list[str]:
        return next(line for line in run(server, "stats").splitlines() if line.startswith("cnn ")).split()

    before, rows = of_cnn(), run_json(server, "stats", "cnn")["model_stats"][0]["inference_count"]
    run(server, "infer", "cnn", "--random", "--batch", "2", "--repeat", "3")
    after = of_cnn()
    queued, in_flight, requests, failed, batches = range(2, 7)
    assert after[queued] == after[in_flight] == after[failed] == "0"
    assert int(after[requests]) - int(before[requests]) == 3
    assert int(after[batches]) - int(before[batches]) == 3
    assert run_json(server, "stats", "cnn")["model_stats"][0]["inference_count"] - rows == 6


# ------------------------------------------------------------------------------------------ infer


def test_infer_from_arguments(server: Server) -> None:
    said = run(server, "infer", "add_sub", "--input", "INPUT0=1,2,3,4", "-i", "INPUT1=[10, 20, 30, 40]").splitlines()
    assert [line.split() for line in said[:3]] == [
        ["output", "dtype", "shape", "values"],
        ["OUTPUT0", "FP32", "[4]", "11", "22", "33", "44"],
        ["OUTPUT1", "FP32", "[4]", "-9", "-18", "-27", "-36"],
    ]
    assert re.fullmatch(r"add_sub version 1, [\d.]+ (us|ms|s)", said[-1])


def test_infer_from_json(server: Server, tmp_path: Path) -> None:
    text = '{"inputs": {"INPUT0": [1, 2, 3, 4], "INPUT1": [1, 1, 1, 1]}}'
    (tmp_path / "request.json").write_text(text)
    found = run_json(server, "infer", "add_sub", "-", text=text)
    assert found["outputs"]["OUTPUT0"] == {"dtype": "FP32", "shape": [4], "data": [2, 3, 4, 5]}
    found = run_json(server, "infer", "add_sub", str(tmp_path / "request.json"), "--outputs", "OUTPUT1")
    assert list(found["outputs"]) == ["OUTPUT1"]
    assert found["outputs"]["OUTPUT1"]["data"] == [0, 1, 2, 3]
    assert found["version"] == 1
    assert found["latency_us"]["requests"] == 1


VALUES = dict.fromkeys(ITEM_BYTES, "1,2") | {"BOOL": "true,false", "BYTES": '["ünï", ""]'}
EXPECTED: dict[str, Any] = {name: [1, 2] for name in ITEM_BYTES} | {"BOOL": [True, False], "BYTES": ["ünï", ""]}


def test_every_dtype_is_parsed_and_printed(server: Server, tmp_path: Path) -> None:
    words = [f"--input=in_{name}={value}" for name, value in VALUES.items()]
    found = run_json(server, "infer", "every", *words)["outputs"]
    assert {name: found[f"out_{name}"]["data"] for name in ITEM_BYTES} == EXPECTED
    assert {name: found[f"out_{name}"]["dtype"] for name in ITEM_BYTES} == {name: name for name in ITEM_BYTES}
    shown = {line.split()[0]: line for line in run(server, "infer", "every", *words).splitlines() if line}
    assert shown["out_BF16"].split()[1:] == ["BF16", "[2]", "1", "2"]
    assert shown["out_BYTES"].endswith("'ünï' ''")

    files = run_json(server, "infer", "every", *words, "--out", str(tmp_path / "out"))["outputs"]
    for name, entry in files.items():
        assert entry["file"] == str(tmp_path / "out" / f"{name}.npy")
        assert "data" not in entry
    again = [f"--input=in_{name}=@{files[f'out_{name}']['file']}" for name in ITEM_BYTES]
    found = run_json(server, "infer", "every", *again)["outputs"]
    assert {name: found[f"out_{name}"]["data"] for name in ITEM_BYTES} == EXPECTED


def test_tensors_are_read_from_and_written_to_npy_files(server: Server, tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((3, 64), np.float32)
    np.save(tmp_path / "x.npy", x)
    run(server, "infer", "mlp", "--input", f"x=@{tmp_path}/x.npy", "--out", str(tmp_path / "results"))
    with server.client() as client:
        assert np.allclose(np.load(tmp_path / "results" / "y.npy"), client.infer("mlp", {"x": x})["y"], atol=1e-6)
    bits = np.array([1, -2.5], ml_dtypes.bfloat16).view(np.uint16)
    words = ["--input=in_BF16=1,-2.5", "--random", "--outputs", "out_BF16,out_FP16", "--out", str(tmp_path)]
    run(server, "infer", "every", *words)
    assert np.load(tmp_path / "out_BF16.npy").tolist() == bits.tolist()
    assert np.load(tmp_path / "out_FP16.npy").dtype == to_numpy("FP16")
    words = ["--input", "x=5", "--out", str(tmp_path / "deep")]
    run(server, "infer", "slow", *words)
    assert np.load(tmp_path / "deep" / "dir_y.npy").tolist() == [5]


def test_random_inputs_are_reproducible_by_seed(server: Server) -> None:
    words = ["infer", "mlp", "--random", "--batch", "3", "--seed"]
    one, same, other = (run_json(server, *words, seed)["outputs"]["y"] for seed in ("1", "1", "2"))
    assert one["shape"] == [3, 10]
    assert np.allclose(np.sum(one["data"], axis=1), 1, atol=1e-5)
    assert one == same != other
    assert run_json(server, "infer", "cnn", "--random", "--shape", "image=2,3,64,64")["outputs"]["scores"]["shape"] == [
        2,
        10,
    ]
    found = run_json(server, "infer", "every", "--random", "--input", "in_INT8=7,8")["outputs"]
    assert found["out_INT8"]["data"] == [7, 8]
    assert all(len(text) == 8 for text in found["out_BYTES"]["data"])


def test_repeat_prints_median_and_p99_latency(server: Server) -> None:
    said = run(server, "infer", "add_sub", "--random", "--repeat", "20").splitlines()[-1]
    unit = r"[\d.]+ (us|ms|s)"
    assert re.fullmatch(rf"add_sub version 1, 20 requests one after another: median {unit}, p99 {unit}", said)
    latency = run_json(server, "infer", "add_sub", "--random", "--repeat", "20")["latency_us"]
    assert latency["requests"] == 20
    assert 0 < latency["median"] <= latency["p99"]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["add_sub"], 2, "needs INPUT0 (FP32 [4]), INPUT1 (FP32 [4]): give --input INPUT0=VALUE, a JSON file"),
        (["add_sub", "-i", "INPUT0=1"], 2, "a value of shape [] does not fit [4]"),
        (["add_sub", "-i", "INPUT0=1,2,3,4"], 1, "INPUT1"),
        (["add_sub", "-i", "X=1"], 2, "no input 'X'"),
        (["add_sub", "--random", "--batch", "2"], 2, "--batch 2: the max_batch_size of model 'add_sub' is 0"),
        (["mlp", "--random", "--batch", "33"], 2, "--batch 33: the max_batch_size of model 'mlp' is 32"),
        (["mlp", "--random", "--outputs", "z"], 1, "'z'"),
        (["mlp", "--random", "--version", "7"], 1, "version 7 is not found; `shmserve models` lists"),
        (["mlp", "--random", "--out", "/proc/no"], 1, "cannot write to /proc/no: "),
        (["mlp", "/no/such.json"], 2, "cannot read inputs from /no/such.json: No such file"),
        (["nobody", "--random"], 1, "Request for unknown model: 'nobody' is not found"),
        (["slow", "--random", "--timeout", "0.05"], 1, "--timeout allows more"),
        (["failing", "--random"], 1, "no luck today"),
    ],
)
def test_infer_errors_and_their_exit_codes(server: Server, words: list[str], code: int, text: str) -> None:
    assert text in run(server, "infer", *words, code=code)


def test_a_closed_output_pipe_is_not_an_error(server: Server) -> None:
    """`shmserve models | head -1`"""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "shmserve.clients.cli.main", "models"]
    ran = subprocess.run(
        command, env=environment(server), stdout=writer, stderr=subprocess.PIPE, check=False, timeout=END_S
    )
    os.close(writer)
    assert ran.stderr == b""


def test_ctrl_c_prints_no_traceback(server: Server) -> None:
    command = [sys.executable, "-m", "shmserve.clients.cli.main", "infer", "slow", "--random", "--repeat", "1000"]
    with server.client() as client:
        while client.statistics("slow")["model_stats"][0]["queued"]:
            pass  # the request that an earlier test has abandoned
        before = _asked(client, "slow")
        with subprocess.Popen(command, env=environment(server), stderr=subprocess.PIPE) as process:
            while _asked(client, "slow") == before:  # each question is a round trip to the server
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=END_S)[1]
    assert process.returncode == 130
    assert said == b"shmserve infer: interrupted\n"


def _asked(client: Any, model: str) -> int:
    entry = client.statistics(model)["model_stats"][0]
    return int(entry["inference_count"] + entry["queued"])


# ------------------------------------------------------------------------------------------ demo


def test_demo_prints_results_of_the_sample_models(server: Server) -> None:
    said = run(server, "demo")
    assert "their sum is 11 22 33 44, their difference 9 18 27 36" in said
    assert "2,000 requests, 64 in flight" in said
    assert "16 images in one request" in said
    port = server.endpoints["http"].rpartition(":")[2]
    assert f"`curl localhost:{port}/v2/models/add_sub`" in said
    assert re.search(
        rf"^port {port} \(http\) +ok +used by the server", run_apart(server, "doctor").stdout, re.MULTILINE
    )
    found = run_json(server, "demo")
    assert found["add_sub"] == {"sum": [11, 22, 33, 44], "difference": [9, 18, 27, 36]}
    assert 2000 / 32 <= found["mlp"]["batches"] <= 2000
    if ocr.model_file() is None:
        assert "pip install --no-deps rapidocr-onnxruntime" in said
    else:
        assert '"Handles travel, tensors stay: 64 MiB, 0 copies"' in said
        assert found["ocr_rec"]["text"] == "Handles travel, tensors stay: 64 MiB, 0 copies"


def test_demo_and_ready_report_models_that_are_not_ready(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    samples.build(tmp_path / "all", lambda text: None)
    shutil.copytree(tmp_path / "all" / "mlp", repository / "mlp")
    shutil.copytree(tmp_path / "all" / "cnn", repository / "cnn")
    (repository / "cnn" / "1" / "model.onnx").write_bytes(b"no network")
    add_model(repository, "add_sub", SLOW)
    with Server(repository) as server:
        lines = run(server, "models").splitlines()
        assert next(line for line in lines if line.startswith("cnn ")).split()[2] == "UNAVAILABLE"
        said = run(server, "ready", code=1)
        assert "shmserve ready: the server is not ready: cnn 1 is UNAVAILABLE (" in said
        assert run(server, "ready", "mlp")
        assert "model 'cnn' is not ready: cnn 1 is UNAVAILABLE (" in run(server, "ready", "cnn", code=1)
        assert "cnn 1 is UNAVAILABLE" in run(server, "ready", "--wait", "0.2", code=1)
        ran = run_apart(server, "demo")
        assert ran.returncode == 1
        assert "not served: its state is UNAVAILABLE" in ran.stdout
        assert "2,000 requests" in ran.stdout
        assert "ocr_rec: a network that recognizes a line of text\n  not served" in ran.stdout
        assert ran.stderr.startswith("shmserve demo: add_sub: ")
        assert ran.stderr.count("\n") == 1


def test_demo_without_samples(tmp_path: Path) -> None:
    add_model(tmp_path, "slow", SLOW)
    with Server(tmp_path) as server:
        ran = run_apart(server, "demo")
        assert ran.returncode == 1
        assert ran.stdout.count("not served") == 4
        assert "the server has none of the sample models: `python -m shmserve.repo.samples DIR`" in ran.stderr


def test_models_of_an_empty_server(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        assert run(server, "models").startswith("no models: ")


# ------------------------------------------------------------------------------------------ serve, and the page


def test_serve_passes_its_options_on_and_ctrl_c_stops_it(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    add_model(repository, "slow", SLOW)
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "shmserve.clients.cli.main", "serve", "--model-repository", str(repository)]
    command += ["--runtime-dir", str(tmp_path / "run"), "--ready-fd", str(writer), "--hints"]
    command.append("--no-gateway")
    with subprocess.Popen(
        command, env=environment(None), cwd=tmp_path, stderr=subprocess.PIPE, pass_fds=[writer], text=True
    ) as process:
        os.close(writer)
        try:
            assert select.select([reader], [], [], END_S)[0]
            assert os.read(reader, 16) == b"READY\n"
            assert run(None, "ready", "slow", "--runtime-dir", str(tmp_path / "run"))
        finally:
            os.close(reader)
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=END_S)[1]
    assert process.returncode == 0, said
    assert "SIGINT" in said
    assert "Traceback" not in said
    assert f"demo --runtime-dir {tmp_path}/run" in said
    assert not list((tmp_path / "run").glob("*.sock"))


def test_serve_without_a_repository_fails() -> None:
    for words, code, text in (["--help"], 0, "usage: shmserve serve"), ([], 2, "nothing to serve: "):
        ran = run_apart(None, "serve", *words)
        assert ran.returncode == code
        assert text in ran.stdout + ran.stderr


def test_the_server_imports_nothing_from_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('imported from the current directory')")
    script = tmp_path / "bin" / "shmserve"
    script.parent.mkdir()
    script.write_text("import sys\nfrom shmserve.clients.cli.main import main\nsys.exit(main())\n")
    command = [sys.executable, str(script), "serve", "--help"]
    ran = subprocess.run(
        command, env=environment(None), cwd=tmp_path, capture_output=True, text=True, check=False, timeout=END_S
    )
    safe = sys.version_info >= (3, 11)
    assert (ran.returncode == 0) is safe
    assert ("usage: shmserve serve" in ran.stdout) is safe

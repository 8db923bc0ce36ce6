"""The commands that ask a server and run its models, against a real server. Those of operators are in operations/.

tests/unit/clients/cli covers arguments, tables and error texts with a fake broker.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from shmserve.dtypes import ITEM_BYTES, TO_CONFIG
from shmserve.repo import samples
from shmserve.testing import Server
from tests.support import commands
from tests.support.cases import cases
from tests.support.ensemble_models import tensors
from tests.support.model_files import parameters, write_model

pytestmark = pytest.mark.process

END_S = 60

EVERY = "".join(
    f'{kind} [ {{ name: "{letter}_{name}" data_type: {TO_CONFIG[name]} dims: [ 2 ] }} ]\n'
    for name in ITEM_BYTES
    for kind, letter in (("input", "in"), ("output", "out"))
)
SLOW = f"input {tensors('x:FP32:[1]')} output {tensors('y:FP32:[1]')} {parameters(delay_us='300000')}"
FAILING = SLOW.replace("delay_us", "fail").replace("300000", "no luck\\ntoday")


def add_model(repository: Path, name: str, text: str) -> None:
    write_model(repository, name, f'name: "{name}" backend: "identity" max_batch_size: 0\n{text}')


def write_models(repository: Path) -> None:
    samples.build(repository, lambda text: None)
    for name, text in (("every", EVERY), ("slow", SLOW), ("failing", FAILING)):
        add_model(repository, name, text)


def environment(server: Server | None) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith("SHMSERVE")}
    return found | ({} if server is None else {"SHMSERVE_RUNTIME_DIR": str(server.runtime_dir)})


def run(server: Server | None, *words: str, code: int = 0, text: str = "") -> str:
    """Runs in this process, so the leak check covers it. Returns standard output; if the command must fail, its one
    line on standard error, and no standard output is allowed."""
    with (
        mock.patch.dict(os.environ, environment(server), clear=True),
        mock.patch.object(sys, "stdin", io.StringIO(text)),
    ):
        ended, out, err = commands.run(*words)
    assert ended == code, out + err
    assert (out if code else err) == ""
    if code:
        assert err.count("\n") == 1
        assert err.startswith(f"shmserve {words[0]}: ")
    return err or out


def run_apart(server: Server | None, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*commands.COMMAND, *words]
    return subprocess.run(command, env=environment(server), capture_output=True, text=True, check=False, timeout=END_S)


def run_json(server: Server, *words: str, text: str = "") -> Any:
    return json.loads(run(server, *words, "--json", text=text))


def test_a_server_is_found_by_url_or_runtime_directory(server: Server) -> None:
    head, *rows = (line.split() for line in run(server, "models").splitlines())
    assert head[:4] == ["model", "version", "state", "instances"]
    assert {name: [name, "1", "READY"] for name in ("add_sub", "cnn", "mlp", "every")}.items() <= {
        row[0]: row[:3] for row in rows
    }.items()
    ready = "model 'mlp' is ready\n"
    for where in (["--url", server.url], ["--url", server.zmq_url], ["--runtime-dir", str(server.runtime_dir)]):
        assert run(None, "ready", "mlp", *where) == ready
    assert run(server, "ready", "mlp", "--wait", "10") == ready
    assert run(server, "ready") == "the server is ready\n"
    assert run_json(server, "version", "--url", server.url).keys() == {"shmserve", "server"}


def test_infer_from_arguments_json_and_random_data(server: Server) -> None:
    said = run(server, "infer", "add_sub", "--input", "INPUT0=1,2,3,4", "-i", "INPUT1=[10, 20, 30, 40]").splitlines()
    assert [line.split() for line in said[:3]] == [
        ["output", "dtype", "shape", "values"],
        ["OUTPUT0", "FP32", "[4]", "11", "22", "33", "44"],
        ["OUTPUT1", "FP32", "[4]", "-9", "-18", "-27", "-36"],
    ]
    assert re.fullmatch(r"add_sub version 1, [\d.]+ (us|ms|s)", said[-1])
    text = '{"inputs": {"INPUT0": [1, 2, 3, 4], "INPUT1": [1, 1, 1, 1]}}'
    found = run_json(server, "infer", "add_sub", "-", "--outputs", "OUTPUT1", text=text)
    assert found["outputs"] == {"OUTPUT1": {"dtype": "FP32", "shape": [4], "data": [0, 1, 2, 3]}}
    assert (found["version"], found["latency_us"]["requests"]) == (1, 1)
    mixed = run_json(server, "infer", "every", "--random", "--seed", "1", "--input", "in_INT8=7,8", "--repeat", "20")
    assert mixed["outputs"]["out_INT8"]["data"] == [7, 8]
    assert all(len(text) == 8 for text in mixed["outputs"]["out_BYTES"]["data"])
    assert 0 < mixed["latency_us"]["median"] <= mixed["latency_us"]["p99"]
    shaped = run_json(server, "infer", "cnn", "--random", "--shape", "image=2,3,64,64")
    assert shaped["outputs"]["scores"]["shape"] == [2, 10]


VALUES = dict.fromkeys(ITEM_BYTES, "1,2") | {"BOOL": "true,false", "BYTES": '["ünï", ""]'}
EXPECTED: dict[str, Any] = {name: [1, 2] for name in ITEM_BYTES} | {"BOOL": [True, False], "BYTES": ["ünï", ""]}


def test_every_dtype_is_parsed_printed_and_kept_in_files(server: Server, tmp_path: Path) -> None:
    words = [f"--input=in_{name}={value}" for name, value in VALUES.items()]
    found = run_json(server, "infer", "every", *words)["outputs"]
    assert {name: found[f"out_{name}"]["data"] for name in ITEM_BYTES} == EXPECTED
    assert {name: found[f"out_{name}"]["dtype"] for name in ITEM_BYTES} == {name: name for name in ITEM_BYTES}
    files = run_json(server, "infer", "every", *words, "--out", str(tmp_path / "out"))["outputs"]
    for name, entry in files.items():
        assert entry["file"] == str(tmp_path / "out" / f"{name}.npy")
        assert "data" not in entry
    assert np.load(files["out_BF16"]["file"]).tolist() == [0x3F80, 0x4000]
    again = [f"--input=in_{name}=@{files[f'out_{name}']['file']}" for name in ITEM_BYTES]
    found = run_json(server, "infer", "every", *again)["outputs"]
    assert {name: found[f"out_{name}"]["data"] for name in ITEM_BYTES} == EXPECTED


@cases(
    (["add_sub"], 2, "needs INPUT0 (FP32 [4]), INPUT1 (FP32 [4]): give --input INPUT0=VALUE, a JSON file"),
    (["add_sub", "-i", "INPUT0=1,2,3,4"], 1, "INPUT1"),
    (["mlp", "--random", "--batch", "33"], 2, "--batch 33: the max_batch_size of model 'mlp' is 32"),
    (["mlp", "--random", "--outputs", "z"], 1, "'z'"),
    (["mlp", "--random", "--version", "7"], 1, "version 7 is not found; `shmserve models` lists"),
    (["mlp", "--random", "--out", "/proc/no"], 1, "cannot write to /proc/no: "),
    (["nobody", "--random"], 1, "unknown model: 'nobody' is not found; `shmserve models` lists the models"),
    (["slow", "--random", "--timeout", "0.05"], 1, "--timeout allows more"),
    (["failing", "--random"], 1, "no luck today"),
)
def test_infer_errors_and_their_exit_codes(words: list[str], code: int, text: str, server: Server) -> None:
    assert text in run(server, "infer", *words, code=code)


def test_demo_and_ready_report_models_that_are_not_ready(tmp_path: Path) -> None:
    samples.build(tmp_path, lambda text: None)
    (tmp_path / "cnn" / "1" / "model.onnx").write_bytes(b"no network")
    (tmp_path / "add_sub" / "config.pbtxt").write_text(f'name: "add_sub" backend: "identity"\n{SLOW}')
    with Server(tmp_path) as server:
        said = run(server, "ready", code=1)
        assert "shmserve ready: the server is not ready: cnn 1 is UNAVAILABLE (" in said
        assert run(server, "ready", "mlp")
        assert "model 'cnn' is not ready: cnn 1 is UNAVAILABLE (" in run(server, "ready", "cnn", code=1)
        assert "cnn 1 is UNAVAILABLE" in run(server, "ready", "--wait", "0.2", code=1)
        ran = run_apart(server, "demo")
        assert ran.returncode == 1
        assert "not served: its state is UNAVAILABLE" in ran.stdout
        assert "2,000 requests" in ran.stdout
        assert ran.stderr.startswith("shmserve demo: add_sub: ")
        assert ran.stderr.count("\n") == 1


def test_serve_without_a_repository_fails() -> None:
    ran = run_apart(None, "serve")
    assert (ran.returncode, "nothing to serve: " in ran.stderr) == (2, True)


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

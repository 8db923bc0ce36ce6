"""The rules of rules.md that no other file tests; test names contain the rule. Also checks that their tests exist."""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shmserve
from bench.hostile.client import SECRETS
from bench.lib.raw_client import RawLane, RawSegment
from shmserve.broker.config import settings
from shmserve.core.policy import BatchPolicy, ModelPolicy, TensorSpec
from shmserve.core.service.validation import Checker
from shmserve.dtypes import ITEM_BYTES
from shmserve.errors import InvalidRequest, ProtocolError
from shmserve.gateway import options as flags
from shmserve.protocol import codec, messages
from shmserve.protocol.messages import Ask, Fail, Goodbye, Handle, Map, Ping, Pong, Reply, Tensor
from tests import ROOT
from tests.process.server.requests import test_hostile as mistakes
from tests.support.launch import Launched, descriptors_of, identity
from tests.support.living import until

RULE_TESTS = ROOT / "tests" / "security" / "rules.md"
EDGES = [base + step for base in (0, 2**31, 2**32, 2**62, 2**63, 2**64) for step in (-1, 0, 1)]
RULES = [f"R{number}" for number in (*range(1, 28), *range(30, 33))]
MODEL = """
backend: "{backend}" max_batch_size: 4
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ -1 ] }} ]
{more}
"""
BODY = "class TritonPythonModel:\n    def {}(self, {}):\n        {}\n"
BROKEN = {
    "no_version": ("identity", "", {}),
    "syntax": ("identity", "parameters {", {"1/x": ""}),
    "no_file": ("onnxruntime", "", {"1/x": ""}),
    "garbage": ("onnxruntime", "", {"1/model.onnx": "no graph"}),
    "no_module": ("python", "", {"1/model.py": "import nothing_like_this"}),
    "no_python": ("python", "", {"1/model.py": "def ("}),
    "no_class": ("python", "", {"1/model.py": ""}),
    "raises_at_load": ("python", "", {"1/model.py": BODY.format("initialize", "args", "raise OSError(__file__)")}),
    "raises": ("python", "", {"1/model.py": BODY.format("execute", "requests", "return open(__file__ + '.none')")}),
    "exits": ("python", "", {"1/model.py": BODY.format("execute", "requests", "__import__('os').abort()")}),
    "nobody": ("backend_that_is_none", "", {"1/x": ""}),
    "outside": ("identity", 'metric_tags { key: "a" }\noptimization { graph { level: 9 } }', {"1/x": ""}),
}
"""Name -> backend, more of its configuration, files."""
EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "identity")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("security") / "models"
    identity(root, "identity")
    for name, (backend, more, files) in BROKEN.items():
        (root / name).mkdir()
        (root / name / "config.pbtxt").write_text(MODEL.format(backend=backend, more=more))
        for file, text in files.items():
            (root / name / file).parent.mkdir(exist_ok=True)
            (root / name / file).write_text(text)
    return root


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Launched]:
    """A server with variables that an operator may have in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATABASE_PASSWORD", "hunter2")
        server = Launched(repository, repository.parent / "run", *EXPLICIT)
    with server:
        yield server


def private(repository: Path) -> re.Pattern[str]:
    """Text that no caller may see: paths, names of segments, addresses."""
    return re.compile(rf"{SECRETS.pattern}|{re.escape(str(repository))}|/dev/shm| at 0x")


@pytest.mark.process
def test_r1_error_texts_contain_no_internal_names(server: Launched, repository: Path, tmp_path: Path) -> None:
    """Sends every kind of invalid request, and makes models fail in every way.

    Process ids look like any other number, so the texts of two servers are compared: internal values would differ."""
    texts = error_texts(server)
    assert len(texts) > 60
    assert [text for text in texts if private(repository).search(text)] == []
    with Launched(repository, tmp_path / "run", *EXPLICIT) as other:
        assert error_texts(other) == texts


def error_texts(server: Launched) -> list[str]:
    texts = []
    with RawLane(server.lane) as lane:
        lane.hello("memfd")
        for message, _, _ in mistakes.BAD.values():
            lane.send(message)
        for packet, _, _ in mistakes.PACKETS.values():
            if packet:
                lane.send_bytes(packet)
        lane.send(messages.Unmap(7), messages.Return((Handle(1, 2, 3),)), Ping(1))
        while not isinstance(message := lane.receive(), Pong):
            texts.append(message.text)
        lane.send(Map(1, 4096, "/shmserve-1-2-3"))
        texts.append(lane.receive_kind(Goodbye).text)
    with shmserve.Client(f"unix://{server.lane}") as client:
        for call in [partial(do, name) for name in BROKEN for do in (client.load, partial(infer, client))]:
            try:
                call()
            except shmserve.ServeError as error:
                texts.append(error.message)
        until(client, lambda: client.ready("exits"), "the worker that has aborted is restarted")
        texts += [entry["reason"] for entry in client.models() if "reason" in entry]
        for name in ("raises", "exits", "outside"):
            client.unload(name)
    return texts


def infer(client: shmserve.Client, name: str) -> Any:
    return client.infer(name, {"x": np.ones((1, 1), np.float32)})


def small(number: int) -> messages.Infer:
    return messages.Infer(number, "identity", 0, (Tensor("x", "FP32", (1, 1), b"1234"),))


@pytest.mark.process
def test_r5_the_server_listens_only_on_its_two_sockets(server: Launched) -> None:
    owned = set()
    for pid in (server.process.pid, *server.workers()):
        owned |= {target[8:-1] for target in descriptors_of(pid) if target.startswith("socket:[")}
    assert owned
    net = Path(f"/proc/{server.process.pid}/net")
    for path in (net / table for table in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6")):
        if path.exists():
            assert not [line for line in path.read_text().splitlines()[1:] if line.split()[9] in owned]
    listening = set()
    for line in (net / "unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in owned and int(fields[3], 16) & 0x10000:
            listening.add(fields[7] if len(fields) > 7 else "")
    assert listening == {server.lane, server.zmq}


def test_r5_load_calls_and_shared_access_are_off_by_default(tmp_path: Path) -> None:
    found = settings.parse(["--model-repository", str(tmp_path)])
    assert found.model_control_mode == "none"
    assert (found.access, found.socket_group) == ([], None)
    assert not settings.access(found).for_others


@pytest.mark.process
def test_r6_limits_by_flag(repository: Path, tmp_path: Path) -> None:
    """A real server enforces its settings: it refuses the third connection, and a packet full of requests."""
    limits = ("--limit", "uid_connections=2", "--limit", "client_requests=3")
    with (
        Launched(repository, tmp_path / "run", *EXPLICIT, *limits) as server,
        RawLane(server.lane) as one,
        RawLane(server.lane) as two,
        RawLane(server.lane) as three,
    ):
        assert one.hello("memfd").limits["client_requests"] == 3
        assert isinstance(two.hello("memfd"), messages.Welcome)
        goodbye = three.receive_kind(messages.Goodbye)  # without any message from this client
        assert goodbye.code == "UNAVAILABLE"
        assert "2 connections, the limit (uid_connections)" in goodbye.text
        one.send(*[small(number) for number in range(1, 20)])
        answers = [one.receive_kind(Reply, Fail) for _ in range(1, 20)]
        refused = [answer for answer in answers if isinstance(answer, Fail)]
        assert len(refused) == 16
        assert all("(client_requests)" in answer.text for answer in refused)
        one.send(small(99))
        assert isinstance(one.receive_kind(Reply, Fail), Reply)
        for _ in range(5):  # whether Goodbye or Hello is sent first
            with (
                pytest.raises(shmserve.Unavailable, match="uid_connections"),
                shmserve.Client(f"unix://{server.lane}") as client,
            ):
                client.live()


@pytest.mark.process
@pytest.mark.parametrize(
    "name",
    ["..", ".", "/", "/etc", "../models/identity", "identity/../identity", "identity/1", "\0", "a\0b", "a/", "~"],
)
def test_r9_model_names_cannot_leave_the_repository(server: Launched, name: str) -> None:
    with shmserve.Client(f"unix://{server.lane}") as client:
        for call in (
            partial(client.load, name),
            partial(client.load, name, config={"backend": "identity"}),
            partial(client.config, name),
            partial(client.metadata, name),
            partial(infer, client, name),
        ):
            with pytest.raises((shmserve.NotFound, shmserve.InvalidRequest)) as caught:
                call()
            assert not SECRETS.search(str(caught.value).replace(name, ""))
        assert [entry["name"] for entry in client.models() if entry["state"] == "READY"] == ["identity"]


@given(st.lists(st.sampled_from(EDGES) | st.integers(0, 70), max_size=6), st.sampled_from(sorted(ITEM_BYTES)))
def test_r7_shapes_at_integer_limits(dims: list[int], dtype: str) -> None:
    """A tensor is accepted only if its size equals the product computed with Python's unbounded integers."""
    specs = TensorSpec("x", dtype, (-1,) * len(dims))
    policy = ModelPolicy("m", 1, 0, (specs,), (TensorSpec("y", "FP32", (-1,)),), BatchPolicy())
    true = ITEM_BYTES[dtype]
    for dim in dims:
        true *= dim
    for size in {0, 16, true % 2**64, true % 2**63, true % 2**32}:
        if size > 4096:
            continue
        try:
            Checker(policy).check((Tensor("x", dtype, tuple(dims), bytes(size)),), None)
        except InvalidRequest:
            continue
        if ITEM_BYTES[dtype]:
            assert size == true


@given(st.sampled_from([edge for edge in EDGES if -(2**63) <= edge < 2**64]), st.sampled_from(EDGES[:-2]))
def test_r7_integers_on_the_wire_are_unsigned_64_bit(offset: int, size: int) -> None:
    (found,) = codec.Codec(messages.ClientMessage).decode(msgpack.packb([[3, [[1, offset, size]]]]))
    if 0 <= offset < 2**63 and 0 <= size < 2**63:
        assert found == messages.Return((Handle(1, offset, size),))
    else:
        assert isinstance(found, codec.Refused)


@pytest.mark.process
def test_r10_a_worker_gets_only_its_own_environment_variables(server: Launched) -> None:
    (worker,) = server.workers()
    broker = dict(_environment(server.process.pid))
    found = dict(_environment(worker))
    assert broker["DATABASE_PASSWORD"] == "hunter2"
    assert "DATABASE_PASSWORD" not in found
    allowed = re.compile(
        r"PATH|HOME|LANG|LC_\w+|LD_LIBRARY_PATH|PYTHON\w*|TMPDIR|TZ|VIRTUAL_ENV|CACHE_DIRECTORY|XDG_CACHE_HOME|CUDA_\w+|NVIDIA_\w+|"
        r"(OMP|MKL|OPENBLAS|NUMEXPR|ORT)_\w+|SHMSERVE_MODEL_\w+|MALLOC_\w+"
    )
    assert [name for name in found if not allowed.fullmatch(name)] == []


def _environment(pid: int) -> Iterator[tuple[str, str]]:
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        name, equals, value = entry.decode().partition("=")
        if equals:
            yield name, value


@pytest.mark.process
def test_r12_a_worker_has_only_its_own_descriptors(server: Launched) -> None:
    with RawLane(server.lane) as lane, shmserve.Client(f"unix://{server.lane}") as client:
        lane.hello("memfd")
        infer(client, "identity")
        (worker,) = server.workers()
        targets = descriptors_of(worker)
        assert len([target for target in targets if target.startswith("socket:")]) == 1, targets
        assert not [t for t in targets if t.startswith("/") and not re.match(r"/dev/(null|shm/|urandom)|/memfd:", t)]
        status = Path(f"/proc/{worker}/status").read_text()
        assert re.search(r"^NoNewPrivs:\s1$", status, re.MULTILINE)


BOMBS = (
    b"cposix\nabort\np0\n(tRp1\n.",
    b"cposix\nabort\nq\x00)Rq\x01.",
    b"\x80\x02cposix\nabort\nq\x00)Rq\x01.",
    b"\x80\x03cposix\nabort\nq\x00)Rq\x01.",
    b"\x80\x04\x95\x16\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x05abort\x94\x93\x94)R\x94.",
    b"\x80\x05\x95\x16\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x05abort\x94\x93\x94)R\x94.",
)
"""Pickles, in all protocols, that abort the process that loads them."""


def test_r14_pickles_are_never_loaded() -> None:
    """Sent as a packet, as a field, and as a tensor, pickles are never loaded. The audit hook sees every class
    lookup."""
    seen: list[Any] = []
    armed = [True]

    def hook(event: str, arguments: Any) -> None:
        if armed[0] and event == "pickle.find_class":
            seen.append(arguments)

    sys.addaudithook(hook)  # permanent, so it is switched off below
    try:
        decode = codec.Codec(messages.ClientMessage).decode
        for bomb in BOMBS:
            with pytest.raises(ProtocolError):
                decode(bomb)
            sent = messages.Infer(1, "m", 0, (Tensor("x", "BYTES", (1,), bomb),))
            (found,) = decode(codec.encode([sent]))
            assert found.inputs[0].data == bomb
        assert not seen
    finally:
        armed[0] = False


def test_r15_no_port_is_open_to_the_network_by_default(tmp_path: Path) -> None:
    """By default gateways get no addresses, and their own defaults are loopback addresses and no ZeroMQ."""
    assert settings.gateway_settings(settings.parse(["--model-repository", str(tmp_path)])).arguments == ()
    parser = argparse.ArgumentParser()
    flags.add(parser)
    found = parser.parse_args([])
    assert (found.http_address, found.grpc_address) == ("127.0.0.1", "127.0.0.1")
    assert (found.metrics_address, found.zmq_address) == (None, None)


@pytest.mark.process
def test_r20_an_idle_client_with_held_memory_does_not_block_others(server: Launched) -> None:
    """The client holds responses without returning them, has sent half of a request, and does not read."""
    with RawLane(server.lane) as idle, RawLane(server.lane) as silent, RawLane(server.lane) as other:
        idle.hello("memfd")
        segment = RawSegment(idle, 1 << 20)
        data = segment.put(0, bytes(400_000))
        idle.send(messages.Infer(1, "identity", 0, (Tensor("x", "FP32", (1, 100_000), data),)))
        idle.receive_kind(Reply)
        idle.send(Ask(2, "load", "identity", 0, b"half", True))
        silent.send(messages.Hello(1, 0, "silent", "memfd"), *[Ask(n, "models") for n in range(1, 200)])
        other.hello("memfd")
        for number in range(1, 50):
            other.send(small(number))
            assert isinstance(other.receive_kind(Reply, Fail), Reply)
        segment.close()


def rows() -> dict[str, list[str]]:
    """Rule -> tests."""
    found = {}
    for match in re.finditer(r"^\| (R\d+) \| [^|]+ \| ([^|]+) \|$", RULE_TESTS.read_text(), re.MULTILINE):
        found[match[1]] = re.findall(r"`([^`]+)`", match[2])
    return found


def test_every_rule_has_tests_that_exist() -> None:
    found = rows()
    assert list(found) == RULES
    assert all(found.values())
    for test in sorted({test for tests in found.values() for test in tests}):
        file, _, name = test.partition("::")
        assert (ROOT / "tests" / file).exists(), test
        if not file.startswith("scenarios/"):
            tree = ast.parse((ROOT / "tests" / file).read_text())
            functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
            assert name in {node.name for node in functions}, test

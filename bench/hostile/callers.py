"""Hostile callers of a gateway: the longest wait of an honest caller beside each of them, and alone.

    python -m bench.hostile.callers [--seconds 3] [--only ATTACK]

The honest caller sends one request after the other through each kind of endpoint, in turn alone and beside an attack.
Callers are told apart by tokens (ZeroMQ: by keys) or, with HAProxy in front, by the PROXY protocol. The printed table
is that of docs/performance.md. A request takes 5 ms in the model, which runs one at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from datetime import date
from functools import partial
from itertools import count, product
from pathlib import Path
from statistics import median
from threading import Event
from time import perf_counter, process_time
from typing import Any, NamedTuple

import numpy as np

from bench.lib import models
from bench.lib.child import Answer, Child, Handler
from shmserve import Client
from shmserve.gateway.auth import tokens
from shmserve.testing import Server
from tests.fleet import programs
from tests.support.gateway.rpc import Rpcs, infer_request
from tests.support.gateway.running_gateway import metric
from tests.support.system.ports import free_ports

MODEL = """\
from threading import Event

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    \"\"\"A prompt has the milliseconds that the request takes, the number of its responses, and their size.\"\"\"

    def initialize(self, args):
        self.memory = np.ones(MIB << 20, np.uint8)

    def execute(self, requests):
        for request in requests:
            (prompt,) = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().ravel()
            ms, count, size = map(int, prompt.split())
            sender = request.get_response_sender()
            Event().wait(ms / 1000)
            for _ in range(count):
                if request.is_cancelled():
                    break
                text = pb_utils.Tensor("text_output", np.array([b"x" * size], object))
                sender.send(pb_utils.InferenceResponse([text]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
SLEEPERS, SLEEPER_MIB, BUDGET = 4, 128, "480MiB"
"""Models of which three fit into the memory budget, beside the one that does not sleep."""
HONEST, UNREAD = "5 1 10", "5 400 100000"
"""Prompts. The unread stream is larger than all buffers on its way, and quickly made."""
ADDRESSES = {"honest": "192.0.2.1", "hostile": "192.0.2.2"}
PROXY_ADDRESS = "127.0.0.2"
TIMEOUT_S = 1.0
PAUSE_S = (0.01, 0.03)
"""Between two requests of the honest caller."""
SLOW = 5
"""How many times its usual processor time a call takes the caller when the machine is slow."""
REOPENED_S = 0.25
"""Time after which an unread stream is closed, and another one opened."""
READ_S = 0.05
PATIENCE_S = 30.0
LISTENER = """
listen {name}-{endpoint}
    bind 127.0.0.1:{port}
    tcp-request connection set-src str({address})
    server server 127.0.0.1:{target} {how}
"""


# ---------------------------------------------------------------------------------------- attacks


class AttackTarget(NamedTuple):
    port: int
    token: str
    refusals: Counter[str]
    """Other responses than 200, by status, and lost connections."""

    def request(self, method: str, path: str, body: Any = None) -> bytes:
        text = json.dumps(body).encode() if body is not None else b""
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n"
        head += f"Authorization: Bearer {self.token}\r\n" if self.token else ""
        return head.encode() + b"\r\n" + text

    def generate(self, prompt: str, model: str = "words", stream: bool = False) -> bytes:
        path = f"/v2/models/{model}/generate" + "_stream" * stream
        return self.request("POST", path, {"text_input": prompt})

    async def connect(self) -> socket.socket:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        except OSError:
            sock.close()
            raise
        return sock


async def _repeat(target: AttackTarget, requests: list[bytes]) -> None:
    """Sends the requests in turn over one connection, each when the one before is answered."""
    read, write = await asyncio.open_connection(sock=await target.connect())
    with contextlib.closing(write):
        for number in count():
            write.write(requests[number % len(requests)])
            head = (await read.readuntil(b"\r\n\r\n")).decode().lower()
            status = head.split(maxsplit=2)[1]
            if status != "200":
                target.refusals[status] += 1
            await read.readexactly(int(head.partition("content-length: ")[2].partition("\r\n")[0]))


async def _queue(target: AttackTarget) -> None:
    await _repeat(target, [target.generate(HONEST)])


async def _alternate(target: AttackTarget) -> None:
    await _repeat(target, [target.generate(HONEST, f"sleeper{number}") for number in range(1, SLEEPERS)])


async def _leave_unread(target: AttackTarget) -> None:
    loop = asyncio.get_running_loop()
    with await target.connect() as sock:
        await loop.sock_sendall(sock, target.generate(UNREAD, stream=True))
        await asyncio.sleep(REOPENED_S)


async def _read_slowly(target: AttackTarget) -> None:
    loop = asyncio.get_running_loop()
    with await target.connect() as sock:
        await loop.sock_sendall(sock, target.generate(UNREAD, stream=True))
        while await loop.sock_recv(sock, 100):
            await asyncio.sleep(READ_S)


async def _watch(target: AttackTarget) -> None:
    loop = asyncio.get_running_loop()
    with await target.connect() as sock:
        await loop.sock_sendall(sock, target.request("GET", "/page/events"))
        while await loop.sock_recv(sock, 1 << 16):
            continue


class CallerAttack(NamedTuple):
    """`connections`: as many run `connection`, which is started again when it ends. `model`: that of the honest
    caller."""

    text: str
    connections: int
    connection: Callable[[AttackTarget], Coroutine[Any, Any, None]]
    model: str = "words"


ATTACKS = {
    "queue": CallerAttack("1,000 queued calls", 1000, _queue),
    "unread": CallerAttack("four streams that nobody reads", 4, _leave_unread),
    "sleepers": CallerAttack("alternating between sleeping models", 1, _alternate, "sleeper0"),
    "held": CallerAttack("a stream read slowly; others have timeouts of 1 s", 1, _read_slowly),
    "pages": CallerAttack("64 streams of the status page", 64, _watch),
}


def attack(name: str, port: int, token: str) -> Handler:
    """Attacks for `seconds`."""
    target, what = AttackTarget(port, token, Counter()), ATTACKS[name]

    async def repeat() -> None:
        while True:
            try:
                await what.connection(target)
            except (OSError, EOFError) as error:
                target.refusals[type(error).__name__] += 1

    async def run(seconds: float) -> None:
        tasks = [asyncio.create_task(repeat()) for _ in range(what.connections)]
        failed, running = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for task in failed:
            task.result()

    def handle(seconds: float) -> Answer:
        target.refusals.clear()
        asyncio.run(run(seconds))
        return {"refusals": target.refusals}

    return handle


# ---------------------------------------------------------------------------------------- the honest caller


def over_http(model: str, place: dict[str, Any], paths: tuple[str, str]) -> Callable[[], None]:
    """`paths`: the path, and the name of the prompt in the body."""
    connection = http.client.HTTPConnection("127.0.0.1", place["http"], timeout=PATIENCE_S)
    headers = {"Authorization": f"Bearer {place['token']}"} if place["token"] else {}
    path, prompt = paths
    body = json.dumps({"model": model, prompt: HONEST} if path.startswith("/v1") else {prompt: HONEST})

    def call() -> None:
        connection.request("POST", path.format(model=model), body, headers)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(text.decode())

    return call


def over_grpc(model: str, place: dict[str, Any]) -> Callable[[], None]:
    rpcs = Rpcs(place["grpc"])
    prompt = HONEST.encode()
    asked = infer_request(model, {"text_input": ("BYTES", np.zeros(1), len(prompt).to_bytes(4, "little") + prompt)})
    metadata = [("authorization", f"Bearer {place['token']}")] if place["token"] else []

    def call() -> None:
        for answer in rpcs.ModelStreamInfer(iter([asked]), metadata=metadata, timeout=place["timeout"]):
            if answer.error_message:
                raise RuntimeError(answer.error_message)

    return call


def over_zmq(model: str, place: dict[str, Any]) -> Callable[[], None]:
    client = Client(f"tcp://127.0.0.1:{place['zmq']}", server_key=place["server_key"], key_file=place["key"])
    prompt = {"text_input": np.array([HONEST.encode()], object)}

    def call() -> None:
        for _ in client.stream(model, prompt, timeout=place["timeout"]):
            continue

    return call


CALLS: dict[str, Callable[[str, dict[str, Any]], Callable[[], None]]] = {
    "HTTP": partial(over_http, paths=("/v2/models/{model}/generate", "text_input")),
    "gRPC": over_grpc,
    "/v1": partial(over_http, paths=("/v1/completions", "prompt")),
    "ZeroMQ": over_zmq,
}


def honest(way: str, model: str, place: dict[str, Any]) -> Handler:
    call = CALLS[way](model, place)
    call()
    pauses = random.Random(models.SEED)

    def handle(seconds: float) -> Answer:
        waits, failed = [], []
        end = perf_counter() + seconds
        while (start := perf_counter()) < end:
            computed = process_time()
            try:
                call()
            except Exception as error:
                failed.append(f"{way}: {error}")
            waits.append((perf_counter() - start, start, process_time() - computed))
            Event().wait(pauses.uniform(*PAUSE_S))
        worst, began, computed = max(waits)
        usual = median(computed for _, _, computed in waits)
        own = {"computed": computed, "usual": usual}
        return {"worst": worst, "began": began, "calls": len(waits), "failed": failed} | own

    return handle


# ---------------------------------------------------------------------------------------- the run


def write_models(root: Path) -> None:
    words = models.Model("python", {"text_input": ("STRING", [1])}, {"text_output": ("STRING", [-1])})
    decoupled = "model_transaction_policy { decoupled: true }"
    stays = decoupled + ' parameters { key: "idle_unload_secs" value: { string_value: "0" } }'
    models.write(root, "words", replace(words, more=stays), {"model.py": MODEL.replace("MIB", "1")})
    for number in range(SLEEPERS):
        text = MODEL.replace("MIB", str(SLEEPER_MIB))
        models.write(root, f"sleeper{number}", replace(words, more=decoupled), {"model.py": text})


def secrets_of(work: Path) -> dict[str, str]:
    """Writes the files for the server: tokens, and the keys for ZeroMQ. Returns the token of each caller."""
    created = {name: tokens.new(name, "infer,observe,page") for name in ADDRESSES}
    (work / "tokens").write_text("".join(f"{line}\n" for _, line in created.values()))
    (work / "tokens").chmod(0o600)
    for name in ("server", *ADDRESSES):
        command = [sys.executable, "-m", "shmserve.clients.cli.main", "keygen", name, "--out", str(work)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (work / "keys").write_text("".join((work / f"{name}.pub").read_text() for name in ADDRESSES))
    return {name: token for name, (token, _) in created.items()}


@contextlib.contextmanager
def haproxy(work: Path, targets: dict[str, int]) -> Iterator[dict[str, dict[str, int]]]:
    """Yields caller -> endpoint -> port of HAProxy."""
    pairs = [(name, endpoint) for name in ADDRESSES for endpoint in targets]
    ports: dict[str, dict[str, int]] = {name: {} for name in ADDRESSES}
    text = "defaults\n    mode tcp\n    maxconn 4000\n    timeout connect 60s\n    timeout client 60s\n"
    text += "    timeout server 60s\n"
    for (name, endpoint), port in zip(pairs, free_ports(len(pairs)), strict=True):
        ports[name][endpoint] = port
        how = "" if endpoint == "zmq" else f"send-proxy-v2 source {PROXY_ADDRESS}"
        text += LISTENER.format(
            name=name, endpoint=endpoint, port=port, address=ADDRESSES[name], target=targets[endpoint], how=how
        )
    (work / "haproxy.cfg").write_text(text)
    program = programs.find("haproxy")
    assert program is not None, "HAProxy is not installed; `make test-fleet` unpacks it in build/fleet"
    with subprocess.Popen([program, "-W", "-db", "-f", work / "haproxy.cfg"], env=programs.environment()) as process:
        try:
            yield ports
        finally:
            process.terminate()


def measured(caller: Child, hostile: Child | None, cores: list[Child], seconds: float) -> Answer:
    """The hostile caller begins before the honest one, and ends after it. `stopped`: for how long a core ran nobody
    during the longest wait."""
    if hostile is not None:
        hostile.tell(seconds=seconds + 1.5)
        Event().wait(1.0)
    for core in cores:
        core.tell(seconds=seconds)
    answer = caller.ask(seconds=seconds)
    start, end = answer["began"], answer["began"] + answer["worst"]
    gaps = [gap for core in cores for gap in core.answer()["gaps"]]
    answer["stopped"] = max([min(end, until) - max(start, since) for since, until in gaps], default=0)
    if hostile is not None and (refusals := hostile.answer()["refusals"]):
        print(f"the hostile caller was refused: {refusals}", file=sys.stderr)
    return answer


class CallerRoute(NamedTuple):
    """How requests reach the gateway: caller -> endpoint -> port, and caller -> its token."""

    text: str
    ports: dict[str, dict[str, int]]
    tokens: dict[str, str]


def cell(work: Path, route: CallerRoute, name: str, way: str, cores: list[Child], seconds: float) -> str:
    """The longest wait beside an attack and, in parentheses, alone. Says if a core stood still meanwhile, and if the
    machine was slow: the caller's own processor time for that call is then many times the usual one."""
    place = route.ports["honest"] | {
        "token": route.tokens["honest"],
        "timeout": TIMEOUT_S if name == "held" else PATIENCE_S,
        "server_key": str(work / "server.pub"),
        "key": str(work / "honest.key"),
    }
    target = {"port": route.ports["hostile"]["http"], "token": route.tokens["hostile"]}
    with (
        Child("bench.hostile.callers:honest", way=way, model=ATTACKS[name].model, place=place) as caller,
        Child("bench.hostile.callers:attack", name=name, **target) as hostile,
    ):
        alone = measured(caller, None, cores, seconds)
        beside = measured(caller, hostile, cores, seconds)
    for problem in (alone["failed"] + beside["failed"])[:1]:
        print(problem, file=sys.stderr)
    failed = f", {len(beside['failed'])} of {beside['calls']} failed" if beside["failed"] else ""
    stopped = f", {1000 * beside['stopped']:.0f} of them without a processor" if beside["stopped"] > 0 else ""
    slow = ""
    if beside["computed"] > SLOW * beside["usual"]:
        slow = (
            f", the caller itself computed for {1000 * beside['computed']:.0f} instead of {1000 * beside['usual']:.1f}"
        )
    return f"{1000 * beside['worst']:.0f} ({1000 * alone['worst']:.0f}){stopped}{slow}{failed}"


def run(work: Path, names: list[str], seconds: float) -> Iterator[str]:
    """Yields the lines of the table."""
    write_models(work / "models")
    token_of = secrets_of(work)
    options = [
        "--tokens-file",
        work / "tokens",
        "--http-roles",
        "infer,observe,page",
        "--grpc-roles",
        "infer",
        "--trusted-proxies",
        PROXY_ADDRESS,
        "--model-memory-budget",
        BUDGET,
        "--zmq-address",
        "tcp://127.0.0.1:0",
        "--zmq-server-key",
        work / "server.key",
        "--zmq-keys",
        work / "keys",
    ]
    yield f"| beside | through | {' | '.join(f'{way}, ms' for way in CALLS)} |"
    yield "| --- | --- |" + " --- |" * len(CALLS)
    with Server(work / "models", *map(str, options), gateway=True) as server:
        direct = {name: int(server.endpoints[name].rpartition(":")[2]) for name in ("http", "grpc", "zmq")}
        with haproxy(work, direct) as proxied, contextlib.ExitStack() as watched:
            cores = [
                watched.enter_context(Child("bench.lib.clock:watch_core", core=core))
                for core in os.sched_getaffinity(0)
            ]
            routes = [
                CallerRoute("the gateway", dict.fromkeys(ADDRESSES, direct), token_of),
                CallerRoute("HAProxy", proxied, dict.fromkeys(ADDRESSES, "")),
            ]
            for route, name in product(routes, names):
                woken = metric(server, "shmserve_model_wakes_total")
                cells = [cell(work, route, name, way, cores, seconds) for way in CALLS]
                if name == "sleepers" and metric(server, "shmserve_model_wakes_total") == woken:
                    cells = ["no model was woken"] * len(cells)
                yield f"| {ATTACKS[name].text} | {route.text} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each turn (default: 3)")
    parser.add_argument("--only", action="append", choices=ATTACKS, help="an attack (default: all of them)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        load = f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
        print(f"{date.today()}, {load}, turns of {args.seconds:g} s: longest wait beside (alone)\n")
        for line in run(Path(work), args.only or list(ATTACKS), args.seconds):
            print(line, flush=True)


if __name__ == "__main__":
    main()

"""The clients of the soak and the errors that are allowed to them: library clients, raw clients that reconnect, a
client of the gateway, and an operator.

An error is allowed by its code and text together, so that any new error is a finding.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import select
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

import numpy as np

from bench.lib.child import Answer, Handler
from bench.lib.raw_client import ConnectionClosed, Lane, Zmq
from bench.soak.clients import Allowed, permitted
from bench.soak.raw_clients import PATIENCE, RawClient, RawLaneClient, RawZmqClient
from shmserve.protocol import codec
from shmserve.protocol.messages import (
    PACKET_BYTES,
    BrokerMessage,
    Fail,
    Goodbye,
    Infer,
    Lease,
    LeaseEnd,
    Ping,
    Pong,
    Reply,
    Tensor,
)

WIDTH = 16
"""Number of values in a tensor of the models that get one request at a time."""
PAUSE_S = 0.05
"""Pause between two attempts to connect, as the broker may be down."""


class _Lane(RawLaneClient):
    def take(self, message: Any) -> None:
        if isinstance(message, Goodbye):
            raise ConnectionClosed(message.text)
        super().take(message)


class _Zmq(RawZmqClient):
    """A ZeroMQ socket does not show that the server was replaced; a query does."""

    def receive(self) -> Any:
        for _ in range(int(PATIENCE)):
            try:
                return self.link.receive(1.0)
            except TimeoutError:
                self.link.send(Ping(self.number))
        raise TimeoutError(f"nothing within {PATIENCE:g} s")

    def take(self, message: Any) -> None:
        if isinstance(message, Goodbye):
            raise ConnectionClosed(message.text)
        super().take(message)


def raw(link: str, path: str, seed: int, dtypes: Sequence[str], allowed: Allowed) -> Handler:
    """Requests in flight when the connection ends count as `connection lost`; `ends` counts how connections ended."""

    def connect() -> RawClient:
        made: Any = Lane(path) if link == "lane" else Zmq(path)
        try:
            return (_Lane if link == "lane" else _Zmq)(made, seed, dtypes, allowed)
        except (AssertionError, OSError):  # no Welcome
            made.close()
            raise

    def handle(seconds: float) -> Answer:
        end = monotonic() + seconds
        total: dict[str, Any] = {"sent": 0, "lost": 0, "twice": 0, "wrong": 0, "examples": [], "ends": []}
        counts: Counter[str] = Counter()
        while (left := end - monotonic()) > 0:
            try:
                asker = connect()
            except OSError:
                Event().wait(PAUSE_S)
                continue
            try:
                found = asker.talk(left)
            except (ConnectionClosed, BrokenPipeError, ConnectionResetError) as error:
                found = asker.answer()
                counts["connection lost"] += found["lost"]
                found["lost"] = 0
                total["ends"].append(str(error))
            asker.link.close()
            for key in ("sent", "lost", "twice", "wrong", "examples"):
                total[key] += found[key]
            counts.update(found["counts"])
        return {**total, "counts": dict(counts)}

    return handle


def gateway(url: str, seed: int, allowed: Allowed) -> Handler:
    """Sends requests through the gateway, which may be killed at any time: requests in flight then count as `connection
    lost`."""
    roll, texts = random.Random(seed), "|".join(allowed.values())
    address = url.removeprefix("http://")

    def ask(endpoint: HTTPConnection, counts: Counter[str]) -> str:
        shape = roll.randrange(1, 5), roll.randrange(1, 60)
        data = [float(roll.randrange(1000)) for _ in range(shape[0] * shape[1])]
        tensor = {"name": "x", "datatype": "FP32", "shape": shape, "data": data}
        endpoint.request("POST", "/v2/models/identity_FP32/infer", json.dumps({"inputs": [tensor]}))
        response = endpoint.getresponse()
        told = json.loads(response.read())
        if response.status == 200:
            counts["right"] += 1
            return "" if told["outputs"][0]["data"] == data else f"identity_FP32 of {shape} is another one"
        counts[f"HTTP {response.status}"] += 1
        return "" if re.search(texts, told["error"], re.DOTALL) else f"HTTP {response.status}: {told['error']}"

    def handle(seconds: float) -> Answer:
        end = monotonic() + seconds
        counts: Counter[str] = Counter()
        sent, lost, examples = 0, 0, []
        endpoint = HTTPConnection(address, timeout=PATIENCE)
        while monotonic() < end:
            sent += 1
            try:
                fault = ask(endpoint, counts)
                if fault:
                    examples.append(fault)
            except TimeoutError:
                lost += 1
                endpoint.close()
            except (OSError, HTTPException):
                counts["connection lost"] += 1
                endpoint.close()
                Event().wait(PAUSE_S)
        endpoint.close()
        return {"sent": sent, "lost": lost, "wrong": len(examples), "examples": examples[:5], "counts": dict(counts)}

    return handle


_decode = codec.Codec(BrokerMessage).decode


class _Alone:
    """A connection that sends one request at a time, over a lease if it has one. Each request is answered once, on the
    lease or on the lane, whichever process is killed."""

    def __init__(self, path: str, roll: random.Random) -> None:
        self.link = Lane(path)
        self._roll = roll
        self._models: dict[int, str] = {}
        """Lease -> its model."""
        self._number = 0
        try:
            self.link.hello("memfd", leases=True)
        except AssertionError:
            self.link.close()
            raise

    def ask(self, model: str, counts: Counter[str]) -> tuple[Reply | Fail, bytes]:
        self._number += 1
        content = self._roll.randbytes(4 * WIDTH)
        infer = Infer(self._number, model, 0, (Tensor("x", "FP32", (1, WIDTH), content),))
        lease = next((lease for lease, known in self._models.items() if known == model), 0)
        if lease:
            counts["leased"] += 1
            try:
                self.link.leases[lease].send(codec.encode([infer]))
            except OSError:  # LeaseEnd follows
                counts["too late"] += 1
        else:
            self.link.send(infer)
        while True:
            answer = self._receive(lease if lease in self._models else 0, infer, counts)
            if answer is not None:
                assert answer.request == infer.request, f"{answer} instead of the answer to {infer.request}"
                return answer, content

    def _receive(self, lease: int, infer: Infer, counts: Counter[str]) -> Reply | Fail | None:
        """The answer, if it is the next thing that arrives."""
        answer = self._take(lease) if lease else None
        if answer is not None:
            return answer
        ready: list[Any] = [self.link, self.link.leases[lease]] if lease and not self.is_over(lease) else [self.link]
        if not self.link.inbox and not select.select(ready, [], [], PATIENCE)[0]:
            raise TimeoutError(f"request {infer.request}: nothing within {PATIENCE:g} s")
        if lease and (answer := self._take(lease)) is not None:
            return answer
        try:
            message = self.link.receive(0.0)
        except TimeoutError:
            return None
        return self._handle(message, lease, infer, counts)

    def _handle(self, message: Any, lease: int, infer: Infer, counts: Counter[str]) -> Reply | Fail | None:
        if isinstance(message, Goodbye):
            raise ConnectionClosed(message.text)
        if isinstance(message, Ping):
            self.link.send(Pong(message.number))
        elif isinstance(message, Lease):
            self._models[message.lease] = message.model
        elif isinstance(message, LeaseEnd):
            answer = self._take(message.lease) or self._take(message.lease)  # after the end, an error may come first
            del self._models[message.lease]
            self.link.leases.pop(message.lease).close()
            if message.lease != lease or answer is not None:
                return answer
            if message.error is not None:
                return Fail(infer.request, message.error.code, message.error.text)
            counts["again"] += 1
            self.link.send(infer)
        elif isinstance(message, (Reply, Fail)):
            return message
        return None

    def is_over(self, lease: int) -> bool:
        """Whether the socket has ended and is therefore always readable."""
        try:
            return not self.link.leases[lease].recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _take(self, lease: int) -> Reply | Fail | None:
        """The answer that has arrived over the lease."""
        try:
            packet = self.link.leases[lease].recv(PACKET_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            return None
        if not packet:
            return None
        (answer,) = _decode(packet)
        assert isinstance(answer, (Reply, Fail)), answer
        return answer


def alone(link: str, path: str, seed: int, models: Sequence[str], allowed: Allowed) -> Handler:
    """Sends one request at a time, with a pause now and then so that others get a turn. `over leases` counts requests
    over leases."""
    assert link == "lane", "only a lane has leases"
    roll = random.Random(seed)

    def ask(asker: _Alone, counts: Counter[str], ways: Counter[str]) -> str:
        model = models[0] if roll.random() < 0.98 else roll.choice(models)
        answer, content = asker.ask(model, ways)
        if isinstance(answer, Reply):
            counts["right"] += 1
            return "" if answer.outputs[0].data == content else f"{model}: other bytes than were sent"
        counts[answer.code] += 1
        Event().wait(PAUSE_S)  # the model may be loading
        return "" if permitted(allowed, answer.code, f"{model}: {answer.text}") else f"{answer.code}: {answer.text}"

    def handle(seconds: float) -> Answer:
        end = monotonic() + seconds
        counts: Counter[str] = Counter()
        ways: Counter[str] = Counter()
        sent, lost, examples, ends = 0, 0, [], []
        while monotonic() < end:
            try:
                asker = _Alone(path, roll)
            except (AssertionError, OSError):
                Event().wait(PAUSE_S)
                continue
            try:
                while monotonic() < end:
                    if roll.random() < 0.002:
                        Event().wait(roll.random() * 0.2)
                    sent += 1
                    if fault := ask(asker, counts, ways):
                        examples.append(fault)
            except TimeoutError as error:
                lost += 1
                examples.append(str(error))
            except (ConnectionClosed, BrokenPipeError, ConnectionResetError) as error:
                counts["connection lost"] += 1
                ends.append(str(error))
            asker.link.close()
        return {
            "sent": sent, "lost": lost, "wrong": len(examples), "examples": examples[:5], "ends": ends,
            "counts": dict(counts), "over leases": dict(ways),
        }  # fmt: skip

    return handle


def alone_in_public(url: str, seed: int, model: str, allowed: Allowed, reconnect_timeout: float) -> Handler:
    """Like `alone`, alternating between the public clients."""

    def handle(seconds: float) -> Answer:
        return asyncio.run(_alone_in_public(url, random.Random(seed), model, allowed, reconnect_timeout, seconds))

    return handle


async def _alone_in_public(
    url: str, roll: random.Random, model: str, allowed: Allowed, reconnect_timeout: float, seconds: float
) -> Answer:
    from shmserve import AsyncClient, Client
    from shmserve.errors import ServeError

    end = monotonic() + seconds
    counts: Counter[str] = Counter()
    sent, examples = 0, []
    with Client(url, reconnect_timeout=reconnect_timeout) as waiting:
        async with AsyncClient(url, reconnect_timeout=reconnect_timeout) as awaiting:
            while monotonic() < end:
                in_turn = roll.random() < 0.5
                for _ in range(roll.randrange(200)):
                    x = np.frombuffer(roll.randbytes(4 * WIDTH), np.uint32).astype(np.float32).reshape(1, -1)
                    sent += 1
                    try:
                        if in_turn:
                            y = waiting.infer(model, {"x": x})["y"]
                        else:
                            y = (await awaiting.infer(model, {"x": x}))["y"]
                    except ServeError as error:
                        counts[error.code] += 1
                        if not permitted(allowed, error.code, f"{model}: {error}"):
                            examples.append(f"{error.code}: {error}")
                    else:
                        counts["right"] += 1
                        if not np.array_equal(x, y):
                            examples.append(f"{model}: other bytes than were sent")
    return {"sent": sent, "lost": 0, "wrong": len(examples), "examples": examples[:5], "counts": dict(counts)}


class Operator:
    """Random operations on the models; at the end, all of them are served. `log`: (when, what)."""

    def __init__(self, url: str, seed: int, root: str, models: Sequence[str], away: str, allowed: Allowed) -> None:
        from shmserve import Client

        self._client = Client(url, reconnect_timeout=30.0)
        self._random = random.Random(seed)
        self._root = Path(root)
        self._models = models
        self._away = away
        self._allowed = allowed
        self._number = 0
        self._counts: Counter[str] = Counter()
        self._faults: list[str] = []
        self._log: list[tuple[float, str]] = []

    def _do(self, what: str, act: Callable[[], Any]) -> bool:
        from shmserve.errors import ServeError

        self._counts["operations"] += 1
        try:
            act()
        except ServeError as error:
            self._log.append((monotonic(), f"operator: {what}: {error.code}: {error}"))
            self._counts[error.code] += 1
            if not permitted(self._allowed, error.code, str(error)):
                self._faults.append(f"{what}: {error.code}: {error}")
            return False
        self._log.append((monotonic(), f"operator: {what}"))
        return True

    def _change(self, model: str) -> None:
        self._number += 1
        (self._root / model / "1" / "changed.txt").write_text(f"{self._number}\n")

    def _one(self) -> None:
        client, model, roll = self._client, self._random.choice(self._models), self._random.random()
        if roll < 0.5:
            self._change(model)
            self._do(f"reload {model}", lambda: client.load(model))
        elif roll < 0.75:
            self._do(f"restart {model}", lambda: client.restart(model))
        else:
            self._do(f"unload {self._away}", lambda: client.unload(self._away))
            self._do(f"load {self._away}", lambda: client.load(self._away))

    def handle(self, seconds: float, pause: float) -> Answer:
        end, wait = monotonic() + seconds, Event().wait
        while monotonic() < end:
            self._one()
            wait(self._random.random() * 2 * pause)
        for model in self._models:
            # An operation interrupted by a kill may have failed; without kills it succeeds.
            if not self._do(f"load {model}", lambda model=model: self._client.load(model)):  # type: ignore[misc]
                self._do(f"load {model} again", lambda model=model: self._client.load(model))  # type: ignore[misc]
        served = {entry["name"] for entry in self._client.models() if entry["state"] == "READY"}
        missing = set(self._models) - served
        if missing:
            self._faults.append(f"not served in the end: {sorted(missing)}")
        self._client.close()
        return {"counts": dict(self._counts), "examples": self._faults, "log": self._log[-200:]}


def operator(url: str, seed: int, root: str, models: Sequence[str], away: str, allowed: Allowed) -> Handler:
    return Operator(url, seed, root, models, away, allowed).handle

"""The clients of the soak and the errors that are allowed to them: library clients, raw clients that reconnect, a
client of the gateway, and an operator.

An error is allowed by its code and text together, so that any new error is a finding.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

import numpy as np

from bench.lib.child import Answer, Handler
from bench.lib.raw_client import ConnectionClosed, RawLane, Zmq
from bench.soak.clients import Allowed, SoakCall, Tally, permitted
from bench.soak.raw_clients import PATIENCE, RawClient, RawLaneClient, RawZmqClient
from shmserve.protocol.messages import Goodbye, Ping

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
        made: Any = RawLane(path) if link == "lane" else Zmq(path)
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

    def ask(endpoint: HTTPConnection, tally: Tally) -> None:
        shape = roll.randrange(1, 5), roll.randrange(1, 60)
        data = [float(roll.randrange(1000)) for _ in range(shape[0] * shape[1])]
        tensor = {"name": "x", "datatype": "FP32", "shape": shape, "data": data}
        endpoint.request("POST", "/v2/models/identity_FP32/infer", json.dumps({"inputs": [tensor]}))
        response = endpoint.getresponse()
        told = json.loads(response.read())
        if response.status == 200:
            tally.right("identity_FP32", np.array(told["outputs"][0]["data"]), np.array(data))
            return
        tally.counts[f"HTTP {response.status}"] += 1
        if not re.search(texts, told["error"], re.DOTALL):
            tally.fault(f"HTTP {response.status}: {told['error']}")

    def handle(seconds: float) -> Answer:
        end, tally = monotonic() + seconds, Tally()
        endpoint = HTTPConnection(address, timeout=PATIENCE)
        while monotonic() < end:
            tally.sent += 1
            try:
                ask(endpoint, tally)
            except TimeoutError:
                tally.lost += 1
                endpoint.close()
            except (OSError, HTTPException):
                tally.counts["connection lost"] += 1
                endpoint.close()
                Event().wait(PAUSE_S)
        endpoint.close()
        return tally.answer()

    return handle


def alone(url: str, seed: int, models: Sequence[str], allowed: Allowed, reconnect_timeout: float) -> Handler:
    """Sends one request at a time with either public client, mostly to the first model, so that it gets leases. `over
    leases` counts how often one was seen."""

    def handle(seconds: float) -> Answer:
        return asyncio.run(_alone(url, random.Random(seed), models, Tally(allowed), reconnect_timeout, seconds))

    return handle


async def _alone(
    url: str, roll: random.Random, models: Sequence[str], tally: Tally, reconnect_timeout: float, seconds: float
) -> Answer:
    from shmserve import AsyncClient, Client
    from shmserve.errors import ServeError

    end, seen = monotonic() + seconds, 0
    with Client(url, reconnect_timeout=reconnect_timeout) as waiting:
        async with AsyncClient(url, reconnect_timeout=reconnect_timeout) as awaiting:
            while monotonic() < end:
                in_turn = roll.random() < 0.5
                for _ in range(roll.randrange(200)):
                    model = models[0] if roll.random() < 0.98 else roll.choice(models)
                    x = np.frombuffer(roll.randbytes(4 * WIDTH), np.uint32).astype(np.float32).reshape(1, -1)
                    tally.sent += 1
                    try:
                        if in_turn:
                            y = waiting.infer(model, {"x": x})["y"]
                        else:
                            y = (await awaiting.infer(model, {"x": x}))["y"]
                    except ServeError as error:
                        tally.failed(SoakCall(model, x, x, None), error)
                    else:
                        tally.right(model, y, x)
                with suppress(ServeError):
                    seen += "\nshmserve_leases 0\n" not in waiting.metrics()
    return {**tally.answer(), "over leases": seen}


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

"""Models other than those with one response per request, and their clients in the soak: an ensemble with a mapped step,
stateful sequences, decoupled models, and a model that calls others.

Each response is compared with one computed in the client. A sequence that has lost a request is abandoned, because the
model has lost its state.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from bench.lib.child import Answer, Handler
from bench.soak.clients import PATIENCE, Allowed, SoakCall, Tally
from shmserve import errors
from tests.support.ensemble_models import ensemble, model
from tests.support.model_files import python_model
from tests.support.workers.models.stream_models import HEAD, IN_THREADS

MODELS = ("spread", "rows", "sums", "repeat", "calls")
ROWS = 6
WIDTH = 4000
PARTS = 20
WINDOW = 3

SUMS = python_model(
    """
    y = x + pb_utils.get_input_tensor_by_name(request, "state").as_numpy()
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", y), pb_utils.Tensor("new", y)])
    """
)
CALLS = python_model(
    """
    y = pb_utils.get_input_tensor_by_name(request, "x")
    for name in ("identity_FP32", "spread"):
        given = [pb_utils.Tensor.from_dlpack("x", y.to_dlpack())]
        response = pb_utils.InferenceRequest(model_name=name, requested_output_names=["y"], inputs=given).exec()
        if response.has_error():
            return pb_utils.InferenceResponse([], response.error())
        y = pb_utils.get_output_tensor_by_name(response, "y")
    return pb_utils.InferenceResponse([y])
    """
)
"""Calls two models, the second with the output of the first."""
TWO = "instance_group [ { count: 2 kind: KIND_CPU } ] "
SEQUENCES = (
    "max_batch_size: 4 sequence_batching { direct { } max_sequence_idle_microseconds: 5000000 control_input [ "
    '{ name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] }, '
    '{ name: "READY" control [ { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] } ] } ] '
    'state [ { input_name: "state" output_name: "new" data_type: TYPE_FP32 dims: [ 3 ] } ] }'
)
STREAMS = "max_batch_size: 4 dynamic_batching { } model_transaction_policy { decoupled: true }"

_START = "must specify the START flag"
ALLOWED = {
    # A sequence that lost its worker or the server has ended; its further requests fail.
    "INVALID_ARG": rf"^sums: .*{_START}",
    "CONNECTION_LOST": "^(repeat|sums): the connection ended (during the responses|in the middle)",
}


def write(root: Path) -> None:
    matrix = "[-1,-1]"
    model(root, "spread", python_model("return self.respond(2 * x)"), outputs=(f"y:FP32:{matrix}",), dims=matrix)
    model(root, "calls", CALLS, TWO, (f"y:FP32:{matrix}",), matrix)
    model(root, "sums", SUMS, TWO + SEQUENCES, ("y:FP32:[3]",), "[3]")
    model(root, "repeat", HEAD + IN_THREADS, STREAMS, ("y:FP32:[-1]",), "[1]")
    steps = "spread(x:x)->(y:wide)", "identity_FP32(x:wide)->(y:z)/map:wide"
    ensemble(root, "rows", f"x:FP32:{matrix}", f"z:FP32:{matrix}", *steps)


class Caller:
    """Sends one request after the other."""

    def __init__(self, client: Any, seed: int) -> None:
        self.client = client
        self.random = random.Random(seed)

    def timeout(self) -> float | None:
        roll = self.random
        return roll.choice([0.002, 0.05]) if roll.random() < 0.1 else None

    def ask(self, tally: Tally, call: SoakCall, output: str = "y", cancel: bool = False, **options: Any) -> bool:
        """Returns whether the request was answered."""
        tally.sent += 1
        try:
            future = self.client.submit(call.model, {"x": call.x}, timeout=call.timeout, **options)
            if cancel:
                call.cancelled = True
                future.cancel()
            result = future.result(PATIENCE)
        except (errors.ServeError, CancelledError) as error:
            tally.failed(call, error)
        except TimeoutError:
            tally.lost += 1
        else:
            tally.right(call.model, result[output], call.expected)
            return True
        return False


class Rows(Caller):
    """Calls of the ensemble: each row is a separate request to identity_FP32, which all others also call."""

    def one(self, tally: Tally) -> None:
        roll = self.random
        shape = (roll.randrange(ROWS), roll.randrange(1, WIDTH))
        x = np.full(shape, roll.randrange(1000), np.float32) + np.arange(shape[0], dtype=np.float32)[:, None]
        expected = 2 * x if shape[0] else np.empty((0, 0), np.float32)
        self.ask(tally, SoakCall("rows", x, expected, self.timeout()), "z", cancel=roll.random() < 0.1)


class Calls(Caller):
    """Requests to a model that calls the models that all others also call."""

    def one(self, tally: Tally) -> None:
        roll = self.random
        x = np.full((roll.randrange(1, ROWS), roll.randrange(1, WIDTH)), roll.randrange(1000), np.float32)
        self.ask(tally, SoakCall("calls", x, 2 * x, self.timeout()), cancel=roll.random() < 0.1)


class Sums(Caller):
    """One sequence after the other, each from START to END."""

    def one(self, tally: Tally) -> None:
        roll = self.random
        key, length = roll.randrange(1, 1 << 48), roll.randrange(1, 12)
        total = np.zeros((1, 3), np.float32)
        for index in range(length):
            x = np.array([[roll.randrange(100) for _ in range(3)]], np.float32)
            total = total + x
            place: dict[str, Any] = {"sequence": key, "sequence_start": index == 0, "sequence_end": index == length - 1}
            if not self.ask(tally, SoakCall("sums", x, total, None), **place):
                return


class Repeat(Caller):
    """Streams, some of which are closed before their end."""

    def one(self, tally: Tally) -> None:
        roll = self.random
        count, size = roll.randrange(PARTS), roll.choice([1, 1, 30, 5000])
        leave = roll.randrange(count) if count and roll.random() < 0.2 else -1
        call = SoakCall("repeat", None, None, self.timeout())
        tally.sent += 1
        came = 0
        x, how = np.array([[count]], np.float32), {"size": size}
        try:
            for part in self.client.stream("repeat", {"x": x}, window=WINDOW, timeout=call.timeout, parameters=how):
                if not np.array_equal(part["y"], np.full((1, size), came, np.float32)):
                    tally.fault(f"repeat: answer {came} of {count} is another one: {part['y'].shape}")
                if came == leave:
                    tally.counts["left"] += 1
                    return
                came += 1
        except errors.ServeError as error:
            tally.failed(call, error)
            return
        if came != count:
            tally.fault(f"repeat: {came} answers of {count}, and no error")
        tally.counts["right"] += 1


def scheduled(url: str, seed: int, allowed: Allowed, reconnect_timeout: float) -> Handler:
    from shmserve import Client

    client = Client(url, reconnect_timeout=reconnect_timeout)
    callers = [
        kind(client, seed * 10 + number) for number, kind in enumerate((Rows, Calls, Sums, Sums, Repeat, Repeat))
    ]

    def work(one: Callable[[Tally], None], end: float) -> Tally:
        tally = Tally(allowed)
        while monotonic() < end:
            one(tally)
        return tally

    def handle(seconds: float) -> Answer:
        end = monotonic() + seconds
        with ThreadPoolExecutor(len(callers)) as pool:
            answers = [tally.answer() for tally in pool.map(lambda caller: work(caller.one, end), callers)]
        client.close()
        return _together(answers)

    return handle


def _together(answers: list[Answer]) -> Answer:
    counts = Counter[str]()
    for answer in answers:
        counts.update(answer["counts"])
    total = {key: sum(answer[key] for answer in answers) for key in ("sent", "lost", "wrong")}
    return {**total, "examples": [text for answer in answers for text in answer["examples"]], "counts": dict(counts)}

"""Texts of random length for a small transformer: without padding, padded by the server, and padded by the caller.

32 requests of 8 to 128 tokens are always in flight; the engine has one thread. In a separate pass, each answer of the
padding model is compared with the bare engine's answer to the same request alone. The variants alternate in one run,
because only rates of the same run are comparable.

The gain from padding depends on the fixed cost per batch. On a CPU this cost is small: the bare engine computes a batch
of 32 hardly faster than 32 batches of one. On a GPU it dominates; this is simulated by a model that takes 2 ms per
batch, whatever its size.

A network of MiniLM's size is also compared with a loop around the engine, which always has the same number of requests
to choose from: it sorts them by length and cuts them into batches, of the size with the best rate.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from bench.lib import models
from bench.lib.bare_engine import session
from bench.lib.child import Answer, Child, Handler
from bench.lib.clock import alternate, in_turn
from bench.lib.setting import Setting, serving
from bench.lib.table import Row

SHORTEST, LONGEST = 8, 128
FLIGHT = 32
BATCH = 32
KINDS = 512
"""Number of different requests; they are created before timing starts."""
HIDDEN = 32
MINILM = {"hidden": 384, "layers": 6, "heads": 12}
LOOP_BATCHES = (1, 2, 4, 8, 16, 32)
BATCH_COSTS = ("16", "128")
"""Values of `padding_batch_cost`; the second is the default."""
NEAR = 1e-5
FIXED_US = 2000
WAYS = ("as they are", "padded by the server", f"padded to {LONGEST} by the caller")
INPUTS = {"input_ids": ("INT64", [-1]), "attention_mask": ("INT64", [-1])}
PADDING = {"padding": "input_ids attention_mask"}


def _encoder(hidden: int, parameters: dict[str, str]) -> models.Model:
    outputs = {"text": ("FP32", [hidden]), "tokens": ("FP32", [-1, hidden])}
    threads = {"intra_op_thread_count": "1"}
    return models.Model("onnxruntime", INPUTS, outputs, BATCH, True, parameters=parameters | threads)


def minilm(setting: Setting) -> list[Row]:
    """Requests of random length for a network of MiniLM's size: share of the best loop with sorted batches."""
    repository = setting.repository("minilm")
    path = setting.work / "onnx" / "minilm.onnx"
    models.make_transformer(path, **MINILM)
    for cost in BATCH_COSTS:
        model = _encoder(MINILM["hidden"], PADDING | {"padding_batch_cost": cost})
        models.write(repository, f"cost{cost}", model, {"model.onnx": path})
    seconds = max(2.0, setting.seconds)
    with (
        serving(repository) as server,
        Child("bench.suites.lengths:caller", url=server.lane, path=str(path)) as caller,
        Child("bench.suites.lengths:loop", path=str(path)) as loop,
    ):
        parties = {f"batch cost {cost}": partial(_rate, caller, seconds, f"cost{cost}", False) for cost in BATCH_COSTS}
        loops = {f"loop, batches of {size}": partial(_loop_rate, loop, seconds, size) for size in LOOP_BATCHES}
        rates = {name: median(values) for name, values in in_turn(setting.rounds, parties | loops).items()}
    beside = ", ".join(f"{name} {rate:,.4g}/s" for name, rate in rates.items())
    share = max(rates[name] for name in parties) / max(rates[name] for name in loops)
    name = f"{FLIGHT} of {SHORTEST} to {LONGEST} tokens, MiniLM's size"
    return [Row(name, share, "of the best loop", at_least=0.85, beside=beside)]


def _loop_rate(loop: Child, seconds: float, batch: int) -> float:
    return float(loop.ask(seconds=seconds, batch=batch)["per_s"])


def lengths(setting: Setting) -> list[Row]:
    """Requests of random length, 8 to 128, for a transformer: without padding, with it, and all padded to 128."""
    repository = setting.repository("lengths")
    path = setting.work / "onnx" / "transformer.onnx"
    models.make_transformer(path, HIDDEN)
    for name, parameters in (("plain", {}), ("padding", PADDING)):
        models.write(repository, name, _encoder(HIDDEN, parameters), {"model.onnx": path})
        fixed = models.Model(
            "identity", INPUTS, INPUTS, BATCH, True, parameters=parameters | {"delay_us": str(FIXED_US)}
        )
        models.write(repository, f"fixed_{name}", fixed, {})
    seconds = max(2.0, setting.seconds)
    with serving(repository) as server, Child("bench.suites.lengths:caller", url=server.lane, path=str(path)) as caller:
        worst = caller.ask(seconds=seconds, model="padding", whole=False, check=True)["worst"]
        on_cpu = alternate(setting.rounds, *_parties(caller, seconds, ""))
        on_gpu = alternate(setting.rounds, *_parties(caller, seconds, "fixed_"))
    return [
        *_rows("on a CPU", on_cpu, None),
        Row("largest difference to the bare engine", worst, "", at_most=NEAR),
        *_rows(f"{FIXED_US / 1000:g} ms a batch", on_gpu, 3.0),
    ]


def _parties(caller: Child, seconds: float, prefix: str) -> list[Callable[[], float]]:
    ways = ((f"{prefix}plain", False), (f"{prefix}padding", False), (f"{prefix}plain", True))
    return [partial(_rate, caller, seconds, *way) for way in ways]


def _rows(model: str, rates: list[list[float]], at_least: float | None) -> list[Row]:
    rows = [
        Row(f"{FLIGHT} of {SHORTEST} to {LONGEST} tokens, {model}, {way}", median(result), "/s", beside=_range(result))
        for way, result in zip(WAYS, rates, strict=True)
    ]
    factor = [after / before for before, after in zip(rates[0], rates[1], strict=True)]
    name = f"rate with padding, {model}"
    return [*rows, Row(name, median(factor), "x without", at_least=at_least, beside=_range(factor))]


def _range(result: list[float]) -> str:
    return f"{min(result):,.4g} to {max(result):,.4g}"


def _rate(caller: Child, seconds: float, model: str, whole: bool) -> float:
    return float(caller.ask(seconds=seconds, model=model, whole=whole, check=False)["per_s"])


# ------------------------------------------------------------------------------------------------ the processes

Feed = dict[str, Any]


def _feeds() -> list[Feed]:
    import numpy as np

    draws = Random(14)
    texts = [np.array([[draws.randrange(1000) for _ in range(draws.randint(SHORTEST, LONGEST))]]) for _ in range(KINDS)]
    return [{"input_ids": ids, "attention_mask": np.ones_like(ids)} for ids in texts]


def _padded(feed: Feed, length: int) -> Feed:
    import numpy as np

    return {key: np.pad(array, ((0, 0), (0, length - array.shape[1]))) for key, array in feed.items()}


def loop(path: str) -> Handler:
    """Runs the engine on 32 requests at a time: sorted by length, in batches that are padded to their longest."""
    import numpy as np

    run, feeds = session(path).run, _feeds()

    def handle(seconds: float, batch: int) -> Answer:
        turns, done, start = itertools.cycle(range(0, KINDS, FLIGHT)), 0, perf_counter()
        while (passed := perf_counter() - start) < seconds:
            first = next(turns)
            waiting = sorted(feeds[first : first + FLIGHT], key=_length)
            for at in range(0, FLIGHT, batch):
                members = waiting[at : at + batch]
                padded = [_padded(feed, _length(members[-1])) for feed in members]
                run(["text"], {key: np.concatenate([feed[key] for feed in padded]) for key in INPUTS})
            done += FLIGHT
        return {"per_s": done / passed}

    return handle


def _length(feed: Feed) -> int:
    return int(feed["input_ids"].shape[1])


def caller(url: str, path: str) -> Handler:
    """Keeps 32 requests in flight for `seconds`. `whole`: pad all of them to the maximum length; `check`: compare each
    answer with that of the bare engine before sending the next request.
    """
    import numpy as np

    from shmserve import AsyncClient

    alone = _feeds()
    filled = [_padded(feed, LONGEST) for feed in alone]
    engine = session(path)

    async def one(
        client: Any, model: str, names: list[str], feeds: Any, end: float, check: bool, turns: Iterator[int]
    ) -> Answer:
        done, worst = 0, 0.0
        while perf_counter() < end:
            which = next(turns) % KINDS
            result = await client.submit(model, feeds[which], outputs=None if check else names[:1])
            done += 1
            if check:
                for name, expected in zip(
                    ("text", "tokens"), engine.run(["text", "tokens"], alone[which]), strict=True
                ):
                    assert result[name].shape == expected.shape
                    worst = max(worst, float(np.abs(result[name] - expected).max()))
        return {"done": done, "worst": worst}

    async def load(seconds: float, model: str, feeds: Any, check: bool) -> Answer:
        turns = itertools.count()
        async with AsyncClient(url) as client:
            names = [output["name"] for output in (await client.metadata(model))["outputs"]]
            start = perf_counter()
            result = await asyncio.gather(
                *(one(client, model, names, feeds, start + seconds, check, turns) for _ in range(FLIGHT))
            )
            rate = sum(each["done"] for each in result) / (perf_counter() - start)
        return {"per_s": rate, "worst": max(each["worst"] for each in result)}

    def handle(seconds: float, model: str, whole: bool, check: bool) -> Answer:
        return asyncio.run(load(seconds, model, filled if whole else alone, check))

    return handle

"""The command demo: each sample model at work, on an input that means something, checked where it can be checked."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from shmserve.clients.printing import as_json, client_of
from shmserve.clients.sync import Client
from shmserve.errors import ModelFailed
from shmserve.repo import samples

IN_FLIGHT = 64
BURST = 2000


def add(commands: Any, server: argparse.ArgumentParser) -> None:
    made = commands.add_parser(
        "demo",
        help="run the sample models",
        description="Runs each sample model that the server has, and says what it did.",
        epilog="example:\n  make serve           in one terminal\n  shmserve demo        in another",
        parents=[server],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    report: dict[str, Any] = {}
    with client_of(options) as client:
        serving = {entry["name"] for entry in client.models() if entry["state"] == "READY"}
        known = [name for name in DEMOS if name in serving]
        for name in known:
            lines: list[str] = []
            report[name] = DEMOS[name](client, lines.append)
            if not options.json:
                print(f"{name}: " + "\n  ".join(lines) + "\n")
    if options.json:
        as_json(report)
    elif not known:
        print("none of the sample models is ready on this server; start it with the samples: make serve")
    else:
        print("Your own model: docs/models.md.   Counts and times: shmserve stats")
    return 0 if known else 1


Say = Callable[[str], None]


def _add_sub(client: Client, say: Say) -> Any:
    a = np.array([1, 2, 3, 4], np.float32)
    b = np.array([10, 20, 30, 40], np.float32)
    result = client.infer("add_sub", {"INPUT0": a, "INPUT1": b})
    total, difference = result["OUTPUT0"], result["OUTPUT1"]
    if not (np.array_equal(total, a + b) and np.array_equal(difference, a - b)):
        raise ModelFailed(f"add_sub said {total.tolist()} and {difference.tolist()}, which is wrong")
    say("a Python model; the server passes it numpy arrays that lie in shared memory")
    say(f"{_short(a)} + {_short(b)} = {_short(total)}")
    say(f"{_short(a)} - {_short(b)} = {_short(difference)}")
    return {"sum": total.tolist(), "difference": difference.tolist()}


def _mlp(client: Client, say: Say) -> Any:
    x = np.random.default_rng(7).standard_normal((1, 64)).astype(np.float32)
    alone = client.infer("mlp", {"x": x})["y"]
    before = client.statistics("mlp")["model_stats"][0]
    began = time.perf_counter()
    futures = [client.submit("mlp", {"x": x}) for _ in range(IN_FLIGHT)]
    for turn in range(BURST):
        if not np.allclose(futures[turn % IN_FLIGHT].result()["y"], alone, rtol=1e-4, atol=1e-5):
            raise ModelFailed("mlp answers differently in a batch than alone")
        futures[turn % IN_FLIGHT] = client.submit("mlp", {"x": x})
    for future in futures:
        future.result()
    seconds = time.perf_counter() - began
    after = client.statistics("mlp")["model_stats"][0]
    count = after["inference_count"] - before["inference_count"]
    batches = after["execution_count"] - before["execution_count"]
    say("an ONNX network with dynamic batching: requests that wait together run together")
    say(f"{count} requests, {IN_FLIGHT} in flight: {count / seconds:,.0f}/s, in {batches} batches of "
        f"{count / max(1, batches):.1f} on average; all answers agree")  # fmt: skip
    return {"requests": count, "batches": batches, "per_second": count / seconds}


def _cnn(client: Client, say: Say) -> Any:
    image = client.empty((8, 3, 64, 64), "float32")
    image[:] = np.random.default_rng(3).random(image.shape, np.float32)
    together = client.infer("cnn", {"image": image})["scores"]
    first = client.infer("cnn", {"image": image[:1]})["scores"]
    if not np.allclose(together[:1], first, rtol=1e-3, atol=1e-4):
        raise ModelFailed("cnn scores an image differently alone than among others")
    size = image.nbytes // 1024
    say(f"an ONNX network; {size} KiB of images were written once, to shared memory, and copied nowhere")
    say(f"8 images scored at once, best classes {together.argmax(axis=1).tolist()} (its weights are random)")
    return {"classes": together.argmax(axis=1).tolist()}


def _ocr(client: Client, say: Say) -> Any:
    picture = samples.sample_picture()
    try:
        characters = samples.ocr_characters()
    except (FileNotFoundError, ValueError) as error:
        say(f"left out: {error}")
        return None
    began = time.perf_counter()
    output = client.infer(samples.OCR_MODEL, {samples.OCR_INPUT: samples.ocr_input(picture)})[samples.OCR_OUTPUT]
    seconds = time.perf_counter() - began
    text = samples.ocr_text(output, characters)
    height, width = picture.shape[:2]
    say(f"a text recogniser looks at {samples.EXAMPLES / 'picture.png'} ({width} x {height} pixels)")
    say(f'and reads, after {seconds * 1000:.0f} ms: "{text}"')
    return {"text": text}


DEMOS: dict[str, Callable[[Client, Say], Any]] = {
    "add_sub": _add_sub,
    "mlp": _mlp,
    "cnn": _cnn,
    samples.OCR_MODEL: _ocr,
}


def _short(array: Any) -> str:
    return "[" + " ".join(f"{value:g}" for value in array.tolist()) + "]"

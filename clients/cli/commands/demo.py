"""`shmserve demo`: runs the sample models on meaningful inputs and verifies results where possible.

Every statement that it prints is about this run, with measured numbers.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.clients.cli.commands.base import connected, print_json
from shmserve.errors import ServeError
from shmserve.repo import ocr, samples
from shmserve.terminal.errors import Failed, Misuse
from shmserve.terminal.tables import duration_text

if TYPE_CHECKING:
    from shmserve.clients.client import Client
    from shmserve.session import Result

Say = Callable[[str], None]
DemoResult = dict[str, Any]
"""A sample's results, for --json."""

MANY = 2000
IN_FLIGHT = 64
PICTURES = 16
FIRST_STEP = "`python -m shmserve.repo.samples DIR` writes them, `shmserve serve --model-repository DIR` serves them"
NEXT = """Next: `{command} stats{where}` shows the statistics of these requests;
`{command} infer mlp --random{where}` sends one."""
OVER_HTTP = "Over HTTP: `curl localhost:{port}/v2/models/add_sub`."


class Wrong(Exception):
    """A model's answer is wrong."""


def demo(args: argparse.Namespace) -> int:
    """Returns 0 if at least one sample is served and all served samples succeeded."""
    from shmserve.clients.client import Client

    results: dict[str, DemoResult] = {}
    failed: list[str] = []
    say = _hush if args.json else _say
    with connected(args) as client:
        if not isinstance(client, Client):
            raise Misuse("the demonstration needs more than HTTP; connect over the lane, ipc or tcp instead")
        served = {entry["name"]: entry for entry in client.models()}
        port = client.activity()["server"].get("ports", {}).get("http")
        for name, (title, show) in SHOWS.items():
            if not args.json:
                print(f"{name}: {title}")
            absent = _absent(name, served.get(name))
            if absent:
                say(absent)
                continue
            try:
                results[name] = show(client, say)
            except (ServeError, OSError, LookupError, ValueError, Wrong) as error:
                failed.append(f"{name}: {error}")
    if args.json:
        print_json(results)
    if failed:
        sys.stdout.flush()
        raise Failed("; ".join(failed))
    if not results:
        raise Failed(f"the server has none of the sample models: {FIRST_STEP}")
    if not args.json:
        options = {"--url": args.url, "--runtime-dir": args.runtime_dir, "--context": args.context}
        where = "".join(f" {option} {shlex.quote(value)}" for option, value in options.items() if value)
        print(NEXT.format(command="shmserve" if shutil.which("shmserve") else sys.argv[0], where=where))
        if port is not None:
            print(OVER_HTTP.format(port=port))
    return 0


def _say(text: str) -> None:
    print(f"  {text}")


def _hush(text: str) -> None:
    """Prints nothing: --json prints only the results."""


def _absent(name: str, entry: Mapping[str, Any] | None) -> str:
    if entry is None and name == ocr.MODEL and ocr.model_file() is None:
        return "not served: `pip install --no-deps rapidocr-onnxruntime` adds its network to the samples"
    if entry is None:
        return "not served"
    if entry["state"] != "READY":
        return f"not served: its state is {entry['state']}" + (f" ({entry['reason']})" if entry["reason"] else "")
    return ""


def _timed(client: Client, model: str, inputs: Mapping[str, Any]) -> tuple[Result, str]:
    """The result and duration of the second of two requests: the first one also maps memory."""
    client.infer(model, inputs)
    started = time.perf_counter()
    result = client.infer(model, inputs)
    return result, duration_text(time.perf_counter() - started)


def _numbers(array: Any) -> str:
    return " ".join(f"{value:g}" for value in array.reshape(-1).tolist())


# ------------------------------------------------------------------------------------------ the samples


def add_sub(client: Client, say: Say) -> DemoResult:
    a, b = np.array([10, 20, 30, 40], np.float32), np.array([1, 2, 3, 4], np.float32)
    result, took = _timed(client, "add_sub", {"INPUT0": a, "INPUT1": b})
    total, difference = result["OUTPUT0"], result["OUTPUT1"]
    if not (np.array_equal(total, a + b) and np.array_equal(difference, a - b)):
        raise Wrong(f"{_numbers(total)} and {_numbers(difference)} are not the sum and the difference")
    say(f"{_numbers(a)} and {_numbers(b)}:")
    say(f"their sum is {_numbers(total)}, their difference {_numbers(difference)} ({took})")
    return {"sum": total.tolist(), "difference": difference.tolist()}


def mlp(client: Client, say: Say) -> DemoResult:
    """Simulates a program that keeps many requests in flight."""
    rows = np.random.default_rng(7).standard_normal((IN_FLIGHT, 1, 64), np.float32)
    result, took = _timed(client, "mlp", {"x": rows[0]})
    alone = result["y"]
    best = int(alone.argmax())
    say(f"64 numbers: most likely class {best}, {alone[0, best]:.0%} ({took})")
    before = _batches(client)
    started = time.perf_counter()
    futures = [client.submit("mlp", {"x": row}) for row in rows]
    for turn in range(IN_FLIGHT, MANY):
        futures[turn % IN_FLIGHT].result()
        futures[turn % IN_FLIGHT] = client.submit("mlp", {"x": rows[turn % IN_FLIGHT]})
    answers = [future.result()["y"] for future in futures]
    seconds = time.perf_counter() - started
    batches = _batches(client) - before
    if not np.allclose(answers[0], alone, rtol=1e-4, atol=1e-5):
        raise Wrong("the result for the same numbers differs when they are batched with other requests")
    say(f"{MANY:,} requests, {IN_FLIGHT} in flight: {duration_text(seconds)}, {MANY / seconds:,.0f} per second")
    say(f"{batches} batches, {MANY / max(1, batches):.0f} requests per batch on average")
    return {"class": best, "requests": MANY, "batches": batches, "per_second": round(MANY / seconds)}


def _batches(client: Client) -> int:
    return sum(int(entry["execution_count"]) for entry in client.statistics("mlp")["model_stats"])


def cnn(client: Client, say: Say) -> DemoResult:
    """Images in shared memory: only their handles are sent."""
    pictures = client.empty((PICTURES, 3, 64, 64))
    across = np.linspace(-1, 1, 64, dtype=np.float32)
    for index, picture in enumerate(pictures):  # a bright disc that moves from left to right
        middle = -0.8 + 1.6 * index / (PICTURES - 1)
        picture[:] = np.exp(-8 * (across[:, None] ** 2 + (across[None, :] - middle) ** 2))
    result, took = _timed(client, "cnn", {"image": pictures[:1]})
    alone = result["scores"]
    say(f"image of 64 x 64 pixels: highest score for class {int(alone.argmax())} ({took})")
    started = time.perf_counter()
    futures = [client.submit("cnn", {"image": pictures[index : index + 1]}) for index in range(PICTURES)]
    scores = np.concatenate([future.result()["scores"] for future in futures])
    took = duration_text(time.perf_counter() - started)
    if not np.allclose(scores[:1], alone, rtol=1e-3, atol=1e-4):
        raise Wrong("the scores of the same image differ when it is batched with other images")
    say(f"{PICTURES} images in one request, {pictures.nbytes // 1024} KiB in shared memory, not copied: {took}")
    return {"classes": scores.argmax(axis=1).tolist()}


def ocr_rec(client: Client, say: Say) -> DemoResult:
    picture = ocr.sample_picture()
    characters = ocr.read_characters()
    result, took = _timed(client, ocr.MODEL, {ocr.INPUT: ocr.to_input(picture)})
    text = ocr.to_text(result[ocr.OUTPUT], characters)
    height, width = picture.shape[:2]
    say(f"text found in {samples.EXAMPLES.name}/picture.png, {width} x {height} pixels ({took}):")
    say(f'  "{text}"')
    return {"text": text}


SHOWS: Mapping[str, tuple[str, Callable[[Client, Say], DemoResult]]] = {
    "add_sub": ("a Python model, 1/model.py, with two inputs", add_sub),
    "mlp": ("a small network; waiting requests are batched", mlp),
    "cnn": ("an image classifier with two instances", cnn),
    "ocr_rec": ("a network that recognizes a line of text", ocr_rec),
}
"""Sample -> its title, and the function that runs it."""

"""Commands that ask and change nothing: models, stats, ready, version."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

import shmserve
from shmserve.clients.printing import as_json, client_of, table
from shmserve.clients.transport import FIRST_STEP
from shmserve.errors import ConnectionLost, DeadlineExceeded, NotFound


def add(commands: Any, server: argparse.ArgumentParser) -> None:
    def command(name: str, about: str, examples: str, run: Any) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = commands.add_parser(
            name,
            help=about,
            description=f"{about[:1].upper()}{about[1:]}.",
            epilog="examples:\n" + examples,
            parents=[server],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(run=run)
        return made

    command(
        "models", "list the models, their versions and states", "  shmserve models\n  shmserve models --json", models
    )
    made = command(
        "stats", "count requests and batches, with mean times", "  shmserve stats\n  shmserve stats mlp", stats
    )
    made.add_argument("model", nargs="?", default="", help="only this model")
    examples = "  shmserve ready                 exit code 0: the server takes requests\n"
    examples += "  shmserve ready mlp --wait 30   wait up to 30 s for this model"
    made = command("ready", "say whether the server, or a model, takes requests", examples, ready)
    made.add_argument("model", nargs="?", help="this model instead of the server")
    made.add_argument("--wait", metavar="S", type=float, default=0.0, help="wait up to so many seconds")
    command("version", "print the versions of this command and of the server", "  shmserve version", version)


def models(options: argparse.Namespace) -> int:
    with client_of(options) as client:
        found = client.models()
    if options.json:
        as_json(found)
    elif not found:
        print("the server has no models; put some into its model repository and start it again")
    else:
        rows = [[entry["name"], entry["version"], entry["state"], entry["reason"]] for entry in found]
        table(("MODEL", "VERSION", "STATE", "REASON"), rows)
    return 0


def stats(options: argparse.Namespace) -> int:
    with client_of(options) as client:
        found = client.statistics(options.model or None)
    if options.json:
        as_json(found)
        return 0
    rows = []
    for entry in found["model_stats"]:
        times = entry["inference_stats"]
        batches = entry["execution_count"]
        compute = sum(times[part]["ns"] for part in ("compute_input", "compute_infer", "compute_output"))
        rows.append(
            [
                entry["name"],
                entry["version"],
                times["success"]["count"],
                times["fail"]["count"],
                batches,
                entry["inference_count"] / batches if batches else 0.0,
                _mean_us(times["success"]["ns"], times["success"]["count"]),
                _mean_us(times["queue"]["ns"], times["queue"]["count"]),
                _mean_us(compute, times["compute_infer"]["count"]),
            ]
        )
    table(("MODEL", "VERSION", "DONE", "FAILED", "BATCHES", "ROWS/BATCH", "TOTAL us", "QUEUE us", "COMPUTE us"), rows)
    return 0


def _mean_us(ns: int, count: int) -> float:
    return ns / count / 1000 if count else 0.0


def ready(options: argparse.Namespace) -> int:
    what = f"model '{options.model}'" if options.model else "the server"
    reason = ""
    with client_of(options) as client:
        try:
            if options.wait > 0:
                client.wait_ready(options.model, options.wait)
                found = True
            else:
                found = client.ready(options.model)
                if not found and not client.live():
                    reason = f"no server at {client.url}: {FIRST_STEP}"
        except (DeadlineExceeded, NotFound) as error:
            found, reason = False, str(error)
    if options.json:
        as_json({"ready": found})
    elif found:
        print(f"{what} is ready")
    else:
        print(reason or f"{what} is not ready; `shmserve models` says why", file=sys.stderr)
    return 0 if found else 1


def version(options: argparse.Namespace) -> int:
    said: dict[str, Any] = {"shmserve": shmserve.__version__, "server": None}
    with client_of(options) as client:
        with contextlib.suppress(ConnectionLost):  # to have none is an answer, too
            said["server"] = client.metadata()["version"]
        where = client.url
    if options.json:
        as_json(said)
        return 0
    print(f"shmserve {said['shmserve']}")
    print(f"server   {said['server']} at {where}" if said["server"] else f"server   none at {where}")
    return 0

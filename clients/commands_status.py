"""The commands that ask and change nothing: models, stats, ready, config, version."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import shmserve
from shmserve.clients.commands_base import Failed, connected, make_client, print_json
from shmserve.tables import table

US = 1000
"""ns in it."""


def models(args: argparse.Namespace) -> int:
    with connected(args) as client:
        found = client.models()
    if args.json:
        print_json(found)
    elif not found:
        print("no models: put one into the repository, which is read when the server starts")
    else:
        rows = [[entry["name"], entry["version"] or "-", entry["state"], entry["reason"]] for entry in found]
        print(table(["model", "version", "state", "reason"], rows, right=[1]))
    return 0


def config(args: argparse.Namespace) -> int:
    with connected(args) as client:
        print_json(client.config(args.model, args.version))
    return 0


def stats(args: argparse.Namespace) -> int:
    with connected(args) as client:
        found = client.statistics(args.model, args.version)
    if args.json:
        print_json(found)
        return 0
    head = ["model", "version", "requests", "failed", "batches", "mean batch", "queue us", "compute us"]
    rows = [stats_row(entry) for entry in found["model_stats"]]
    print(table([*head, "batches formed because"], rows, right=range(1, len(head))))
    return 0


def stats_row(entry: Mapping[str, Any]) -> list[str]:
    """Requests are those answered, well or not; a mean batch is in rows; times are means over those answered well."""
    times = entry["inference_stats"]
    good, failed, batches = times["success"]["count"], times["fail"]["count"], entry["execution_count"]
    compute = sum(times[part]["ns"] for part in ("compute_input", "compute_infer", "compute_output"))
    reasons = sorted(entry.get("batch_reasons", {}).items(), key=lambda item: -item[1])
    return [
        entry["name"],
        entry["version"],
        f"{good + failed:,}",
        f"{failed:,}",
        f"{batches:,}",
        f"{entry['inference_count'] / batches:.1f}" if batches else "-",
        f"{times['queue']['ns'] / good / US:,.0f}" if good else "-",
        f"{compute / good / US:,.0f}" if good else "-",
        ", ".join(f"{reason} {count:,}" for reason, count in reasons) or "-",
    ]


def ready(args: argparse.Namespace) -> int:
    if args.wait is not None:
        with make_client(args) as client:
            client.wait_ready(args.model, timeout=args.wait)
    else:
        with connected(args) as client:
            if not client.ready(args.model):
                index = client.models()
                raise Failed(_not_ready(args.model, index))
    what = f"model '{args.model}'" if args.model else "the server"
    print(f"{what} is ready")
    return 0


def _not_ready(model: str | None, index: list[dict[str, Any]]) -> str:
    reasons = []
    for entry in index:
        if model in (None, entry["name"]) and entry["state"] != "READY":
            why = f" ({entry['reason']})" if entry["reason"] else ""
            reasons.append(f"{entry['name']} {entry['version']}".rstrip() + f" is {entry['state']}{why}")
    what = f"model '{model}'" if model else "the server"
    return f"{what} is not ready" + (f": {'; '.join(reasons)}" if reasons else "; it is starting or stopping")


def version(args: argparse.Namespace) -> int:
    """Asks the server only if one is named: without it, nothing but the standard library is loaded."""
    found = {"shmserve": shmserve.__version__}
    if args.url is not None or args.runtime_dir is not None:
        with connected(args) as client:
            found["server"] = client.metadata()["version"]
    if args.json:
        print_json(found)
    else:
        print(f"shmserve {found['shmserve']}")
        if "server" in found:
            print(f"the server is version {found['server']}")
    return 0

"""The commands that change what is served: load, unload, restart, traffic. Several models are processed concurrently.

Invariant: each failure is reported with its reason, and does not stop the other models.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmserve.clients.cli.commands.base import (
    StatusLine,
    complain,
    connected,
    make_client,
    next_step,
    print_json,
    screen_of,
)
from shmserve.errors import Denied, NotFound, ServeError
from shmserve.terminal.console import Screen
from shmserve.terminal.errors import Misuse
from shmserve.terminal.tables import duration_text, table

if TYPE_CHECKING:
    from shmserve.clients.queries import BlockingQueries

TOGETHER = 32
"""Operations in flight at the same time; the server decides how many models load concurrently."""
TICK_S = 0.1
ASK_S = 1.0
SPINNER = "|/-\\"

Operation = Callable[["BlockingQueries", str], "dict[str, Any]"]


def load(args: argparse.Namespace) -> int:
    if bool(args.model) is args.all:
        raise Misuse("name one or more models, or use --all")
    if (args.config_json is not None or args.file) and (args.all or len(args.model) > 1):
        raise Misuse("--config-json and --file are for one model")
    if args.file and args.config_json is None:
        raise Misuse("--file needs --config-json: a model that is sent is not read from the repository")
    if args.previous and (args.all or args.config_json is not None or args.version):
        raise Misuse("--previous cannot be combined with --all, --config-json or --version")
    if args.version and (args.all or len(args.model) > 1):
        raise Misuse("--version is for one model")
    config = None if args.config_json is None else _config(args.config_json)
    files = dict(map(_file, args.file)) or None

    def one(client: BlockingQueries, model: str) -> dict[str, Any]:
        return client.load(
            model, config=config, files=files, previous=args.previous, versions=args.version, timeout=args.timeout
        )

    return _each(args, one, "loading", partial(_loaded, screen_of(args)))


def unload(args: argparse.Namespace) -> int:
    def one(client: BlockingQueries, model: str) -> dict[str, Any]:
        result = client.unload(
            model, unload_dependents=args.dependents, wait=args.wait, force=args.force, timeout=args.timeout
        )
        if not result["versions"]:
            _check_exists(client, model)
        return result

    return _each(args, one, "unloading", _unloaded if args.wait else _begun)


def restart(args: argparse.Namespace) -> int:
    if args.instance is not None and len(args.model) > 1:
        raise Misuse("--instance is for one model")

    def one(client: BlockingQueries, model: str) -> dict[str, Any]:
        return client.restart(model, version=args.version, instance=args.instance, timeout=args.timeout)

    def describe(result: Mapping[str, Any]) -> str:
        if args.instance is not None:
            return f"instance {args.instance} restarted"
        return f"{f'version {args.version}' if args.version is not None else _versions(result)} restarted"

    return _each(args, one, "restarting", describe)


def _check_exists(client: BlockingQueries, model: str) -> None:
    """Raises NotFound for a model that is in no repository. The server answers its unload as Triton does: without an
    error, as there is nothing left to unload."""
    with contextlib.suppress(Denied):  # a server that does not list its models
        if all(entry["name"] != model for entry in client.models()):
            raise NotFound(f"Request for unknown model: '{model}' is not found")


def traffic(args: argparse.Namespace) -> int:
    shares = None
    if args.all is not None:
        shares = {args.all: 100}
    elif args.reset or args.share:
        shares = dict(args.share)
    if (args.all is not None) + args.reset + bool(args.share) > 1:
        raise Misuse("give only one of shares, --all and --reset")
    aliases: dict[str, int | None] = dict(args.alias) | dict.fromkeys(args.remove_alias)
    with connected(args) as client:
        shadow = {} if args.no_shadow else None if args.shadow is None else dict([args.shadow])
        result = client.traffic(args.model, shares=shares, aliases=aliases, shadow=shadow)
    if args.json:
        print_json(result)
        return 0
    named: dict[str, list[str]] = {}
    for alias, number in result["aliases"].items():
        named.setdefault(str(number), []).append(f"{args.model}@{alias}")
    versions = sorted({*result["now"], *result["shares"], *named}, key=int)
    lines = []
    for number in versions:
        shares_of = (result[kind].get(number) for kind in ("now", "shares"))
        lines.append([number, *map(_percent, shares_of), " ".join(named.get(number, ()))])
    print(table(["version", "now", "share", "aliases"], lines, right=(1, 2)))
    if result.get("shadow") or result.get("compared"):
        print(f"\n{_shadow_text(result)}")
    return 0


def _shadow_text(result: Mapping[str, Any]) -> str:
    lines = [f"{percent} % also go to version {number}" for number, percent in result["shadow"].items()]
    lines += [
        f"version {pair['shadow']} compared with {pair['version']}: {pair['equal']:,} equal, {pair['different']:,} "
        f"different, {pair['failed']:,} failed, {pair['skipped']:,} skipped"
        for pair in result["compared"]
    ]
    return "\n".join(lines or ["no shadow"])


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:g} %"


def _config(name: str) -> dict[str, Any]:
    """A JSON object from a file or standard input."""
    try:
        config = json.loads(sys.stdin.read() if name == "-" else Path(name).read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise Misuse(f"cannot read a configuration from {name}: {reason}") from error
    if not isinstance(config, dict):
        raise Misuse(f"cannot read a configuration from {name}: it is not a JSON object")
    return config


def _file(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    if not name or not separator or not path:
        raise Misuse(f"--file {text}: expected NAME=PATH, e.g. 1/model.onnx=./model.onnx")
    if not Path(path).is_file():
        raise Misuse(f"--file {text}: no such file")
    return name, Path(path)


# ------------------------------------------------------------------------------------------ running and reporting


def _each(args: argparse.Namespace, one: Operation, doing: str, describe: Callable[[Mapping[str, Any]], str]) -> int:
    """Runs the operation on each model. Returns 0 if none failed, else 1."""
    with connected(args) as client:
        names = list(dict.fromkeys(args.model)) or sorted({entry["name"] for entry in client.models()})
        with _Operations(names, partial(one, client), client.close) as operations:
            _watch(args, operations, doing)
    return _report(args, operations.outcomes(), describe)


class _Operations:
    """Operations on models, in threads. If the block is left by an exception, `cancel` is called, which ends them.

    Invariant: the main thread waits only in select, and takes no lock that another thread needs. Ctrl-C could interrupt
    it between taking the lock of a Condition and entering its block, and the other thread would wait forever.
    """

    def __init__(self, names: Sequence[str], run: Callable[[str], dict[str, Any]], cancel: Callable[[], None]) -> None:
        self._names = names
        self._run = run
        self._cancel = cancel
        self._remaining = deque(names)
        self._outcomes: dict[str, dict[str, Any] | BaseException] = {}
        self._reader, self._writer = os.pipe()
        self._threads = [
            threading.Thread(target=self._work, name=f"shmserve-operation-{number}")
            for number in range(min(TOGETHER, len(names)))
        ]

    def __enter__(self) -> _Operations:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._remaining.clear()
            self._cancel()  # wakes up all waiting threads at once
        for thread in self._threads:
            thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def _work(self) -> None:
        while self._remaining:
            try:
                name = self._remaining.popleft()
            except IndexError:  # another thread took it
                return
            try:
                self._outcomes[name] = self._run(name)
            except BaseException as error:  # raised by `outcomes`, in the main thread
                self._outcomes[name] = error
            os.write(self._writer, b".")

    def waiting(self, seconds: float | None = None) -> list[str]:
        """Waits until an operation ends, for up to `seconds`. Returns the models whose operations have not ended."""
        if len(self._outcomes) < len(self._names) and select.select([self._reader], [], [], seconds)[0]:
            os.read(self._reader, TOGETHER)
        return [name for name in self._names if name not in self._outcomes]

    def outcomes(self) -> dict[str, dict[str, Any] | ServeError]:
        """The results or errors, by model. Raises other errors."""
        results: dict[str, dict[str, Any] | ServeError] = {}
        for name in self._names:
            outcome = self._outcomes[name]
            if isinstance(outcome, BaseException) and not isinstance(outcome, ServeError):
                raise outcome
            results[name] = outcome
        return results


def _report(
    args: argparse.Namespace,
    outcomes: Mapping[str, dict[str, Any] | ServeError],
    describe: Callable[[Mapping[str, Any]], str],
) -> int:
    failed = {name: error for name, error in outcomes.items() if isinstance(error, ServeError)}
    done = {name: result for name, result in outcomes.items() if not isinstance(result, ServeError)}
    if args.json:
        print_json([done.get(name) or _as_json(name, failed[name]) for name in outcomes])
    else:
        for name, result in done.items():
            print(f"{name}: {describe(result)}")
    for name, result in done.items():
        for warning in result.get("warnings", ()):
            complain(args, f"warning: {name}: {warning}")
    for name, failure in failed.items():
        text = next_step(failure, args)
        complain(args, text if f"'{name}'" in text else f"{name}: {text}")
    return 1 if failed else 0


def _as_json(name: str, error: ServeError) -> dict[str, Any]:
    return {"model": name, "error": {"code": error.code, "message": str(error)}}


def _loaded(screen: Screen, result: Mapping[str, Any]) -> str:
    states = []
    for entry in result["versions"]:
        seconds = f" after {duration_text(entry['seconds'])}" if result.get("changed", True) else ""
        states.append(f"version {entry['version']} is {screen.state(entry['state'])}{seconds}")
    unchanged = "" if result.get("changed", True) else "nothing has changed; "
    return unchanged + (", ".join(states) or "it has no versions")


def _unloaded(result: Mapping[str, Any]) -> str:
    versions = _versions(result)
    return f"{versions} unloaded" if versions else "nothing to unload"


def _begun(result: Mapping[str, Any]) -> str:
    versions = _versions(result)
    return f"unloading {versions}" if versions else "nothing to unload"


def _versions(result: Mapping[str, Any]) -> str:
    numbers = [entry["version"] for entry in result["versions"]]
    return f"version{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}" if numbers else ""


# ------------------------------------------------------------------------------------------ progress


def _watch(args: argparse.Namespace, operations: _Operations, doing: str) -> None:
    """Waits until all are done. On a terminal, one line shows the progress, which is queried over a separate
    connection."""
    started = time.monotonic()
    with StatusLine(not args.json) as status:
        if not status.is_shown:
            while operations.waiting():
                pass
            return
        with make_client(args, timeout=ASK_S) as client:
            for turn in itertools.cycle(SPINNER):
                waiting = operations.waiting(TICK_S)
                if not waiting:
                    break
                line = f"{turn} {doing} {_many(waiting)}, {time.monotonic() - started:.0f} s"
                with contextlib.suppress(ServeError):  # the operation itself reports the error
                    line += progress(client.models(), waiting)
                status.show(line)


def _many(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def progress(index: Iterable[Mapping[str, Any]], names: Sequence[str]) -> str:
    """The number of ready instances of these models and of those that should be; empty if there are none."""
    ready, wanted = counts(instance for entry in index if entry["name"] in names for instance in instances_of(entry))
    return f": {ready} of {wanted} instances" if wanted else ""


def instances_of(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The version's instances, without those that were stopped on purpose."""
    return [instance for instance in entry.get("instances") or () if instance["state"] != "stopped"]


def counts(instances: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """The number of ready instances, and of those that should be."""
    known = list(instances)
    ready = sum(instance["state"] == "ready" and not instance.get("quarantined") for instance in known)
    return ready, sum(instance["state"] != "stopping" for instance in known)

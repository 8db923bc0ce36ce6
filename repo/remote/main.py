"""The process that mirrors remote repositories: `python -m shmserve.repo.remote.main FD`.

The socket FD carries JSON documents, one a line: first the settings, then requests of the broker, and events back. The
process ends when the broker closes the socket; what was downloaded is resumed by the next one.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from shmserve.repo.remote.address import parse_address
from shmserve.repo.remote.cache import RemoteCache
from shmserve.repo.remote.credentials import Redactor
from shmserve.repo.remote.download import PAUSE_S, PIECE_BYTES
from shmserve.repo.remote.mirror import Mirror, MirrorOutcome, MirrorResources
from shmserve.repo.remote.stores import StoreError

MODELS = 4
"""How many models are downloaded at a time."""
RETRY_S = 15.0
"""How long to wait for a repository that cannot be read and of which the cache has nothing."""
LIST_S = 5.0
"""Listings for the index of models are this old at most, when somebody asks."""
PARTIAL_S = 7 * 86400
"""Unfinished downloads that are older are removed."""
CONNECTIONS = 8
"""Files, and pieces of files, that are downloaded at the same time."""
NICE = 5
"""Requests go first."""


class MirrorSettings(msgspec.Struct, frozen=True):
    """`slot`: the server's directory in the cache. `poll_s`: 0: never. `pause_s`: before the second attempt."""

    slot: str
    limit: int
    repositories: list[str]
    poll_s: float = 0.0
    settle_s: float = 0.0
    piece_bytes: int = PIECE_BYTES
    retry_s: float = RETRY_S
    pause_s: float = PAUSE_S


class Mirrors:
    """All repositories. `emit` sends an event to the broker."""

    def __init__(self, settings: MirrorSettings, emit: Callable[[Mapping[str, object]], None]) -> None:
        self._settings = settings
        self._emit = emit
        self._ended = threading.Event()
        self._listed_at = -LIST_S
        self._problems: dict[tuple[str, str], str] = {}
        """(repository, model) -> the problem that was logged last."""
        self.redact = Redactor()
        cache = RemoteCache(Path(settings.slot), settings.limit)
        _remove_old(Path(settings.slot) / "partial")
        resources = MirrorResources(
            cache,
            self.redact,
            ThreadPoolExecutor(CONNECTIONS, "file"),
            ThreadPoolExecutor(CONNECTIONS, "piece"),
            emit,
            self._ended.wait,
            settings.piece_bytes,
            settings.pause_s,
        )
        self._cache = cache
        self._mirrors = [Mirror(parse_address(text), resources) for text in settings.repositories]
        self._models = ThreadPoolExecutor(MODELS, "model")
        self._requests = ThreadPoolExecutor(64, "request")

    def handle(self, request: Mapping[str, Any]) -> None:
        """Begins what the broker requests."""
        work: Callable[[], None]
        match request["do"]:
            case "fetch_all":
                work = partial(self._fetch_all, request["id"])
            case "fetch":
                work = partial(self._fetch, request["id"], request["model"])
            case "poll":
                work = self._poll
            case "list":
                work = self._list
            case "release":
                work = partial(self._release, request["model"])
            case "drop":
                work = partial(self._drop, request["trees"])
            case other:
                raise ValueError(other)
        self._requests.submit(work).add_done_callback(self._check)

    def _check(self, future: Future[None]) -> None:
        error = future.exception()
        if error is not None:
            lines = "".join(traceback.format_exception(error)).splitlines()
            print("\n".join(self.redact(line) for line in lines), file=sys.stderr, flush=True)
            os._exit(1)  # the broker starts another process, and repeats what was not finished

    # ------------------------------------------------------------------------------------ requests

    def _fetch_all(self, number: int) -> None:
        """Mirrors all models of all repositories."""
        for future in [self._requests.submit(self._whole, mirror) for mirror in self._mirrors]:
            future.result()
        self._emit({"event": "done", "id": number, "failed": "", "notes": []})

    def _poll(self) -> None:
        """Follows changes, until the process ends."""
        pause = self._settings.poll_s
        while not self._ended.wait(pause):
            unsettled = [self._update(mirror, self._settings.settle_s) for mirror in self._mirrors]
            pause = self._settings.poll_s
            if any(unsettled):
                pause = min(pause, self._settings.settle_s)

    def _whole(self, mirror: Mirror) -> None:
        """All models of a repository, or those that the cache has. If there are none, tries again until it is read."""
        try:
            names = mirror.models()
        except StoreError as error:
            known = self._cache.known(mirror.key)
            text = f"model repository {mirror.address} cannot be read: {error}"
            if known:
                self._report_problem(mirror, "", f"{text}; serving its {len(known)} model(s) from the cache")
                for name in known:
                    self._report(mirror, mirror.offline(name, str(error)))
            else:
                self._report_problem(mirror, "", text)
                self._emit({"event": "unreadable", "repository": mirror.key})
                if not self._settings.poll_s:
                    self._requests.submit(self._again, mirror).add_done_callback(self._check)
            return
        for future in [self._models.submit(mirror.sync, name) for name in names]:
            self._report(mirror, future.result())
        self._hide_others(mirror, names)
        self._readable(mirror)

    def _again(self, mirror: Mirror) -> None:
        if not self._ended.wait(self._settings.retry_s):
            self._whole(mirror)

    def _readable(self, mirror: Mirror) -> None:
        if self._problems.pop((mirror.key, ""), None):
            self._log("info", f"model repository {mirror.address} can be read again", "")
        self._emit({"event": "readable", "repository": mirror.key})

    def _update(self, mirror: Mirror, settle_s: float) -> bool:
        """Follows changes of a repository. Returns whether it is being changed now."""
        try:
            names = mirror.models()
        except StoreError as error:
            served = "; its models are served unchanged" if self._cache.published(mirror.key) else ""
            self._report_problem(mirror, "", f"model repository {mirror.address} cannot be read: {error}{served}")
            return False
        outcomes = [future.result() for future in [self._models.submit(mirror.sync, name, settle_s) for name in names]]
        for outcome in outcomes:
            self._report(mirror, outcome)
        self._hide_others(mirror, names)
        unsettled = any(outcome.state == "unsettled" for outcome in outcomes)
        if not unsettled:
            self._readable(mirror)
        return unsettled

    def _hide_others(self, mirror: Mirror, names: Sequence[str]) -> None:
        for name in set(self._cache.published(mirror.key)).difference(names):
            self._report(mirror, mirror.hide(name))

    def _fetch(self, number: int, model: str) -> None:
        futures = [(mirror, self._models.submit(mirror.sync, model)) for mirror in self._mirrors]
        failed, notes = [], []
        for mirror, future in futures:
            outcome = future.result()
            self._report(mirror, outcome)
            text = f"model repository {mirror.address}: {outcome.text}"
            if outcome.state == "failed":
                failed.append(text)
            elif outcome.state in ("kept", "offline"):
                notes.append(f"served from the cache, because it cannot be downloaded: {text}")
        served = any(future.result().tree for _, future in futures)
        failure = "; ".join(failed) if failed and not served else ""
        self._emit({"event": "done", "id": number, "failed": failure, "notes": notes})

    def _list(self) -> None:
        if time.monotonic() - self._listed_at >= LIST_S:
            self._listed_at = time.monotonic()
            for mirror in self._mirrors:
                try:
                    mirror.announce()
                    self._problems.pop((mirror.key, ""), None)
                except StoreError as error:
                    self._report_problem(mirror, "", f"model repository {mirror.address} cannot be read: {error}")
        self._emit({"event": "listed"})

    def _drop(self, trees: Sequence[str]) -> None:
        for tree in trees:
            self._cache.drop(tree)

    def _release(self, model: str) -> None:
        for mirror in self._mirrors:
            outcome = mirror.release(model)
            if outcome.old:
                self._emit({"event": "retired", "tree": outcome.old})

    # ------------------------------------------------------------------------------------ events

    def _report(self, mirror: Mirror, outcome: MirrorOutcome) -> None:
        is_new = True
        if outcome.state in ("kept", "offline", "failed"):
            is_new = self._report_problem(mirror, outcome.model, _problem(mirror, outcome))
        else:
            self._problems.pop((mirror.key, outcome.model), None)
        event = {"event": "outcome", "repository": mirror.key, **outcome._asdict(), "is_new": is_new}
        if outcome.state == "failed":
            event["text"] = f"model repository {mirror.address}: {outcome.text}"
        self._emit(event)

    def _report_problem(self, mirror: Mirror, model: str, text: str) -> bool:
        """Logs a problem, unless it is the same as before. Returns whether it is another one."""
        is_new = self._problems.get((mirror.key, model)) != text
        if is_new:
            self._problems[mirror.key, model] = text
            self._log("error", text, model)
        return is_new

    def _log(self, level: str, text: str, model: str) -> None:
        self._emit({"event": "log", "level": level, "text": self.redact(text), "model": model})


def _problem(mirror: Mirror, outcome: MirrorOutcome) -> str:
    then = {"kept": "; it is served unchanged", "offline": "; it is served from the cache", "failed": ""}[outcome.state]
    return f"model '{outcome.model}' cannot be downloaded from {mirror.address}: {outcome.text}{then}"


def _remove_old(folder: Path) -> None:
    limit = time.time() - PARTIAL_S
    for path in folder.iterdir():
        if path.stat().st_mtime < limit:
            path.unlink()


def main(arguments: Sequence[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the broker decides when it ends
    os.nice(NICE)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # For zonal buckets, gcsfs looks up the kind of a bucket before each call.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    link = socket.socket(fileno=int(arguments[0]))
    guard = threading.Lock()

    def emit(event: Mapping[str, object]) -> None:
        data = json.dumps(event).encode() + b"\n"
        with guard:
            try:
                link.sendall(data)
            except OSError:  # the broker has gone
                os._exit(0)

    with link.makefile("rb") as lines:
        first = lines.readline()
        if not first:
            return 0
        mirrors = Mirrors(msgspec.json.decode(first, type=MirrorSettings), emit)
        errors = logging.StreamHandler(sys.stderr)
        errors.setFormatter(_Redacted(mirrors.redact))
        logging.basicConfig(level=logging.ERROR, handlers=[errors])
        for line in lines:
            mirrors.handle(json.loads(line))
    os._exit(0)  # threads may wait for a network


class _Redacted(logging.Formatter):
    def __init__(self, redact: Redactor) -> None:
        super().__init__("%(message)s")
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        return self._redact(super().format(record))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

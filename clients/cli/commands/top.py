"""`shmserve top`: a live view of a server, or snapshots of it as text or JSON."""

from __future__ import annotations

import argparse
import importlib.util
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from shmserve.clients.cli.commands.base import connected, print_json, print_text, screen_of
from shmserve.extras import install_command
from shmserve.terminal.errors import Failed, Misuse

if TYPE_CHECKING:
    from shmserve.clients.top.sources import Source


def top(args: argparse.Namespace) -> int:
    live = not (args.once or args.json)
    if live:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise Misuse("a live view needs a terminal; --once prints a snapshot, --json a line at each refresh")
        if os.environ.get("TERM", "dumb") == "dumb":
            raise Misuse(
                "a live view needs a terminal that can move its cursor, and TERM says that this one cannot; use --once"
            )
        if importlib.util.find_spec("textual") is None:
            raise Failed(
                f"a live view needs the package textual: {install_command('top')}; --once and --json work without it"
            )
    sort_key = _sort_key(args.sort, args.table)
    with _source(args) as source:
        if live:
            return _show(args, source, sort_key)
        return _print(args, source, sort_key)


def _sort_key(name: str | None, table: str | None) -> str | None:
    from shmserve.clients.top.plain import tables_of

    if name is None:
        return None
    columns = [column for one in tables_of(table) for column in one.columns]
    for column in columns:
        if name in (column.key, column.head):
            return column.key
    known = list(dict.fromkeys(column.head for column in columns))
    near = get_close_matches(name, known, 1)
    raise Misuse(
        f"unknown column '{name}'; " + (f"did you mean '{near[0]}'?" if near else f"columns: {', '.join(known)}")
    )


@contextmanager
def _source(args: argparse.Namespace) -> Iterator[Source]:
    url = args.url or (os.environ.get("SHMSERVE_URL") if args.runtime_dir is None else None) or ""
    if url.startswith(("http://", "https://")):
        from shmserve.clients.top.http_source import HttpSource

        source = HttpSource(url, args.metrics_url or "", _token(args.token_file))
        try:
            yield source
        finally:
            source.close()
        return
    if args.metrics_url is not None or args.token_file is not None:
        raise Misuse("--metrics-url and --token-file are for --url http://... and https://...")
    from shmserve.clients.top.sources import ServerSource

    with connected(args) as client:
        yield ServerSource(client)


def _token(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        text = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Misuse(f"cannot read a token from {file}: {getattr(error, 'strerror', None) or error}") from error
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise Misuse(f"cannot read a token from {file}: expected one word of ASCII characters")
    return text


def _show(args: argparse.Namespace, source: Source, sort_key: str | None) -> int:
    if screen_of(args).color:
        os.environ.pop("NO_COLOR", None)
    else:
        os.environ["NO_COLOR"] = "1"  # textual reads it when the app is made
    from shmserve.clients.top.app import TopApp

    app = TopApp(source, source.read(), args.interval, args.filter, sort_key, args.table or "models")
    app.run()
    return app.return_code or 0


def _print(args: argparse.Namespace, source: Source, sort_key: str | None) -> int:
    from shmserve.clients.top import plain
    from shmserve.clients.top.view import make_view

    tables = plain.tables_of(args.table)
    before = source.read()
    while True:
        select.select([], [], [], args.interval)
        after = source.read()
        view = make_view(before, after)
        if args.json:
            document = plain.document(view, source.where, tables, args.filter, sort_key)
            print_json(document, indent=2 if args.once else None)
        else:
            print_text(plain.text(view, source.where, tables, args.filter, sort_key, screen_of(args).width))
        sys.stdout.flush()
        if args.once:
            return 0
        before = after

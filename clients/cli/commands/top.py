"""`shmserve top`: shows a live view of one or several servers, or snapshots of them as text or JSON."""

from __future__ import annotations

import argparse
import importlib.util
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from shmserve.clients.cli.commands.base import connected, make_client, print_json, print_text, screen_of
from shmserve.clients.cli.contexts import place_of, token_of
from shmserve.errors import ConnectionLost, InvalidRequest, ServeError
from shmserve.extras import install_command, outdated
from shmserve.terminal.errors import Failed, Misuse

if TYPE_CHECKING:
    from shmserve.tools.top.columns import TopTable
    from shmserve.tools.top.fleet_poller import Pollers
    from shmserve.tools.top.sources import Source
    from shmserve.tools.top.tables_app import TablesApp

HTTP_PORT = 8000
OF_ONE, OF_MANY = ("models", "instances", "clients", "gpus"), ("servers", "models", "by-server")
"""Tables."""
GRACE_S = 5.0
"""How much longer than an interval a snapshot waits for servers that are slow or do not answer."""


def top(args: argparse.Namespace) -> int:
    if args.server and (args.url or args.runtime_dir):
        raise Misuse("name servers either as words, or one by --url or --runtime-dir")
    live = not (args.once or args.json)
    if live:
        _check_terminal()
    if len(args.server) > 1:
        return _top_of_many(args, live)
    try:
        return _top_of_one(args, live)
    except ConnectionLost as error:
        if args.server and args.server[0].isidentifier():
            raise Failed(f"{error}; of a model: did you mean --filter {args.server[0]}?") from error
        raise


def _check_terminal() -> None:
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
    if old := outdated("top"):
        raise Failed(f"a live view cannot be shown: {old}; --once and --json work without it")


def _sort_key(name: str | None, tables: Sequence[TopTable]) -> str | None:
    if name is None:
        return None
    columns = [column for one in tables for column in one.columns]
    for column in columns:
        if name in (column.key, column.head):
            return column.key
    known = list(dict.fromkeys(column.head for column in columns))
    near = get_close_matches(name, known, 1)
    raise Misuse(
        f"unknown column '{name}'; " + (f"did you mean '{near[0]}'?" if near else f"columns: {', '.join(known)}")
    )


# ------------------------------------------------------------------------------------------ one server


def _top_of_one(args: argparse.Namespace, live: bool) -> int:
    if args.server:
        args.url = _url(args.server[0])
    if args.table not in (None, *OF_ONE):
        raise Misuse(f"--table {args.table} is for several servers; of one: {', '.join(OF_ONE)}")
    if len(args.metrics_url) > 1:
        raise Misuse("--metrics-url is given more than once, for one server")
    from shmserve.tools.top.plain import tables_of

    sort_key = _sort_key(args.sort, tables_of(args.table))
    with _source(args) as source:
        if not live:
            return _print(args, source, sort_key)
        _set_colors(args)
        from shmserve.tools.top.app import TopApp

        _run(TopApp(source, source.read(), args.interval, args.filter, sort_key, args.table or "models"))
        return 0


@contextmanager
def _source(args: argparse.Namespace) -> Iterator[Source]:
    place = place_of(args)
    if place.is_http:
        from shmserve.tools.top.http_source import HttpSource

        source = HttpSource(str(place.url), args.metrics_url[0] if args.metrics_url else "", place.token)
        try:
            yield source
        finally:
            source.close()
        return
    if args.metrics_url:
        raise Misuse("--metrics-url is for --url http://... and https://...")
    from shmserve.tools.top.sources import ServerSource

    with connected(args) as client:
        yield ServerSource(client)


def _set_colors(args: argparse.Namespace) -> None:
    """Sets the environment variable that textual reads when an app is created."""
    if screen_of(args).color:
        os.environ.pop("NO_COLOR", None)
    else:
        os.environ["NO_COLOR"] = "1"


def _run(app: TablesApp) -> str | None:
    """Runs a live view and returns its result."""
    result = app.run()
    if app.return_code:
        raise Failed("the live view ended with the error above")
    return result


def _print(args: argparse.Namespace, source: Source, sort_key: str | None) -> int:
    from shmserve.tools.top import plain
    from shmserve.tools.top.view import make_view

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


# ------------------------------------------------------------------------------------------ several servers


def _url(server: str) -> str:
    """The URL of a server; `host` and `host:port` mean HTTP."""
    if "://" in server:
        return server
    try:
        parts = urlsplit(f"http://{server}")
        port, surplus = parts.port, parts.path or parts.query or parts.fragment or parts.username is not None
    except ValueError:  # of the port, or of brackets
        surplus = True
    if surplus or not parts.hostname:
        raise Misuse(f"invalid server '{server}': expected HOST, HOST:PORT or a URL")
    return f"http://{server}" if port else f"http://{parts.netloc.removesuffix(':')}:{HTTP_PORT}"


def _openers(args: argparse.Namespace) -> dict[str, Callable[[], Source]]:
    """Displayed name -> function that makes the source. A source connects when it is read, so a server that is down
    raises no error here."""
    from shmserve.tools.top.http_source import HttpSource

    metrics = iter(args.metrics_url)
    results: dict[str, Callable[[], Source]] = {}
    urls = {server: _url(server) for server in args.server}
    over_http = [url for url in urls.values() if url.startswith(("http://", "https://"))]
    token = token_of(args.token_file, *over_http) if args.token_file is not None else ""
    if len(set(urls.values())) < len(args.server):
        raise Misuse("a server is named twice")
    if args.metrics_url and len(args.metrics_url) != len(over_http):
        raise Misuse(f"--metrics-url is given {len(args.metrics_url)} times, for {len(over_http)} servers over HTTP")
    if token and not over_http:
        raise Misuse("--token-file is for servers over HTTP")
    for server, url in urls.items():
        name = server.removeprefix("http://")
        if url in over_http:
            results[name] = partial(HttpSource, url, next(metrics, ""), token)
        else:
            results[name] = partial(_server_source, argparse.Namespace(**vars(args) | {"url": url}))
    return results


def _server_source(args: argparse.Namespace) -> Source:
    from shmserve.tools.top.sources import ServerSource

    return ServerSource(make_client(args))


def _top_of_many(args: argparse.Namespace, live: bool) -> int:
    from shmserve.tools.top.fleet_poller import Pollers
    from shmserve.tools.top.fleet_totals import FLEET_TABLES
    from shmserve.tools.top.plain import tables_of

    if args.table not in (None, *OF_MANY):
        raise Misuse(f"--table {args.table} is for one server; of several: {', '.join(OF_MANY)}")
    sort_key = _sort_key(args.sort, tables_of(args.table, FLEET_TABLES))
    openers = _openers(args)
    with ExitStack() as stack:
        sources = {}
        for name, opened in openers.items():
            try:
                sources[name] = opened()
            except InvalidRequest as error:
                raise Misuse(str(error)) from error
            stack.callback(sources[name].close)
        fleet = stack.enter_context(Pollers(sources, args.interval))
        if live:
            return _show_many(args, fleet, openers, sort_key)
        return _print_many(args, fleet, sort_key)


def _show_many(
    args: argparse.Namespace, fleet: Pollers, openers: dict[str, Callable[[], Source]], sort_key: str | None
) -> int:
    """Shows the view of all servers, and that of one server whenever it is selected, until the user quits."""
    from shmserve.tools.top.app import TopApp
    from shmserve.tools.top.fleet_app import FleetApp

    _set_colors(args)
    message = ""
    while True:
        name = _run(FleetApp(fleet, args.interval, args.filter, sort_key, args.table or "servers", message))
        if not name:
            return 0
        message = ""
        source = openers[name]()
        try:
            if _run(TopApp(source, source.read(), args.interval, end_key="all servers")) is None:
                return 0
        except ServeError as error:
            message = f"{name}: {error}"
        finally:
            source.close()


def _print_many(args: argparse.Namespace, fleet: Pollers, sort_key: str | None) -> int:
    from shmserve.tools.top import plain
    from shmserve.tools.top.fleet_totals import FLEET_TABLES, make_fleet_view

    tables = plain.tables_of(args.table, FLEET_TABLES)
    fleet.wait(args.interval + GRACE_S)
    while True:
        view = make_fleet_view(fleet.snapshots, time.monotonic(), args.interval)
        if args.json:
            document: dict[str, Any] = plain.fleet_document(view, tables, args.filter, sort_key)
            print_json(document, indent=2 if args.once else None)
        else:
            print_text(plain.fleet_text(view, tables, args.filter, sort_key, screen_of(args).width))
        sys.stdout.flush()
        if args.once:
            return 0 if any(snapshot.answered is not None for snapshot in fleet.snapshots) else 1
        select.select([], [], [], args.interval)

"""`shmserve context`: names for servers, one of which is the default of all commands."""

from __future__ import annotations

import argparse
import os

import msgspec

from shmserve.clients.cli.commands.base import print_json, print_text, screen_of
from shmserve.clients.cli.contexts import Contexts, Place, read, write
from shmserve.terminal.console import Column

TABLE = (Column("context"), Column("url"), Column("token file", free=True))


def context(args: argparse.Namespace) -> int:
    contexts = read()
    if args.do in ("use", "remove"):
        contexts.find(args.name)
    match args.do:
        case "add":
            contexts.places[args.name] = _place(args)
            contexts.current = contexts.current or args.name
        case "use":
            contexts.current = args.name
        case "remove":
            del contexts.places[args.name]
            contexts.current = "" if contexts.current == args.name else contexts.current
        case _:
            return _list(args, contexts)
    write(contexts)
    print(f"commands connect to {contexts.current}" if contexts.current else "no context is the current one")
    return 0


def _place(args: argparse.Namespace) -> Place:
    """Files are kept with absolute paths, because commands run in other directories."""
    files = {name: os.path.abspath(file) for name in ("token_file", "key_file") if (file := getattr(args, name))}
    key = args.server_key
    return Place(url=args.address, server_key=os.path.abspath(key) if key and os.path.exists(key) else key, **files)


def _list(args: argparse.Namespace, contexts: Contexts) -> int:
    if args.json:
        print_json(msgspec.to_builtins(contexts))
        return 0
    rows = [
        [f"{name}{'*' if name == contexts.current else ''}", place.url or "-", place.token_file or "-"]
        for name, place in contexts.places.items()
    ]
    print_text(f"{screen_of(args).table(TABLE, rows)}\n\n* current context" if rows else "no contexts")
    return 0

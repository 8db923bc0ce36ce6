"""`shmserve keygen`: creates keys for ZeroMQ over tcp. Invariant: existing files are never overwritten."""

from __future__ import annotations

import argparse
import re
import socket

from shmserve.clients.cli.commands.base import print_json
from shmserve.protocol.roles import roles_of
from shmserve.terminal.errors import Failed, Misuse
from shmserve.transport import keys

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")


def keygen(args: argparse.Namespace) -> int:
    name = args.name or socket.gethostname().partition(".")[0] or "shmserve"
    if not _NAME.fullmatch(name):
        raise Misuse(
            f"'{name}' is not a valid key name: up to 64 letters, digits and . _ - @, the first a letter or digit"
        )
    try:
        roles_of(args.roles)
    except ValueError as error:
        raise Misuse(str(error)) from error
    pair = keys.make_pair()
    try:
        args.out.mkdir(mode=0o700, parents=True, exist_ok=True)
        key, public = keys.write_pair(args.out, name, pair, args.roles)
    except OSError as error:
        where = error.filename or args.out
        raise Failed(f"cannot write {where}: {error.strerror}; use another NAME or --out") from error
    if args.json:
        print_json({"name": name, "public_key": pair.public, "key_file": str(key), "public_file": str(public)})
        return 0
    print(f"""{key}  secret key: keep it where it is used
{public}  public key: give it to the other side

For a server: shmserve serve ... --zmq-address tcp://127.0.0.1:8790 --zmq-server-key {key} --zmq-keys FILE
              give {public} to its clients, as server_key= or --server-key
For a client: shmserve models --url tcp://HOST:8790 --key-file {key} --server-key SERVER.pub
              the server's operator adds the line in {public} to the file of --zmq-keys""")
    return 0

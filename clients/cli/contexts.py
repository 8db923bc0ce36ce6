"""The server that a command connects to: from its options, the environment, or a named context.

Contexts are in a file of the user's configuration. Invariant: the file has no secrets, only the paths of their files.
"""

from __future__ import annotations

import argparse
import os
import sys
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from shmserve.system.files import new_file
from shmserve.terminal.errors import Failed, Misuse


class Place(Struct, frozen=True, omit_defaults=True):
    """Where a server is, as in the options of the same names. Without `url` and `runtime_dir`: this user's server."""

    url: str | None = None
    runtime_dir: str | None = None
    token_file: str | None = None
    server_key: str | None = None
    key_file: str | None = None

    @property
    def is_http(self) -> bool:
        return self.url is not None and self.url.startswith(("http://", "https://"))

    @property
    def token(self) -> str:
        return "" if self.token_file is None else token_of(Path(self.token_file), str(self.url))


class Contexts(Struct, omit_defaults=True):
    current: str = ""
    places: dict[str, Place] = {}

    def find(self, name: str) -> Place:
        if name not in self.places:
            known = ", ".join(self.places) or "none; `shmserve context add NAME URL` adds one"
            raise Misuse(f"there is no context '{name}'; contexts: {known}")
        return self.places[name]


def path() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(home) / "shmserve" / "contexts.json"


def read() -> Contexts:
    try:
        return msgspec.json.decode(path().read_bytes(), type=Contexts)
    except FileNotFoundError:
        return Contexts()
    except (OSError, msgspec.MsgspecError) as error:
        raise Failed(f"cannot read the contexts in {path()}: {error}") from error


def write(contexts: Contexts) -> None:
    """Replaces the file as a whole, so that no reader sees a part of it."""
    target = path()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with new_file(target) as part:
            part.write_bytes(msgspec.json.format(msgspec.json.encode(contexts)))
    except OSError as error:
        raise Failed(f"cannot write the contexts to {target}: {error.strerror}") from error


def place_of(args: argparse.Namespace, url: str | None = None) -> Place:
    """Options, then the environment, then the current context, then this user's server. `url`: from another option."""
    options = Place(
        url=url or args.url,
        runtime_dir=args.runtime_dir,
        token_file=os.fspath(args.token_file) if args.token_file is not None else None,
        server_key=args.server_key,
        key_file=args.key_file,
    )
    place = _selected(args.context, options)
    if options.token_file and not place.is_http:
        raise Misuse("--token-file is for servers at http://... and https://...")
    return place


def _selected(name: str | None, options: Place) -> Place:
    if name is None:
        if options.url or options.runtime_dir:
            return options
        if url := os.environ.get("SHMSERVE_URL"):
            return msgspec.structs.replace(options, url=url)
        if os.environ.get("SHMSERVE_RUNTIME_DIR"):
            return options
    contexts = read()
    name = name or contexts.current
    if not name:
        return options
    overriding = {field: value for field in Place.__struct_fields__ if (value := getattr(options, field)) is not None}
    return msgspec.structs.replace(contexts.find(name), **overriding)


def token_of(file: Path, *urls: str) -> str:
    """`urls`: of the servers that it is sent to. Warns if others can read it on the way."""
    try:
        text = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Misuse(f"cannot read a token from {file}: {getattr(error, 'strerror', None) or error}") from error
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise Misuse(f"cannot read a token from {file}: expected one word of ASCII characters")
    for url in urls:
        if _is_exposed(url):
            print(f"shmserve: warning: the token is sent to {url} without encryption; use https://", file=sys.stderr)
    return text


def _is_exposed(url: str) -> bool:
    """Whether others can read what is sent to this URL."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False  # the connection reports that it is invalid
    return parts.scheme == "http" and not _is_loopback(parts.hostname or "")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")

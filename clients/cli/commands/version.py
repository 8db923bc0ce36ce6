"""`shmserve version`: prints the version of the program, and of a server if one is named."""

from __future__ import annotations

import argparse

import shmserve
from shmserve.clients.cli.commands.base import connected, print_json


def version(args: argparse.Namespace) -> int:
    """Queries the server only if one is given; otherwise the client is not imported."""
    versions = {"shmserve": shmserve.__version__}
    if any(option is not None for option in (args.url, args.runtime_dir, args.context)):
        with connected(args) as client:
            versions["server"] = client.metadata()["version"]
    if args.json:
        print_json(versions)
    else:
        print(f"shmserve {versions['shmserve']}")
        if "server" in versions:
            print(f"the server is version {versions['server']}")
    return 0

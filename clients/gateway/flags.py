"""The options of `shmserve gateway`. The rule of the file: only argparse is imported, as `shmserve --help` has to be
quick.
"""

from __future__ import annotations

import argparse

INFER, OBSERVE, OPERATE = "infer", "observe", "operate"
ROLES = (INFER, OBSERVE, OPERATE)
"""What a door lets callers do."""


def add(made: argparse.ArgumentParser) -> None:
    option = made.add_argument
    option("--http-address", metavar="ADDRESS", default="127.0.0.1",
           help="where HTTP is listened for (default: %(default)s, this machine alone)")  # fmt: skip
    option("--http-port", metavar="N", type=_port, default=8000, help="its port (default: %(default)s; 0: any)")
    option("--metrics-address", metavar="ADDRESS", help="where Prometheus is listened for (default: as --http-address)")
    option("--metrics-port", metavar="N", type=_port, default=8002, help="its port (default: %(default)s; 0: any)")
    option("--no-metrics", action="store_true", help="no door for Prometheus")
    option("--http-roles", metavar="ROLE,ROLE", type=_roles, default=f"{INFER},{OBSERVE}",
           help=f"what callers may do, of {', '.join(ROLES)} (default: %(default)s)")  # fmt: skip
    option("--allow-client-shm", metavar="BOOL", type=_bool, nargs="?", const=True, default=False,
           help="callers may register shared memory of this machine (default: false)")  # fmt: skip
    option("--reuse-port", action="store_true", help="several gateways may listen on the same ports")
    option("--http-max-input-size", metavar="BYTES", type=_above_0, default=64 << 20,
           help="of a body, also when it is decompressed (default: %(default)s)")  # fmt: skip
    option("--http-max-json-size", metavar="BYTES", type=_above_0, default=16 << 20,
           help="of the JSON in a request to a model (default: %(default)s)")  # fmt: skip
    option("--http-max-held-size", metavar="BYTES", type=_above_0, default=1 << 30,
           help="of the large bodies of all requests together (default: %(default)s)")  # fmt: skip
    option("--http-max-connections", metavar="N", type=_above_0, default=4096, help="(default: %(default)s)")
    option("--http-read-timeout", metavar="SECONDS", type=_seconds, default=60.0,
           help="for a request that does not go on, or a caller who does not read (default: %(default)g)")  # fmt: skip
    option("--http-idle-timeout", metavar="SECONDS", type=_seconds, default=600.0,
           help="between two requests (default: %(default)g)")  # fmt: skip
    option("--exit-timeout-secs", metavar="SECONDS", type=_seconds, default=30.0,
           help="for requests in flight at the end (default: %(default)g)")  # fmt: skip
    option("--memory-bytes", metavar="BYTES", type=_above_0, default=4 << 30,
           help="the most shared memory for tensors that come in (default: %(default)s)")  # fmt: skip
    option(
        "--ready-fd", metavar="N", type=int, help="a descriptor to which READY is written, and DOOR=PORT for each door"
    )
    option("--parent", metavar="PID", type=int, help=argparse.SUPPRESS)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port, which is a number from 0 to 65535")
    return int(text)


def _bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text == "true"


def _above_0(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return found


def _roles(text: str) -> str:
    for name in text.split(","):
        if name not in ROLES:
            raise argparse.ArgumentTypeError(f"{name!r} is no role; roles are {', '.join(ROLES)}")
    return text
